"""Compares engines with and without lookup drafts: `python -m benchmarks.engine_drafts [FILE]`.

Batches of 1 to 8 requests run on both engines in turn. The first model has 1.04 billion random
weights (Q4_K_M) in layers that add so little that its text repeats one token; the second has the
same layers unchanged, and its sampled text never repeats itself. Figures are medians over ROUNDS.
Also the extra time of drafts that the warm-up measured, in passes without drafts.

Writes `benchmarks/results/engine_drafts.json`.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.results import write_results

from .engine import parsed, surroundings

ROWS = (1, 2, 4, 8)
TOKENS = 96


def measure(model: Any, rounds: int, **sampling: Any) -> dict[str, Any]:
    """Returns the rates of both engines, tokens per second, by the number of requests."""
    from jax_q4k import models

    options: dict[str, Any] = {"max_rows": max(ROWS), "max_context": TOKENS + 16}
    sampling |= {"max_new_tokens": TOKENS, "ignore_end": True}
    found: dict[str, Any] = {"rows": {}}
    with (
        models.Engine(model, **options) as plain,
        models.Engine(model, draft="lookup", **options) as lookup,
    ):
        found["costs"] = lookup._loop.stepper.draft_costs
        for rows in ROWS:
            rates: dict[str, list[float]] = {"plain": [], "lookup": []}
            drafted = accepted = 0
            for turn in range(rounds + 1):  # the first round warms up
                for name, engine in (("plain", plain), ("lookup", lookup)):
                    prompts = [[1, 300 + row, 400 + turn] for row in range(rows)]
                    began = time.perf_counter()
                    outputs = engine.generate(prompts, seed=100 * turn, **sampling)
                    if turn:
                        rates[name].append(rows * TOKENS / (time.perf_counter() - began))
                    drafted += sum(output.timings.drafted_tokens for output in outputs)
                    accepted += sum(output.timings.accepted_tokens for output in outputs)
            ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
            found["rows"][rows] = {
                **{f"{name}_tokens_per_second": statistics.median(rates[name]) for name in rates},
                "ratio": statistics.median(ratios),
                "drafted": drafted,
                "accepted": accepted,
            }
            print(f"{rows} requests: {found['rows'][rows]}", flush=True)
    return found


def main(arguments: list[str]) -> int:
    options = parsed(arguments, "engine_drafts", __doc__)
    from jax_q4k import models
    from jax_q4k.models.config.config import Scales
    from tools.random_model import LLAMA_1B

    from . import random_file

    repeating = dataclasses.replace(
        LLAMA_1B, architecture="granite", scales=Scales(residual=1e-3, logits=1.0)
    )
    results: dict[str, Any] = {}
    for name, config, sampling in (
        ("a text that repeats itself", repeating, {}),
        ("a text of draws", LLAMA_1B, {"temperature": 1.0}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.gguf"
            random_file.write(path, config)
            model = models.load(path)
            settings = surroundings(model)
            results[name] = measure(model, options.rounds, **sampling)
    print(write_results(options.file, settings | {"cases": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
