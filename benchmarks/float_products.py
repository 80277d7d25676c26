"""Times products of float32 activations on a CPU: `python -m benchmarks.float_products [FILE]`.

Compares `jq.matmul` by the CPU kernels with `activations="f32"`, for every block format and float
type, with two XLA programs: the product of dense float32 weights (`jnp.dot(x, w.T)`), and
`implementation="xla"`, which first decodes the weights. It uses one core and two, for each named
set of kernels (`$FLOAT_PRODUCTS_KERNELS`, by default `avx512,avx2`; sets that the processor lacks
are skipped). Times are medians over rounds in which the programs take turns. Writes
`benchmarks/results/float_products.json`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from tools.results import write_results

from .common import core_sets, milliseconds, on_cores, results_file

SIZES = (2048, 4096)
ROWS = (1, 2, 4, 5, 8, 16, 17, 32, 64, 128)
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DECODED = ("Q4_K", "BF16")  # formats also timed with implementation="xla"
SECONDS, ROUNDS = 0.2, 5  # minimum per comparison
TOKENS = 200


def measure(kernels: str) -> dict[str, Any] | None:
    """Returns times in ms on the cores that this process may use; None without these kernels."""
    from jax_q4k import native

    try:
        native.select(kernels)
    except ValueError:
        return None
    products = [row for size in SIZES for m in ROWS for row in measure_products(size, m)]
    return {
        "kernels": kernels,
        "cores": len(os.sched_getaffinity(0)),
        "demo_tokens_per_second": demo_tokens_per_second(),
        "products": products,
    }


def measure_products(size: int, m: int) -> list[dict[str, Any]]:
    """Returns a row per type of weights (size, size), for m rows of activations."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_q4k as jq

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, size), np.float32))
    dense = jnp.asarray(rng.standard_normal((size, size), np.float32))
    product = jax.jit(jq.matmul)

    def by(implementation: Literal["native", "xla"], w: Any) -> Callable[[], Any]:
        with jq.implementation(implementation, activations="f32"):
            compiled = product.lower(x, w).compile()
        return lambda: compiled(x, w)

    dot = jax.jit(lambda x, w: jnp.dot(x, w.T))
    rows = []
    for name in (*jq.quantizers.names(), *FLOATS):
        w = dense.astype(FLOATS[name]) if name in FLOATS else _random(name, size, rng)
        programs = {"native": by("native", w), "dense": lambda: dot(x, dense)}
        if name in DECODED:
            programs["xla"] = by("xla", w)
        rows.append(
            {"format": name, "size": size, "rows": m, **milliseconds(programs, SECONDS, ROUNDS)}
        )
    return rows


def _random(format: str, size: int, rng: Any) -> Any:
    import jax.numpy as jnp

    import jax_q4k as jq

    part = jq.quantize(rng.standard_normal((64, size)).astype("float32"), format)
    planes = tuple(jnp.tile(plane, (size // 64, 1, 1)) for plane in part.planes)
    return jq.QuantizedArray(format, (size, size), planes)


def demo_tokens_per_second() -> float:
    """Returns the demo model's decoding rate with float activations, best of some runs."""
    import jax_q4k as jq
    from jax_q4k import models

    model = models.load("demo")
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_end": True}
    seconds = []
    with jq.implementation("native", activations="f32"):
        for _ in range(4):
            start = time.perf_counter()
            models.generate(model, [(1, 300, 301, 302)], **options)
            seconds.append(time.perf_counter() - start)
    return TOKENS / min(seconds)


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "float_products", __doc__)
    results = []
    for kernels in os.environ.get("FLOAT_PRODUCTS_KERNELS", "avx512,avx2").split(","):
        for cores in core_sets():
            count = len(cores)
            found = on_cores(cores, "float_products", "measure", kernels)
            if not found:
                continue
            results.append(found)
            print(
                f"{kernels}, {count} core{'s' * (count > 1)}:"
                f" the demo model decodes {found['demo_tokens_per_second']:.0f} tokens/s"
            )
            print(f"{'weights':8}{'size':>6}{'rows':>6}{'ms':>9}{'dense':>9}{'ratio':>7}{'xla':>9}")
            for r in found["products"]:
                decoded = f"{r['xla']:9.3f}" if "xla" in r else ""
                print(
                    f"{r['format']:8}{r['size']:6}{r['rows']:6}{r['native']:9.3f}{r['dense']:9.3f}"
                    f"{r['native'] / r['dense']:7.2f}{decoded}"
                )
    settings = {"load_before": round(os.getloadavg()[0], 1)}
    print(write_results(file, settings | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
