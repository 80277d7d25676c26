"""`jax-q4k quantize`: a model's file in another type."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..files.imatrix import read_imatrix
from ..files.quantize import quantize_file
from ..files.recipes import RECIPES
from .options import add_no_cache
from .output import UsageError, bytes_progress, warnings_in_a_line


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="make a smaller file of a model",
        description="Quantize a GGUF file or a Hugging Face checkpoint, one tensor in memory at a "
        "time.",
    )
    parser.set_defaults(command=_quantize, runs_programs=True, writes_files=True)
    parser.add_argument(
        "source", metavar="IN", help="a .gguf file, a .safetensors file or a checkpoint's folder"
    )
    parser.add_argument("target", metavar="OUT.gguf")
    parser.add_argument("--type", choices=RECIPES, default="Q4_K_M", help="default: Q4_K_M")
    parser.add_argument(
        "--imatrix", metavar="FILE", help="llama.cpp's importance matrix, a GGUF file"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it is there")
    add_no_cache(parser)


def _quantize(options: argparse.Namespace, notes: Console) -> None:
    source, target = Path(options.source), Path(options.target)
    if target.exists():
        if source.exists() and target.samefile(source):
            raise UsageError(f"{target} is the input: give another name")
        if not options.force:
            raise UsageError(f"{target} is there already: --force replaces it")
    started = time.perf_counter()
    try:
        importance = read_imatrix(options.imatrix) if options.imatrix else None
        with warnings_in_a_line(notes), bytes_progress("Quantizing", notes) as report:
            quantize_file(source, target, options.type, importance, progress=report)
    except ValueError as error:
        raise UsageError(error) from error
    before, after = _size(source), target.stat().st_size
    seconds = time.perf_counter() - started
    notes.print(
        f"[dim]{before:,} -> {after:,} bytes ({after / before:.1%}) in {seconds:.1f} s[/]",
        soft_wrap=True,
    )


def _size(source: Path) -> int:
    files = source.glob("*.safetensors") if source.is_dir() else [source]
    return sum(os.path.getsize(file) for file in files)
