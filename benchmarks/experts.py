"""Compares MoE and dense feed-forward networks on a CPU: `python -m benchmarks.experts [FILE]`.

Runs `jq.expert_mlp` by the CPU kernels, with the shape of a layer of Qwen3-30B-A3B (128 experts, 8
per token, 768 inner rows) and with 16 experts of the same size, Q4_K and Q6_K as in Q4_K_M files.
For decoding one token it measures gigabytes per second of the selected experts' weights, compared
to `jq.mlp` of as many bytes. For prompts it measures gigaflops per second (2 per weight and slot),
compared to `jq.mlp` of one expert's size with as many rows as slots. Tokens select experts at
random. Programs take turns in rounds; figures are medians. Writes
`benchmarks/results/experts.json`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from tools.results import write_results

from .common import core_sets, milliseconds, on_cores, results_file

HIDDEN, INNER, TOP = 2048, 768, 8
EXPERTS = (128, 16)
TOKENS = (1, 4, 64, 512)
ACTIVATIONS = ("q8_1", "f32")
COPIES = 4  # expert selections, and dense networks, in turn: caches hold only one of these
SECONDS, ROUNDS = 0.5, 5


def measure() -> list[dict[str, Any]]:
    """Returns a row for each number of experts, number of tokens, and kind of activations."""
    return [
        measured(experts, tokens, activations)
        for experts in EXPERTS
        for tokens in TOKENS
        for activations in ACTIVATIONS
    ]


def measured(experts: int, tokens: int, activations: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_q4k as jq

    rng = np.random.default_rng(0)
    slots = tokens * TOP
    gate, up, down = (
        _random("Q4_K", experts, INNER, HIDDEN),
        _random("Q4_K", experts, INNER, HIDDEN),
        _random("Q6_K", experts, HIDDEN, INNER),
    )
    wide = INNER * TOP if tokens == 1 else INNER
    dense = [
        (
            _random("Q4_K", wide, HIDDEN),
            _random("Q4_K", wide, HIDDEN),
            _random("Q6_K", HIDDEN, wide),
        )
        for _ in range(COPIES)
    ]
    x = jnp.asarray(rng.standard_normal((tokens, HIDDEN), np.float32))
    rows = jnp.asarray(rng.standard_normal((1 if tokens == 1 else slots, HIDDEN), np.float32))
    choices = [
        jq.route(jnp.asarray(rng.standard_normal((tokens, experts), np.float32)), TOP)
        for _ in range(COPIES)
    ]

    def sparse_run(x: Any, gate: Any, up: Any, down: Any) -> Any:
        for ids, of in choices:
            x = jq.expert_mlp(x, gate, up, down, ids, of)
        return x

    def dense_run(x: Any, *layers: Any) -> Any:
        for gate, up, down in layers:
            x = jq.mlp(x, gate, up, down)
        return x

    def by(function: Callable[..., Any], *operands: Any) -> Callable[[], Any]:
        with jq.implementation("native", activations=activations):
            compiled = jax.jit(function).lower(*operands).compile()
        return lambda: compiled(*operands)

    programs = {
        "experts": by(sparse_run, x, gate, up, down),
        "dense": by(dense_run, rows, *dense),
    }
    times = milliseconds(programs, SECONDS, ROUNDS)
    used = sum(len(np.unique(np.asarray(ids))) for ids, _ in choices) / COPIES
    size = sum(w.nbytes for w in (gate, up, down)) / experts
    flops = 2 * 3 * HIDDEN * INNER * slots
    found = {"experts": experts, "tokens": tokens, "activations": activations}
    for name, taken in times.items():
        of_one = taken / COPIES / 1e3
        read = size * used if name == "experts" else sum(w.nbytes for w in dense[0])
        found[f"{name}_ms"] = of_one * 1e3
        found[f"{name}_gigabytes_per_second"] = read / of_one / 1e9
        found[f"{name}_gigaflops"] = flops / of_one / 1e9
    return found


@functools.cache
def _rows(format: str, k: int) -> Any:
    """Returns the planes of 16 random rows."""
    import numpy as np

    import jax_q4k as jq

    rows = np.random.default_rng(k).standard_normal((16, k), np.float32)
    return jq.quantize(rows / np.sqrt(k), format).planes


def _random(format: str, *shape: int) -> Any:
    import jax.numpy as jnp

    import jax_q4k as jq

    *leading, n, k = shape
    count = math.prod([*leading, n])
    planes = (jnp.tile(plane, (count // 16, 1, 1)) for plane in _rows(format, k))
    return jq.QuantizedArray(format, shape, [p.reshape(*leading, n, *p.shape[1:]) for p in planes])


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "experts", __doc__)
    results = []
    for cores in core_sets():
        count = len(cores)
        rows = on_cores(cores, "experts", "measure")
        results.append({"cores": count, "rows": rows})
        print(f"{count} core{'s' * (count > 1)}:")
        for row in rows:
            unit = "gigabytes_per_second" if row["tokens"] == 1 else "gigaflops"
            label = "GB/s" if row["tokens"] == 1 else "GFLOP/s"
            print(
                f"  {row['experts']} experts, {row['tokens']} tokens, {row['activations']}:"
                f" {row[f'experts_{unit}']:.1f} {label}, dense {row[f'dense_{unit}']:.1f},"
                f" {row['experts_ms']:.2f} and {row['dense_ms']:.2f} ms"
            )
    settings = {"load_before": round(os.getloadavg()[0], 1)}
    print(write_results(file, settings | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
