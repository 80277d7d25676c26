"""`jax-q4k quantize`: converts a model file to another type."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_q4k import models

from ...files.quantizing.recipes import COPY, RECIPES, full_name
from ..arguments import add_model
from ..options import add_no_cache
from ..output import UsageError, bytes_progress, table_console, warnings_in_a_line
from ..targets import add_output_limits, check_targets, files_of


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="quantize a model's weights",
        description="Quantize a GGUF file or a Hugging Face checkpoint, one tensor in memory at a "
        "time.",
    )
    parser.set_defaults(command=_quantize, runs_programs=True)
    add_model(parser)
    parser.add_argument("target", metavar="OUT.gguf", nargs="?", help="not needed with --dry-run")
    parser.add_argument(
        "--type",
        type=full_name,
        choices=(*RECIPES, COPY),
        default="Q4_K_M",
        help="default: Q4_K_M; COPY: each tensor's own",
    )
    parser.add_argument(
        "--imatrix", metavar="FILE", help="llama.cpp's importance matrix, a GGUF or .dat file"
    )
    parser.add_argument(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        type=_choice,
        action="append",
        default=[],
        help="type of the matrices in whose name a regular expression is found, such as "
        "'attn_v=Q8_0' or 'blk\\.[0-3]\\.=Q6_K'; the first one that fits counts",
    )
    parser.add_argument("--output-type", metavar="TYPE", type=str.upper, help="of the output layer")
    parser.add_argument("--embedding-type", metavar="TYPE", type=str.upper, help="of the embedding")
    parser.add_argument(
        "--dry-run", action="store_true", help="print types and sizes, and write nothing"
    )
    add_output_limits(parser)
    add_no_cache(parser)


def _quantize(options: argparse.Namespace, notes: Console) -> None:
    from ...files.load import located  # imports JAX

    if options.target is None and not options.dry_run:
        raise UsageError("the file to write is missing: jax-q4k quantize MODEL OUT.gguf")
    source = Path(located(options.model))
    if options.dry_run:
        _print_plan(source, options, notes)
        return
    parts = options.split_max_size is not None
    check_targets(source, Path(options.target), parts=parts, force=options.force)
    started = time.perf_counter()
    try:
        importance = models.read_imatrix(options.imatrix) if options.imatrix else None
        with warnings_in_a_line(notes), bytes_progress("Quantizing", notes) as report:
            written = models.quantize_file(
                source,
                options.target,
                options.type,
                importance,
                types=_types(options),
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


def _types(options: argparse.Namespace) -> dict[str, str]:
    """Returns the types of tensors that options ask for, in the order of their precedence."""
    found = {r"^output\.weight$": options.output_type, r"^token_embd\.": options.embedding_type}
    found = {pattern: kind for pattern, kind in found.items() if kind is not None}
    for pattern, kind in options.tensor_type:
        found.setdefault(pattern, kind)
    return found


def _print_plan(source: Path, options: argparse.Namespace, notes: Console) -> None:
    try:
        importance = models.read_imatrix(options.imatrix) if options.imatrix else None
        with warnings_in_a_line(notes):
            plan = models.quantization_plan(source, options.type, importance, types=_types(options))
    except ValueError as error:
        raise UsageError(error) from error
    table = Table("type", title="Bytes per type", title_justify="left")
    for column in ("tensors", "bytes"):
        table.add_column(column, justify="right")
    for kind in dict.fromkeys(sorted(plan.types.values())):
        names = [name for name, of_it in plan.types.items() if of_it == kind]
        table.add_row(kind, f"{len(names):,}", f"{sum(map(plan.nbytes_of, names)):,}")
    table_console().print(table)
    before, after = _size(source), plan.nbytes
    notes.print(
        f"[dim]{before:,} bytes of files -> {after:,} bytes of weights, "
        f"{plan.bits_per_weight:.2f} bits per weight; nothing was written[/]",
        soft_wrap=True,
    )


def _choice(text: str) -> tuple[str, str]:
    """Parses PATTERN=TYPE."""
    pattern, equals, kind = text.rpartition("=")
    if not pattern or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be PATTERN=TYPE, such as attn_v=Q8_0")
    return pattern, kind.upper()


def _size(source: Path) -> int:
    return sum(os.path.getsize(file) for file in files_of(source))
