"""`jax-q4k split`: splits a GGUF file into several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

import jax_q4k as jq

from ..output import UsageError, bytes_progress
from ..targets import byte_count, check_targets


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "split",
        help="split a GGUF file into several",
        description="Split a GGUF file into OUT-00001-of-00003.gguf, ..., as llama-gguf-split "
        "does. Every command takes the first part as MODEL.",
    )
    parser.set_defaults(command=_split)
    parser.add_argument("file", metavar="FILE.gguf", help="the file to split")
    parser.add_argument("target", metavar="OUT", help="name of the parts")
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument(
        "--max-size", type=byte_count, metavar="N[M|G]", help="most bytes of weights per file"
    )
    limit.add_argument("--max-tensors", type=int, metavar="N", help="most tensors per file")
    add_force(parser)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Adds --force."""
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def _split(options: argparse.Namespace, notes: Console) -> None:
    target = Path(f"{options.target.removesuffix('.gguf')}.gguf")
    limits = {"max_bytes": options.max_size, "max_tensors": options.max_tensors}
    copy(options.file, target, options.force, notes, "Splitting", **limits)


def copy(
    file: str, target: Path, force: bool, notes: Console, title: str, **limits: int | None
) -> None:
    """Calls `gguf.copy` with a progress bar, and names the files that it writes."""
    check_targets(Path(file), target, parts=bool(limits), force=force)
    try:
        with bytes_progress(title, notes) as report:
            written = jq.gguf.copy(file, target, progress=report, **limits)
    except (ValueError, TypeError) as error:
        if isinstance(error, jq.GGUFError):
            raise
        raise UsageError(error) from error
    for path in written:
        print(path)
