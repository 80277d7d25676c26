"""Times one step of sampling on a CPU: `python -m benchmarks.sampling [FILE]`.

Samples one token per row from random normal logits, for each of `CASES`, two sizes of vocabulary
and two batch sizes. Logits with a deviation of 6 resemble those of a language model; with a
deviation of 3 they are so flat that thousands of tokens make up 95 % of the probability. Times are
medians over rounds in which the cases take turns. Writes `benchmarks/results/sampling.json`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tools.results import write_results

from .common import milliseconds, results_file

VOCABS = (32_000, 152_064)
ROWS = (4, 16)
SECONDS, ROUNDS = 1.0, 5  # minimum per size
TYPICAL, FLAT = 6.0, 3.0  # deviations of logits
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 100,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "logit_bias": {7: 1.0, 8: -float("inf")},
    "logprobs": 20,
}
#: Name -> sampling parameters, and the deviations of the first row's and the other rows' logits.
CASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "argmax": ({}, TYPICAL, TYPICAL),
    "temperature": ({"temperature": 0.8}, TYPICAL, TYPICAL),
    "top-p": ({"temperature": 0.8, "top_p": 0.95}, TYPICAL, TYPICAL),
    "top-p, flat": ({"temperature": 0.8, "top_p": 0.95}, FLAT, FLAT),
    "top-p, one row flat": ({"temperature": 0.8, "top_p": 0.95}, FLAT, TYPICAL),
    "top-k": ({"temperature": 0.8, "top_k": 40}, TYPICAL, TYPICAL),
    "everything": (EVERYTHING, TYPICAL, TYPICAL),
}


def measure(vocab: int, rows: int) -> dict[str, float]:
    """Returns the milliseconds of each case."""
    return milliseconds({name: _step(*CASES[name], vocab, rows) for name in CASES}, SECONDS, ROUNDS)


def _step(
    fields: dict[str, Any], first: float, others: float, vocab: int, rows: int
) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_q4k.models.sampling import Sampling
    from jax_q4k.models.sampling.sampler import logprobs_of, sample
    from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages

    rng = np.random.default_rng(0)
    deviations = np.where(np.arange(rows) == 0, first, others)[:, None]
    logits = jnp.asarray(rng.standard_normal((rows, vocab)) * deviations, jnp.float32)
    samplings = [Sampling(**fields, seed=row) for row in range(rows)]
    stages = SamplingStages.of(samplings)
    parameters = jax.device_put(SamplingArrays.of(samplings))
    counts = jnp.asarray(rng.random((rows, vocab)) < 0.01, jnp.int32) if stages.penalizes else None

    def step(logits: Any, parameters: Any, steps: Any, counts: Any) -> Any:
        tokens = sample(logits, stages, parameters, steps, counts)
        if stages.logprobs is None:
            return tokens
        return tokens + logprobs_of(logits, tokens, stages.logprobs).tokens.sum(axis=1)

    arguments = logits, parameters, jnp.zeros(rows, jnp.int32), counts
    compiled = jax.jit(step).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "sampling", __doc__)
    settings = {"load_before": round(os.getloadavg()[0], 1), "cores": len(os.sched_getaffinity(0))}
    print(f"{'ms per step':22}" + "".join(f"{v:>8,} x {r:2}" for v in VOCABS for r in ROWS))
    results: list[dict[str, Any]] = [
        {"vocab": vocab, "rows": rows, "ms": measure(vocab, rows)}
        for vocab in VOCABS
        for rows in ROWS
    ]
    for name in CASES:
        print(f"{name:22}" + "".join(f"{one['ms'][name]:13.2f}" for one in results))
    print(write_results(file, settings | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
