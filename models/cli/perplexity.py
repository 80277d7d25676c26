"""`jax-q4k perplexity`: a text's perplexity and bits per byte."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

import jax_q4k as jq

from ..perplexity import score
from .options import add_devices, add_implementation, add_model, add_no_cache
from .output import UsageError, load_model, progress

MAX_TEXT = 1 << 30  # bytes; /dev/zero never ends


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "perplexity",
        help="score a text",
        description="Perplexity per token and bits per byte of a text, predicted in windows that "
        "do not overlap. All tokens of a window count; llama.cpp counts those of its second half.",
    )
    parser.set_defaults(command=_perplexity, runs_programs=True)
    add_model(parser)
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 file")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens per window; default: the model's, up to 512",
    )
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _read(path: str) -> str:
    with open(path, "rb") as file:  # perhaps a pipe
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise UsageError(f"{path} holds more than {MAX_TEXT:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}") from error


def _perplexity(options: argparse.Namespace, notes: Console) -> None:
    text = _read(options.text)
    model = load_model(options.model, notes, options.devices)
    with (
        progress("Windows", notes, MofNCompleteColumn()) as report,
        jq.implementation(options.implementation),
    ):
        try:
            found = score(model, text, context=options.context, progress=report)
        except ValueError as error:
            raise UsageError(error) from error
    print(f"{found.bits_per_byte:.4f} bits per byte, perplexity {found.perplexity:.3f} per token")
    notes.print(f"[dim]{found.tokens} tokens, {found.bytes} bytes[/]", soft_wrap=True)
