"""`jax-q4k perplexity`: perplexity and bits per byte of a text, or divergence of two models."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

from jax_q4k import models

from ..arguments import add_model
from ..options import (
    add_activations,
    add_devices,
    add_implementation,
    add_no_cache,
    implementation_of,
)
from ..output import UsageError, load_model, progress
from ..prompts import read_text

if TYPE_CHECKING:
    from ...runner.model import Model
    from ...tasks.divergence import Divergence
    from ...tasks.estimates import Estimate
    from ...tasks.perplexity import Score

#: Percentiles of divergences and of changes of p, between the maximum and the minimum.
PERCENTILES = (99.9, 99, 95, 90, 50, 10, 5, 1, 0.1)


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
        nargs="?",
        const="",
        metavar="BASE",
        help="compare the predictions with those of this model, as llama.cpp does; for instance "
        "with the original of a quantized one. Without BASE: with those in the file of "
        "--kl-divergence-base",
    )
    parser.add_argument(
        "--kl-divergence-base",
        dest="base_file",
        metavar="FILE",
        help="write the predictions to a file, for llama.cpp or --kl-divergence of other models",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_activations(parser)
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _perplexity(options: argparse.Namespace, notes: Console) -> None:
    if options.base == "" and options.base_file is None:
        raise UsageError("--kl-divergence needs BASE, a model, or --kl-divergence-base FILE")
    if options.base and options.base_file is not None:
        raise UsageError("give --kl-divergence BASE or --kl-divergence-base FILE, not both")
    writes = options.base_file is not None and options.base is None
    if writes and os.path.exists(options.base_file) and not options.force:
        hint = "--kl-divergence compares with it, --force replaces it"
        raise UsageError(f"{options.base_file} already exists; {hint}")
    text = read_text(options.text)
    model = load_model(options.model, notes, options.devices)
    base: Any = load_model(options.base, notes, options.devices) if options.base else None
    base = options.base_file if options.base == "" else base
    found: Any
    with (
        progress("Windows", notes, MofNCompleteColumn()) as report,
        implementation_of(options),
    ):
        arguments: dict[str, Any] = {"context": options.context, "progress": report}
        try:
            if base is not None:
                found = models.kl_divergence(model, base, text, **arguments)
            elif writes:
                found = models.save_base_logits(model, text, options.base_file, **arguments)
            else:
                found = _score(model, text, options.context, report, notes)
        except ValueError as error:
            raise UsageError(error) from error
    if base is not None:
        print(json.dumps(_comparison(found)) if options.json else _table(found))
    elif writes:
        if options.json:
            print(json.dumps({"perplexity": _finite(found.value), "error": _finite(found.error)}))
        else:
            print(f"perplexity {found.value:.4f} +/- {found.error:.5f}, as llama.cpp counts")
    else:
        _print_score(found, notes, as_json=options.json)


def _print_score(found: Score, notes: Console, *, as_json: bool) -> None:
    if as_json:
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

    names = ("perplexity", "base_perplexity", "log_ratio", "ratio", "difference", "same_top")
    return {
        "tokens": found.tokens,
        "kl_divergence": estimate(found.mean) | _percentiles(found.percentile),
        **{name: estimate(getattr(found, name)) for name in names},
        "correlation": _finite(found.correlation),
        "delta_p": estimate(found.delta_p) | _percentiles(found.delta_p_percentile),
        "rms_delta_p": estimate(found.rms_delta_p),
    }


def _percentiles(of: Callable[[float], float]) -> dict[str, float]:
    """Returns percentiles for JSON output."""
    named = {"maximum": of(100), "minimum": of(0), "median": of(50)}
    return named | {f"percentile_{part}": of(part) for part in PERCENTILES if part != 50}


def _table(found: Divergence) -> str:
    """Returns a comparison as lines of text."""

    def estimate(one: Estimate, factor: int = 1, digits: int = 6) -> str:
        return f"{factor * one.value:.{digits}f} +/- {factor * one.error:.{digits}f}"

    named: dict[str, float] = {"maximum": 100}
    named |= {"median" if part == 50 else f"{part} %": part for part in PERCENTILES}
    named |= {"minimum": 0}
    rows = {
        "perplexity": estimate(found.perplexity),
        "perplexity of the base": estimate(found.base_perplexity),
        "ratio of perplexities": estimate(found.ratio),
        "difference of perplexities": estimate(found.difference),
        "correlation of their logarithms": f"{100 * found.correlation:.2f} %",
        "KL divergence, mean": f"{estimate(found.mean)} nats",
        **{f"KL divergence, {n}": f"{found.percentile(p):.6f}" for n, p in named.items()},
        "change of p, mean": f"{estimate(found.delta_p, 100, 3)} %",
        **{
            f"change of p, {name}": f"{100 * found.delta_p_percentile(part):.3f} %"
            for name, part in named.items()
        },
        "change of p, root mean square": f"{estimate(found.rms_delta_p, 100, 3)} %",
        "same most likely token": f"{estimate(found.same_top, 100, 3)} %",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
