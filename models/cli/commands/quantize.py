"""`jax-q4k quantize`: converts a model file to another type."""

from __future__ import annotations

import argparse
import glob
import os
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import jax_q4k as jq
from jax_q4k import models

from ...files.quantizing.recipes import RECIPES
from ..arguments import add_model
from ..options import add_no_cache
from ..output import UsageError, bytes_progress, warnings_in_a_line

_NUMBER = "[0-9]" * 5


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="quantize a model's weights",
        description="Quantize a GGUF file or a Hugging Face checkpoint, one tensor in memory at a "
        "time.",
    )
    parser.set_defaults(command=_quantize, runs_programs=True)
    add_model(parser)
    parser.add_argument("target", metavar="OUT.gguf")
    parser.add_argument(
        "--type", type=str.upper, choices=RECIPES, default="Q4_K_M", help="default: Q4_K_M"
    )
    parser.add_argument(
        "--imatrix", metavar="FILE", help="llama.cpp's importance matrix, a GGUF or .dat file"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")
    parser.add_argument(
        "--split-max-size",
        type=_bytes,
        metavar="N[M|G]",
        help="most bytes of weights per file; larger models become OUT-00001-of-00003.gguf, ...",
    )
    add_no_cache(parser)


def _quantize(options: argparse.Namespace, notes: Console) -> None:
    from ...files.load import located  # imports JAX

    source = Path(located(options.model))
    _check_targets(source, options)
    started = time.perf_counter()
    try:
        importance = models.read_imatrix(options.imatrix) if options.imatrix else None
        with warnings_in_a_line(notes), bytes_progress("Quantizing", notes) as report:
            written = models.quantize_file(
                source,
                options.target,
                options.type,
                importance,
                max_bytes=options.split_max_size,
                progress=report,
            )
    except ValueError as error:
        raise UsageError(error) from error
    before, after = _size(source), sum(file.stat().st_size for file in written)
    seconds = time.perf_counter() - started
    files = f" in {len(written)} files" if len(written) > 1 else ""
    notes.print(
        f"[dim]{before:,} -> {after:,} bytes ({after / before:.1%}){files} in {seconds:.1f} s[/]",
        soft_wrap=True,
    )


def _check_targets(source: Path, options: argparse.Namespace) -> None:
    """Refuses to overwrite the input and, without --force, any other file."""
    target = Path(options.target)
    targets = [target]
    if options.split_max_size is not None:  # the number of files is not known yet, so checks all
        name = glob.escape(os.fspath(target).removesuffix(".gguf"))
        targets += map(Path, sorted(glob.glob(f"{name}-{_NUMBER}-of-{_NUMBER}.gguf")))
    for file in filter(Path.exists, targets):
        if source.exists() and any(file.samefile(part) for part in _files(source)):
            raise UsageError(f"{file} is the input: choose another name")
        if not options.force:
            raise UsageError(f"{file} already exists; --force replaces it")


def _bytes(text: str) -> int:
    """Parses a size such as "500M" or "2G" to bytes, like llama-gguf-split."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([MG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer, with or without M or G")
    return int(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[match[2]]


def _files(source: Path) -> list[Path]:
    """Returns the files that a model is read from."""
    if source.is_dir():
        return list(source.glob("*.safetensors"))
    return [part for part in jq.gguf.part_names(source) if part.exists()]


def _size(source: Path) -> int:
    return sum(os.path.getsize(file) for file in _files(source))
