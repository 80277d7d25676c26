"""`jax-q4k join`: joins the files of a split model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from .split import add_force, copy


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "join",
        help="join the files of a split model",
        description="Join the files of a split model into one, as llama-gguf-split --merge does. "
        "The other parts must be in the folder of the first.",
    )
    parser.set_defaults(command=_join)
    parser.add_argument("first", metavar="FILE-00001-of-0000N.gguf", help="the first part")
    parser.add_argument("target", metavar="OUT.gguf", help="the file to write")
    add_force(parser)


def _join(options: argparse.Namespace, notes: Console) -> None:
    copy(options.first, Path(options.target), options.force, notes, "Joining")
