"""`jax-q4k perplexity`: perplexity and bits per byte of a text, or divergence of two models."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

import jax_q4k as jq
from jax_q4k import models

from ..arguments import add_model
from ..options import add_devices, add_implementation, add_no_cache
from ..output import UsageError, load_model, progress

if TYPE_CHECKING:
    from ...runner.model import Model
    from ...tasks.divergence import Divergence, Estimate
    from ...tasks.perplexity import Score

MAX_TEXT = 1 << 30  # bytes; a limit for endless files such as /dev/zero

#: Percentiles of the divergence that are shown besides median and maximum.
PERCENTILES = (99.9, 99, 95, 90)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "perplexity",
        help="score a text",
        description="Compute a text's perplexity per token in windows that do not overlap: of the "
        "second half of each window, like llama.cpp, and of all tokens, with bits per byte. "
        "llama.cpp on a CPU rounds activations to int8; --activations f32 matches its result for "
        "the same weights in F32.",
    )
    parser.set_defaults(command=_perplexity, runs_programs=True)
    add_model(parser)
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 file")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens per window; default: the model's, up to 512",
    )
    parser.add_argument(
        "--kl-divergence",
        dest="base",
        metavar="BASE",
        help="compare the predictions with those of this model, as llama.cpp does; for instance "
        "with the original of a quantized one",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument(
        "--activations",
        choices=("q8_1", "f32"),
        help="round activations of matmuls to int8 (q8_1, the default), or not (f32)",
    )
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _read(path: str) -> str:
    with open(path, "rb") as file:  # may be a pipe
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise UsageError(f"{path} holds more than {MAX_TEXT:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}") from error


def _perplexity(options: argparse.Namespace, notes: Console) -> None:
    text = _read(options.text)
    model = load_model(options.model, notes, options.devices)
    base = None if options.base is None else load_model(options.base, notes, options.devices)
    with (
        progress("Windows", notes, MofNCompleteColumn()) as report,
        jq.implementation(options.implementation, activations=options.activations),
    ):
        try:
            if base is None:
                found = _score(model, text, options.context, report, notes)
            else:
                compared = models.kl_divergence(
                    model, base, text, context=options.context, progress=report
                )
        except ValueError as error:
            raise UsageError(error) from error
    if base is not None:
        print(json.dumps(_comparison(compared)) if options.json else _table(compared))
        return
    if options.json:
        print(json.dumps(_described(found)))
        return
    if (halves := found.second_halves) is not None:
        estimate = f"{halves.perplexity:.4f} +/- {halves.error:.5f}"
        print(f"perplexity {estimate} of {halves.tokens} tokens, as llama.cpp counts")
    print(f"{found.bits_per_byte:.4f} bits per byte, perplexity {found.perplexity:.3f} per token")
    notes.print(f"[dim]{found.tokens} tokens, {found.bytes} bytes[/]", soft_wrap=True)


def _score(model: Model, text: str, context: int | None, report: Any, notes: Console) -> Score:
    """Scores a text with llama.cpp's windows; with our own if it is shorter than two of those."""
    from ...tasks.perplexity import TooShortError  # imports JAX

    try:
        return models.score(model, text, context=context, windows="llama.cpp", progress=report)
    except TooShortError as error:
        notes.print(f"[dim]{error}: reporting only the result for all tokens.[/]", soft_wrap=True)
        return models.score(model, text, context=context, progress=report)


def _described(found: Score) -> dict[str, Any]:
    """Returns a score for JSON output; numbers beyond float64 are null."""
    halves, of_llama_cpp = found.second_halves, None
    if halves is not None:
        estimate = {"perplexity": _finite(halves.perplexity), "error": _finite(halves.error)}
        of_llama_cpp = estimate | {"tokens": halves.tokens}
    return {
        "llama_cpp": of_llama_cpp,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": _finite(found.perplexity),
        "tokens": found.tokens,
        "bytes": found.bytes,
    }


def _comparison(found: Divergence) -> dict[str, Any]:
    """Returns a comparison for JSON output; probabilities are 0 to 1, divergences in nats."""

    def estimate(one: Estimate) -> dict[str, Any]:
        return {"value": _finite(one.value), "error": _finite(one.error)}

    names = ("perplexity", "base_perplexity", "log_ratio", "ratio", "same_top")
    return {
        "tokens": found.tokens,
        "kl_divergence": estimate(found.mean)
        | {"median": found.percentile(50), "maximum": found.percentile(100)}
        | {f"percentile_{part}": found.percentile(part) for part in PERCENTILES},
        **{name: estimate(getattr(found, name)) for name in names},
        "correlation": _finite(found.correlation),
        "delta_p": estimate(found.delta_p),
        "rms_delta_p": estimate(found.rms_delta_p),
    }


def _table(found: Divergence) -> str:
    """Returns a comparison as lines of text."""

    def estimate(one: Estimate, factor: int = 1, digits: int = 6) -> str:
        return f"{factor * one.value:.{digits}f} +/- {factor * one.error:.{digits}f}"

    rows = {
        "perplexity": estimate(found.perplexity),
        "perplexity of the base": estimate(found.base_perplexity),
        "ratio of perplexities": estimate(found.ratio),
        "correlation of their logarithms": f"{100 * found.correlation:.2f} %",
        "KL divergence, mean": f"{estimate(found.mean)} nats",
        "KL divergence, maximum": f"{found.percentile(100):.6f}",
        **{f"KL divergence, {p} %": f"{found.percentile(p):.6f}" for p in PERCENTILES},
        "KL divergence, median": f"{found.percentile(50):.6f}",
        "change of p, mean": f"{estimate(found.delta_p, 100, 3)} %",
        "change of p, root mean square": f"{estimate(found.rms_delta_p, 100, 3)} %",
        "same most likely token": f"{estimate(found.same_top, 100, 3)} %",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
