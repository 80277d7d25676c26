"""Options that several commands take."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax_q4k as jq

from ..files.load import DEMO
from ..sampling import Sampling

MODEL = "a GGUF file, a checkpoint's folder, or demo: the model that comes with this package"


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, as `models.load` takes it."""
    parser.add_argument("model", metavar="MODEL", help=MODEL)


def add_model_or_demo(parser: argparse.ArgumentParser) -> None:
    """MODEL, or --demo in its place; `model_path` takes either."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("model", nargs="?", metavar="MODEL", help=MODEL)
    which.add_argument(
        "--demo", action="store_true", help="run the small model that comes with this package"
    )


def model_path(options: argparse.Namespace) -> str:
    """The model that `add_model_or_demo`'s options name, as `load` takes it."""
    return DEMO if options.demo else options.model


def add_running(parser: argparse.ArgumentParser) -> None:
    """Options of how programs of generation run."""
    add_cache_dtype(parser)
    add_draft(parser)
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def add_sampling(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """An option for every field of Sampling; `defaults` other than the fields' own."""
    for field in dataclasses.fields(Sampling):
        short, metavar = field.metadata.get("short"), field.metadata.get("metavar")
        names = [*([short] if short else ()), f"--{field.name.replace('_', '-')}"]
        options: dict[str, Any] = {"help": field.metadata["help"]}
        if field.type == "bool":
            options |= {"action": "store_true"}
        elif field.name in ("stop", "logit_bias"):
            options |= {"action": "append", "default": [], "metavar": metavar}
            options |= {"type": _bias} if field.name == "logit_bias" else {}
        else:
            kind = int if field.type == "int" else float
            options |= {"type": kind, "default": field.default, "metavar": metavar}
        if field.name in defaults:
            default = defaults[field.name]
            options |= {"default": default, "help": f"default: {default}"}
        parser.add_argument(*names, **options)


def _bias(text: str) -> tuple[int, float]:
    """`ID=X` of --logit-bias."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a token id, =, and a number") from None


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Sampling's fields, as `add_sampling`'s options give them."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(Sampling)}


def add_cache_dtype(parser: argparse.ArgumentParser) -> None:
    """--cache-dtype: what keys and values are stored in."""
    parser.add_argument(
        "--cache-dtype",
        choices=[str(d) for d in jq.PAGE_DTYPES],
        default="float32",
        help="of cached keys and values; default: float32",
    )


def add_draft(parser: argparse.ArgumentParser) -> None:
    """--draft: what guesses the next tokens."""
    parser.add_argument(
        "--draft",
        metavar="lookup|nextn|MODEL",
        help="guess tokens, and check several in one pass: lookup, what followed the last ones "
        "before; nextn, by the layer of the model's file that predicts further ones; or a smaller "
        "model with the same vocabulary",
    )


def add_no_cache(parser: argparse.ArgumentParser) -> None:
    """--no-cache: what is compiled is not kept."""
    parser.add_argument(
        "--no-cache",
        action="store_false",
        dest="keeps_programs",
        help="compile anew: neither use nor keep programs of earlier runs",
    )


def add_devices(parser: argparse.ArgumentParser) -> None:
    """--devices: how many the model is split over."""
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="split the model over N GPUs, or over as many parts of a CPU; default: 1",
    )


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """--implementation: which kernels run."""
    parser.add_argument(
        "--implementation",
        choices=jq.IMPLEMENTATIONS,
        help="ptx: kernels for CUDA, the default there; native: kernels for CPUs, the default "
        "there if `jax-q4k doctor` finds them; xla: plain JAX; sim: CUDA's kernels, simulated",
    )
