"""Options of commands that write files, and checks against files that exist."""

from __future__ import annotations

import argparse
import glob
import os
import re
from pathlib import Path

import jax_q4k as jq

from .output import UsageError

_NUMBER = "[0-9]" * 5


def check_targets(source: Path, target: Path, *, parts: bool, force: bool) -> None:
    """Refuses to overwrite the input and, without `force`, any other file.

    parts: whether the target may become several files.
    """
    targets = [target]
    if parts:  # the number of files is not known yet, so checks all
        name = glob.escape(os.fspath(target).removesuffix(".gguf"))
        targets += map(Path, sorted(glob.glob(f"{name}-{_NUMBER}-of-{_NUMBER}.gguf")))
    for file in filter(Path.exists, targets):
        if source.exists() and any(file.samefile(part) for part in files_of(source)):
            raise UsageError(f"{file} is the input: choose another name")
        if not force:
            raise UsageError(f"{file} already exists; --force replaces it")


def add_output_limits(parser: argparse.ArgumentParser) -> None:
    """Adds --force and --split-max-size, for a model that is written to OUT.gguf."""
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")
    parser.add_argument(
        "--split-max-size",
        type=byte_count,
        metavar="N[M|G]",
        help="most bytes of weights per file; larger models become OUT-00001-of-00003.gguf, ...",
    )


def byte_count(text: str) -> int:
    """Parses a size such as "500M" or "2G" to bytes, like llama-gguf-split."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([MG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a positive integer, with or without M or G"
        )
    return int(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[match[2]]


def files_of(source: Path) -> list[Path]:
    """Returns the files that a model is read from."""
    if source.is_dir():
        return list(source.glob("*.safetensors"))
    return [part for part in jq.gguf.part_names(source) if part.exists()]
