"""Compares generation with and without lookup drafts: `python -m benchmarks.drafts`.

Options: `--model FILE`, `--text FILE`, `--tokens N`.

By default it uses a model of 1.04 billion random weights (written once, Q4_K_M): once with layers
that add so little that its text repeats one token, and once unchanged, whose sampled text never
repeats itself. It then uses the demo model, whose texts repeat some pairs and triples of tokens,
and whose steps of half a millisecond show the cost of the lookup. Rates and their ratio are medians
over turns that alternate between both.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tools.results import write_results

from .common import RESULTS

TURNS = 7


def measure(model: Any, prompt: Any, tokens: int, **sampling: Any) -> dict[str, Any]:
    """Returns the rates of both, measured in turn, and the acceptance statistics of the drafts."""
    from jax_q4k import models

    rates: dict[str, list[float]] = {"plain": [], "lookup": []}
    timings: Any = None
    for turn in range(TURNS + 1):
        for name, draft in (("plain", None), ("lookup", "lookup")):
            out = models.generate(
                model, prompt, max_new_tokens=tokens, ignore_end=True, draft=draft, **sampling
            )
            if turn:  # the first compiles
                rates[name].append(out.timings.tokens_per_second)
            timings = out.timings
    plain, lookup = (statistics.median(rates[name]) for name in rates)
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    return {
        "plain_tokens_per_second": plain,
        "lookup_tokens_per_second": lookup,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "drafted": timings.drafted_tokens,
        "accepted": timings.accepted_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a GGUF file, instead of random weights")
    parser.add_argument("--text", default="", help="a file, whose text is the prompt of --model")
    parser.add_argument("--tokens", type=int, default=128, help="default: 128")
    options = parser.parse_args()
    from jax_q4k import models

    cases: dict[str, Any] = {}
    if options.model:
        text = Path(options.text).read_text() if options.text else "Once upon a time"
        cases["greedy"] = measure(models.load(options.model), text, options.tokens)
    else:
        from jax_q4k.models.config.config import Scales
        from tools.random_model import LLAMA_1B

        from . import random_file

        repeating = dataclasses.replace(
            LLAMA_1B, architecture="granite", scales=Scales(residual=1e-3, logits=1.0)
        )
        shapes: dict[str, tuple[Any, dict[str, Any]]] = {
            "a text that repeats itself": (repeating, {}),
            "a text of draws": (LLAMA_1B, {"temperature": 1.0}),
        }
        for name, (config, sampling) in shapes.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "random.gguf"
                random_file.write(path, config)
                model = models.from_gguf(path)
                cases[name] = measure(model, [1, 300, 301], options.tokens, **sampling)
        demo, start = models.load(models.demo_path()), "It is a truth universally acknowledged"
        cases["the demo model, greedy"] = measure(demo, start, options.tokens)
        cases["the demo model, of draws"] = measure(demo, start, options.tokens, temperature=0.8)
    for name, case in cases.items():
        print(
            f"{name}: {case['plain_tokens_per_second']:.1f} tokens/s, with lookup "
            f"{case['lookup_tokens_per_second']:.1f}: {case['ratio']:.2f}, "
            f"{case['accepted']} of {case['drafted']} drafted tokens stayed"
        )
    write_results(RESULTS / "drafts.json", {"cases": cases, "tokens": options.tokens})


if __name__ == "__main__":
    main()
