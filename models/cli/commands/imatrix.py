"""`jax-q4k imatrix`: collects an importance matrix, which `quantize --imatrix` uses."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn

from jax_q4k import models

from .. import INTERRUPTED, interrupts
from ..arguments import add_model
from ..options import add_activations, add_implementation, add_no_cache, implementation_of
from ..output import UsageError, load_model, progress, warnings_in_a_line
from ..prompts import read_text

if TYPE_CHECKING:
    from ...runner.model import Model


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "imatrix",
        help="collect an importance matrix for quantize",
        description="Sum the squared activations of every column of a model's matrices over a "
        "text, like llama.cpp's llama-imatrix. Use a text like those that the model will read.",
    )
    parser.set_defaults(command=_imatrix, runs_programs=True)
    add_model(parser)
    parser.add_argument("text", metavar="TEXT.txt", help="a UTF-8 file")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    parser.add_argument(
        "--format",
        choices=("gguf", "dat"),
        default="gguf",
        help="dat: llama.cpp's older format; default: gguf",
    )
    parser.add_argument(
        "--in-file",
        metavar="FILE",
        help="add to the sums of this importance matrix, for instance of another text or of a "
        "command that was interrupted",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens per chunk; default: the model's, up to 512",
    )
    parser.add_argument(
        "--from-chunk",
        type=int,
        default=0,
        metavar="N",
        help="leave out the first N chunks of the text; default: 0",
    )
    parser.add_argument("--chunks", type=int, metavar="N", help="most chunks; default: all")
    parser.add_argument(
        "--save-every",
        type=int,
        default=10,
        metavar="N",
        help="write the file after every N chunks; default: 10",
    )
    parser.add_argument(
        "--output-tensor", action="store_true", help="include the output matrix (output.weight)"
    )
    parser.add_argument(
        "--parse-special", action="store_true", help="parse control tokens in the text"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add_activations(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _imatrix(options: argparse.Namespace, notes: Console) -> int | None:
    target = Path(options.output)
    continued = options.in_file is not None and target.exists()
    continued = continued and os.path.exists(options.in_file) and target.samefile(options.in_file)
    if target.exists() and not options.force and not continued:
        raise UsageError(f"{target} already exists; --force replaces it")
    for name in ("save_every", "chunks", "from_chunk"):
        least = 0 if name == "from_chunk" else 1
        if (value := getattr(options, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    text = read_text(options.text)
    model = load_model(options.model, notes)
    try:
        with (
            interrupts.noticing() as pressed,
            progress("Chunks", notes, MofNCompleteColumn()) as report,
            implementation_of(options),
        ):
            done, total = _collect(options, model, text, pressed, report, notes)
    except ValueError as error:
        raise UsageError(error) from error
    if done == total:
        print(options.output)
        return None
    more = f"--in-file {options.output} --from-chunk {options.from_chunk + done}"
    notes.print(f"Saved {done} of {total} chunks; {escape(more)} continues.", soft_wrap=True)
    return INTERRUPTED


def _collect(
    options: argparse.Namespace,
    model: Model,
    text: str,
    pressed: interrupts.Pressed,
    report: Callable[[int, int], object],
    notes: Console,
) -> tuple[int, int]:
    """Collects and saves the matrix until Ctrl-C; returns (chunks done, number of chunks)."""
    from ...tasks.imatrix import collected  # imports JAX

    start = None
    if options.in_file is not None:
        chunk_size = options.context or min(model.config.context_length, 512)
        start = models.load_imatrix(options.in_file, chunk_size=chunk_size)
    done = total = 0
    for done, total, found in collected(
        model,
        text,
        context=options.context,
        first=options.from_chunk,
        chunks=options.chunks,
        output=options.output_tensor,
        parse_special=options.parse_special,
        dataset=options.text,
    ):
        report(done, total)
        last = pressed.once or done == total
        if last or done % options.save_every == 0:
            matrix = found if start is None else start.added(found)
            with warnings_in_a_line(notes) if last else warnings.catch_warnings(action="ignore"):
                models.save_imatrix(matrix, options.output, options.format)
        if pressed.once:
            break
    return done, total
