"""`jax-q4k generate`: continue a prompt."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape

import jax_q4k as jq

from .. import chat
from ..generation import Output, Piece, stream
from ..model import Model
from .options import (
    add_model_or_demo,
    add_running,
    add_sampling,
    model_path,
    sampling_fields,
)
from .output import UsageError, load_model, loaded_draft, printable, timings_line


def add_parser(commands: Any) -> None:
    generate = commands.add_parser(
        "generate", help="continue a prompt", description="Continue a prompt."
    )
    generate.set_defaults(command=_generate, runs_programs=True)
    add_model_or_demo(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--tokens", metavar="IDS", help="prompt as token ids: 1,15043,29892")
    generate.add_argument(
        "--chat", action="store_true", help="put the prompt into the file's chat template"
    )
    add_sampling(generate)
    add_running(generate)


def _generate(options: argparse.Namespace, notes: Console) -> None:
    model = load_model(model_path(options), notes, options.devices)
    model.kept = options.kept
    prompt, draft = _prompt(options, model), loaded_draft(options, notes)
    with jq.implementation(options.implementation):
        try:
            fields = sampling_fields(options) | {"draft": draft}
            pieces = stream(model, prompt, cache_dtype=options.cache_dtype, **fields)
        except (ValueError, TypeError) as error:
            raise UsageError(error) from error
        with (
            notes.status("Compiling, reading the prompt")
            if notes.is_terminal
            else contextlib.nullcontext()
        ):
            first = next(pieces)
        if sys.stdout.isatty() and options.prompt is not None:
            Console(highlight=False).print(escape(printable(options.prompt)), style="dim", end="")
        output = _write(itertools.chain((first,), pieces), as_ids=model.tokenizer is None)
    notes.print(f"[dim]{timings_line(output.timings)}[/]", soft_wrap=True)


def _prompt(options: argparse.Namespace, model: Model) -> str | list[int]:
    if options.tokens is not None:
        if options.chat:
            raise UsageError("--chat needs the prompt as text, not as --tokens")
        try:
            return [int(part) for part in options.tokens.split(",")]
        except ValueError:
            raise UsageError(
                f"--tokens {options.tokens!r} must be integers between commas"
            ) from None
    if model.tokenizer is None:
        raise UsageError(f"{options.model} holds no tokenizer: give the prompt as --tokens")
    if not options.chat:
        return options.prompt
    try:
        return chat.encode(model.tokenizer, [{"role": "user", "content": options.prompt}])
    except ValueError as error:
        raise UsageError(error) from error


def _write(pieces: Iterable[Piece], *, as_ids: bool) -> Output:
    """Writes the text piece by piece, or token ids; returns the last piece's output."""
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
