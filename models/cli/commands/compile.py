"""`jax-q4k compile`: compiles a model's decode step to machine code in a file."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape

from jax_q4k import models
from jax_q4k.cache.targets import TARGETS

from ..arguments import add_model
from ..options import add_cache_dtype, add_implementation, implementation_of
from ..output import UsageError, load_model, printable


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile a model's decode step into a file",
        description="Compile a model's decode step ahead of time; models.load_compiled runs it. "
        "A GPU is not needed to compile for one.",
    )
    parser.set_defaults(command=_compile, runs_programs=True)
    add_model(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--target", choices=TARGETS, default="cpu", help="default: this CPU")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens per sequence; default: the model's"
    )
    add_cache_dtype(parser)
    add_implementation(parser)


def _compile(options: argparse.Namespace, notes: Console) -> None:
    model = load_model(options.model, notes)
    names = "target", "batch", "context", "cache_dtype"
    fields = {name: getattr(options, name) for name in names}
    with implementation_of(options):
        try:
            size = models.compile_step(model, options.output, **fields)
        except ValueError as error:
            raise UsageError(error) from error
    said = f"{printable(options.output)}: {size:,} bytes of {options.target} code"
    notes.print(f"[dim]{escape(said)}[/]", soft_wrap=True)
