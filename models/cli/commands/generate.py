"""`jax-q4k generate`: continues prompts."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from jax_q4k import models

from ...sampling import Sampling
from ..answers import AnswerWriter
from ..arguments import add_model
from ..clock import Clock
from ..options import add_context_shift, add_running, add_sampling, implementation_of, sampling_of
from ..output import (
    UsageError,
    load_model,
    loaded_draft,
    printable,
    reading_status,
    timings_line,
)
from ..prompts import add_prompts, add_show_thinking, add_template, ids_of, texts_of
from ..results import described

if TYPE_CHECKING:
    from ...engine.answers import ChatAnswer
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
    parser.add_argument(
        "--parse-special",
        "--special",
        action="store_true",
        help="read special tokens in the prompt, such as <|im_start|>, as tokens instead of text",
    )
    add_template(parser)
    add_show_thinking(parser)
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
    of_chats = options.system is not None or options.no_thinking or options.show_thinking
    if of_chats and not options.chat:
        raise UsageError("--system, --no-thinking and --show-thinking need --chat")
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
    answers: list[ChatAnswer | None] = [None] * len(prompts)
    if options.chat:
        answers = [_answer(model, *pair) for pair in zip(prompts, samplings, strict=True)]
        samplings = [answer.sampling for answer in answers if answer is not None]
    with implementation_of(options):
        if len(prompts) == 1 and not (options.json or options.jsonl):
            pieces = _pieces(model, prompts[0], samplings[0], settings, notes)
            outputs = [_streamed(options, model, texts[0], pieces, answers[0], notes)]
        else:
            outputs = _batch(model, prompts, samplings, settings, notes)
            outputs = [_split(*pair) for pair in zip(outputs, answers, strict=True)]
            rows = list(zip(texts, prompts, outputs, samplings, strict=True))
            _write(options, model, rows, clock, notes)
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
    with reading_status(notes):
        try:
            return models.generate(model, prompts, rows, **settings)
        except (ValueError, TypeError) as error:
            raise UsageError(error) from error


def _answer(model: Model, ids: list[int], sampling: Sampling) -> ChatAnswer:
    from ...engine.answers import ChatAnswer

    assert model.tokenizer is not None
    return ChatAnswer(model.tokenizer, ids, sampling)


def _split(output: Output, answer: ChatAnswer | None) -> Output:
    """Returns an output with its thoughts apart from its text."""
    if answer is None:
        return output
    from ...engine.outputs import Piece

    return answer.split(Piece(None, output.text or "", output)).output or output


def _pieces(
    model: Model, ids: list[int], sampling: Sampling, settings: dict[str, Any], notes: Console
) -> Iterator[Piece]:
    """Returns the pieces of a text whose first has been generated."""
    try:
        pieces = models.stream(model, ids, sampling, **settings)
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error
    with reading_status(notes):
        first = next(pieces)
    return itertools.chain((first,), pieces)


def _streamed(
    options: argparse.Namespace,
    model: Model,
    text: str | list[int],
    pieces: Iterator[Piece],
    answer: ChatAnswer | None,
    notes: Console,
) -> Output:
    """Writes the pieces of a text as they come, behind its prompt on a terminal."""
    if sys.stdout.isatty() and isinstance(text, str):
        end = "" if answer is None else "\n"
        Console(highlight=False).print(escape(printable(text)), style="dim", end=end)
    if answer is None:
        return _write_pieces(pieces, as_ids=model.tokenizer is None)
    output = None
    with AnswerWriter(notes, shows_thoughts=options.show_thinking) as writer:
        for piece in map(answer.split, pieces):
            writer.write(piece)
            output = piece.output
    assert output is not None
    return output


def _write_pieces(pieces: Iterator[Piece], *, as_ids: bool) -> Output:
    """Writes the text or token ids as they come; returns the last piece's output."""
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
    notes: Console,
) -> None:
    """Writes all outputs as JSON, or as texts separated by lines of ---; thoughts to `notes`.

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
        if options.show_thinking and output.reasoning:
            notes.out(printable(output.reasoning), style="dim", highlight=False)
        sys.stdout.write(("---\n" if i else "") + printable(shown) + "\n")
