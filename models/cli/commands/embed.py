"""`jax-q4k embed`: prints embeddings of texts as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

from jax_q4k import models

from ...config.pooling import POOLINGS
from ..arguments import add_model
from ..options import add_devices, add_implementation, add_no_cache, implementation_of
from ..output import UsageError, load_model, progress
from ..prompts import is_piped, read_up_to

MAX_TEXT = 1 << 30  # bytes; a limit for endless files such as /dev/zero


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "embed",
        help="compute embeddings of texts",
        description="Print embeddings of texts, the output of the model's final norm, in the JSON "
        "format of OpenAI's API.",
    )
    parser.set_defaults(command=_embed, runs_programs=True)
    add_model(parser)
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument(
        "-p", "--prompt", action="append", dest="prompts", metavar="TEXT", help="may be repeated"
    )
    texts.add_argument(
        "-f", "--file", metavar="FILE", help="UTF-8, one text per line; -: standard input"
    )
    parser.set_defaults(takes_prompt=str)
    parser.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="mean of all tokens, last token, first token (cls), or one vector per token (none); "
        "default: the model file's, else mean",
    )
    parser.add_argument(
        "--task",
        metavar="TASK",
        help="task whose adapter and prompt apply, such as retrieval.query; default: none",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="scale vectors to length 1; default: on",
    )
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _embed(options: argparse.Namespace, notes: Console) -> None:
    texts = given_texts(options.prompts, options.file, "no text: give -p TEXT")
    model = load_model(options.model, notes, options.devices)
    with (
        progress("Texts", notes, MofNCompleteColumn()) as report,
        implementation_of(options),
    ):
        try:
            vectors = models.embed(
                model,
                texts,
                pooling=options.pooling,
                normalize=options.normalize,
                task=options.task,
                progress=report,
            )
        except ValueError as error:
            raise UsageError(error) from error
    from ...tasks.embeddings import numbers

    # One line per vector; indented JSON would use a line per number.
    rows = (
        json.dumps({"object": "embedding", "index": i, "embedding": numbers(vector)})
        for i, vector in enumerate(vectors)
    )
    print('{"object": "list", "data": [\n' + ",\n".join(rows) + "\n]}")


def given_texts(texts: list[str] | None, file: str | None, missing: str) -> list[str]:
    """Returns texts of options, or the lines of a file or of a pipe; raises UsageError.

    missing: beginning of the message if there is none of them.
    """
    if file is None and texts is not None:
        return texts
    if file is None and not is_piped():
        raise UsageError(f"{missing}, -f FILE, or pipe lines of text")
    return _lines_of(file or "-")


def _lines_of(path: str) -> list[str]:
    """Returns the lines of a UTF-8 file, "-" for standard input; raises UsageError."""
    data = read_up_to(MAX_TEXT + 1, path)
    if len(data) > MAX_TEXT:
        raise UsageError(f"{path} holds more than {MAX_TEXT:,} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}") from error
    lines = text.replace("\r\n", "\n").split("\n")  # texts may contain other line separators
    return lines[:-1] if lines[-1] == "" else lines
