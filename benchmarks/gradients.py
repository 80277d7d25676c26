"""Measures gradients of fused operations: `python -m benchmarks.gradients [FILE]`.

Each program computes the sum of squares of an operation's result and its gradient with respect to
the activations, for Q4_K weights. It reports milliseconds on this CPU, those of the operation
alone, and the PTX kernel launches of both, traced for an H200. Times are processor time over all
cores, which other programs disturb less: medians over rounds in which the programs take turns.
Writes `benchmarks/results/gradients.json`; `gradients_before.json` is from the commit before
gradients took one forward pass.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tools.results import write_results

from .common import results_file

COLUMNS, INNER = 1024, 2816
ROWS = (4, 32, 128)
ROUNDS = 25


def measure(columns: int, inner: int, rows: int) -> list[dict[str, Any]]:
    """Returns a row of figures for each operation, for x (rows, columns)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_q4k as jq

    rng = np.random.default_rng(0)

    def packed(n: int, k: int) -> jq.QuantizedArray:
        part = jq.quantize(rng.standard_normal((256, k)).astype(np.float32) / k**0.5, "Q4_K")
        planes = tuple(jnp.tile(plane, (n // 256, 1, 1)) for plane in part.planes)
        return jq.QuantizedArray("Q4_K", (n, k), planes)

    gate, up, down = packed(inner, columns), packed(inner, columns), packed(columns, inner)
    q, kv = packed(columns, columns), packed(256, columns)
    norm = jnp.ones(columns)
    operations: dict[str, Callable[[Any], Any]] = {
        "mlp": lambda x: jq.mlp(x, gate, up, down, norm_weight=norm, eps=1e-5, residual=x),
        "gated_matmul": lambda x: jq.gated_matmul(x, gate, up, norm_weight=norm, eps=1e-5),
        "qkv_matmul": lambda x: jq.qkv_matmul(x, (q, kv, kv), norm_weight=norm, eps=1e-5),
        "causal_attention": lambda x: _attention(x.reshape(1, rows, -1, 64)),
    }
    x = jnp.asarray(rng.standard_normal((rows, columns), np.float32))
    found = []
    for name, operation in operations.items():
        gradient = jax.value_and_grad(_sum_of_squares(operation))
        programs: dict[str, Callable[[Any], Any]] = {
            "ms": jax.jit(operation),
            "gradient_ms": jax.jit(gradient),
        }
        launches = {
            "launches": jq.explain(operation, x, platform="cuda").launches,
            "gradient_launches": jq.explain(gradient, x, platform="cuda").launches,
        }
        found.append({"operation": name, "rows": rows, **_milliseconds(programs, x), **launches})
    return found


def _attention(heads: Any) -> Any:
    import jax_q4k as jq

    return jq.causal_attention(heads, heads, heads, [heads.shape[1]])


def _sum_of_squares(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import jax

    return lambda x: sum((y**2).sum() for y in jax.tree.leaves(operation(x)))


def _milliseconds(programs: dict[str, Callable[[Any], Any]], x: Any) -> dict[str, float]:
    import jax

    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(ROUNDS + 1):  # the first compiles
        for name, run in programs.items():
            start = time.process_time()
            jax.block_until_ready(run(x))
            if turn:
                times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "gradients", __doc__)
    settings = {"load_before": round(os.getloadavg()[0], 1)}
    results = [row for rows in ROWS for row in measure(COLUMNS, INNER, rows)]
    print(f"{'operation':18}{'rows':>6}{'ms':>9}{'gradient':>10}{'launches':>10}{'gradient':>10}")
    for r in results:
        print(
            f"{r['operation']:18}{r['rows']:6}{r['ms']:9.2f}{r['gradient_ms']:10.2f}"
            f"{r['launches']:10}{r['gradient_launches']:10}"
        )
    print(write_results(file, settings | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
