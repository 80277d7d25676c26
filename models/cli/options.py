"""Options that several commands take."""

from __future__ import annotations

import argparse

import jax_q4k as jq


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL.gguf, a file."""
    parser.add_argument("model", metavar="MODEL.gguf", help="a GGUF file")


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """--implementation: which kernels run."""
    parser.add_argument(
        "--implementation",
        choices=jq.IMPLEMENTATIONS,
        help="ptx: kernels for CUDA, the default there; native: kernels for CPUs, the default "
        "there if `jax-q4k doctor` finds them; xla: plain JAX; sim: CUDA's kernels, simulated",
    )
