"""`jax-q4k merge`: merges LoRA adapters into a model's weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_q4k import models

from ...files.quantizing.recipes import COPY, RECIPES, full_name
from ..arguments import add_model
from ..options import add_lora, add_no_cache
from ..output import UsageError, bytes_progress, warnings_in_a_line
from ..targets import add_output_limits, check_targets


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "merge",
        help="merge LoRA adapters into a model",
        description="Add LoRA adapters to a model's weights, one tensor in memory at a time, like "
        "llama.cpp's llama-export-lora. Matrices keep their types, and are quantized again.",
    )
    parser.set_defaults(command=_merge, runs_programs=True)
    add_model(parser)
    parser.add_argument(
        "-o", "--output", dest="target", metavar="OUT.gguf", required=True, help="file to write"
    )
    add_lora(parser)
    parser.add_argument(
        "--type",
        type=full_name,
        choices=(*RECIPES, COPY),
        default=COPY,
        help="quantize all tensors to this type; default: COPY, each tensor's own",
    )
    parser.add_argument("--imatrix", metavar="FILE", help="importance matrix, as in quantize")
    add_output_limits(parser)
    add_no_cache(parser)


def _merge(options: argparse.Namespace, notes: Console) -> None:
    from ...files.load import located  # imports JAX

    if not options.lora:
        raise UsageError("no adapter: give --lora FILE[=SCALE]")
    source = Path(located(options.model))
    parts = options.split_max_size is not None
    check_targets(source, Path(options.target), parts=parts, force=options.force)
    try:
        importance = models.read_imatrix(options.imatrix) if options.imatrix else None
        with warnings_in_a_line(notes), bytes_progress("Merging", notes) as report:
            written = models.merge(
                source,
                options.target,
                options.lora,
                options.type,
                importance,
                max_bytes=options.split_max_size,
                progress=report,
            )
    except ValueError as error:
        raise UsageError(error) from error
    for path in written:
        print(path)
