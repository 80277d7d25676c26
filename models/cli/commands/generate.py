"""`jax-q4k generate`: continues prompts."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

import jax_q4k as jq
from jax_q4k import models

from ...sampling import Sampling
from ..arguments import add_model
from ..clock import Clock
from ..options import (
    add_context_shift,
    add_running,
    add_sampling,
    sampling_of,
)
from ..output import UsageError, load_model, loaded_draft, printable, timings_line
from ..prompts import add_prompts, add_template, ids_of, texts_of
from ..results import described

if TYPE_CHECKING:
    from ...engine.outputs import Output, Piece
    from ...engine.request import ContextShift
    from ...runner.model import Model

EXAMPLES = """\
examples:
  jax-q4k generate demo "The sea was" -n 32
  cat letter.txt | jax-q4k generate MODEL.gguf
  jax-q4k generate MODEL.gguf --chat -p "Why is the sea salt?"
  jax-q4k generate MODEL.gguf -f prompt.txt --temperature 0
  jax-q4k generate MODEL.gguf -p "The sea" -p "The moon" --jsonl"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt, or several.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_generate, runs_programs=True)
    add_model(parser)
    add_prompts(parser)
    parser.add_argument(
        "--chat", action="store_true", help="insert the prompt into the file's chat template"
    )
    add_template(parser)
    written = parser.add_mutually_exclusive_group()
    written.add_argument(
        "--json", action="store_true", help="write one JSON object: outputs, tokens, timings"
    )
    written.add_argument("--jsonl", action="store_true", help="write one line of JSON per prompt")
    add_sampling(parser)
    running = parser.add_argument_group("running")
    add_context_shift(running)
    add_running(running)


def _generate(options: argparse.Namespace, notes: Console) -> None:
    clock = Clock()
    if not options.chat and (options.system is not None or options.no_thinking):
        raise UsageError("--system and --no-thinking need --chat")
    texts = texts_of(options)
    with clock.loading():
        model = load_model(options.model, notes, options.devices, options.lora)
    model.program_cache = options.programs
    prompts, sampling = ids_of(texts, model, options), sampling_of(options, model, notes)
    with clock.loading():
        draft = loaded_draft(options, notes)
    shift = _shift(options)
    settings = {"cache_dtype": options.cache_dtype, "draft": draft, "shift": shift}
    samplings = [sampling] * len(prompts)
    if shift is None:
        samplings = [_within(model, ids, sampling, notes) for ids in prompts]
    with jq.implementation(options.implementation):
        if len(prompts) == 1 and not (options.json or options.jsonl):
            outputs = [_streamed(model, prompts[0], texts[0], samplings[0], settings, notes)]
        else:
            outputs = _batch(model, prompts, samplings, settings, notes)
            rows = list(zip(texts, prompts, outputs, samplings, strict=True))
            _write(options, model, rows, clock)
    seed = None if sampling.greedy else sampling.seed
    notes.print(f"[dim]{timings_line(outputs[0].timings, clock, seed)}[/]", soft_wrap=True)


def _shift(options: argparse.Namespace) -> ContextShift | None:
    try:
        return models.ContextShift(options.keep) if options.context_shift else None
    except ValueError as error:
        raise UsageError(error) from error


def _within(model: Model, ids: list[int], sampling: Sampling, notes: Console) -> Sampling:
    """Limits the new tokens to the free context, and prints a note if it does."""
    left = model.config.context_length - len(ids)
    if left < 1 or sampling.max_new_tokens <= left:  # `generate` rejects a prompt that is too long
        return sampling
    notes.print(
        f"[dim]The context of {model.config.context_length} tokens has room for {left} new "
        f"ones, not -n {sampling.max_new_tokens}; --context-shift continues beyond it.[/]",
        soft_wrap=True,
    )
    return sampling.replaced(max_new_tokens=left)


def _batch(
    model: Model,
    prompts: list[list[int]],
    samplings: list[Sampling],
    settings: dict[str, Any],
    notes: Console,
) -> list[Output]:
    rows = [s.replaced(seed=(s.seed + i) % 2**32) for i, s in enumerate(samplings)]
    with _status(notes):
        try:
            return models.generate(model, prompts, rows, **settings)
        except (ValueError, TypeError) as error:
            raise UsageError(error) from error


def _streamed(
    model: Model,
    ids: list[int],
    text: str | list[int],
    sampling: Sampling,
    settings: dict[str, Any],
    notes: Console,
) -> Output:
    try:
        pieces = models.stream(model, ids, sampling, **settings)
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error
    with _status(notes):
        first = next(pieces)
    if sys.stdout.isatty() and isinstance(text, str):
        Console(highlight=False).print(escape(printable(text)), style="dim", end="")
    return _write_pieces(itertools.chain((first,), pieces), as_ids=model.tokenizer is None)


def _status(notes: Console) -> contextlib.AbstractContextManager[Any]:
    return (
        notes.status("Compiling, reading the prompt")
        if notes.is_terminal
        else contextlib.nullcontext()
    )


def _write_pieces(pieces: Iterable[Piece], *, as_ids: bool) -> Output:
    """Streams the text or token ids; returns the last piece's output."""
    output = None
    for piece in pieces:
        text = f"{piece.token} " if as_ids and piece.token is not None else piece.text
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        output = piece.output
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert output is not None
    return output


def _write(
    options: argparse.Namespace,
    model: Model,
    rows: list[tuple[str | list[int], list[int], Output, Sampling]],
    clock: Clock,
) -> None:
    """Writes all outputs as JSON, or as texts separated by lines of ---.

    rows: text, ids, output and sampling parameters of each prompt.
    """
    outputs = [output for _, _, output, _ in rows]
    if options.json or options.jsonl:
        found = [described(model, i, *row) for i, row in enumerate(rows)]
        if options.jsonl:
            lines = [json.dumps(one, ensure_ascii=False) for one in found]
        else:
            timings = clock.described(outputs[0].timings)
            lines = [json.dumps({"outputs": found, "timings": timings}, ensure_ascii=False)]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return
    for i, output in enumerate(outputs):
        shown = " ".join(map(str, output.tokens)) if output.text is None else output.text
        sys.stdout.write(("---\n" if i else "") + printable(shown) + "\n")
