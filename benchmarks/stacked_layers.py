"""Compares loops over stacked weights: `python -m benchmarks.stacked_layers [FILE]`.

One product per layer, Q4_K, in three programs: `unrolled`, each layer a separate array; `sliced`,
`lax.scan` over the stack, of which XLA copies a layer in each iteration; `indexed`,
`jq.matmul(x, stack, index=i)`. On the CPU, with one core and with two, it measures times, the best
of rounds in which the programs take turns, and temporary memory. Compiled for an H200 without one,
it reports launches per iteration, temporary memory and the packed bytes written per iteration.
Writes `benchmarks/results/stacked_layers.json`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tools import aot
from tools.results import write_results

from .common import core_sets, milliseconds, on_cores, results_file

SHAPES = ((4, 2048), (32, 1024))  # layers, rows and columns of each
ROWS = (1, 16)
SECONDS, ROUNDS = 8.0, 5  # minimum per comparison


def unrolled(x: Any, stack: Any) -> Any:
    import jax_q4k as jq

    for w in stack:
        x = jq.matmul(x, w)
    return x


def sliced(x: Any, stack: Any) -> Any:
    import jax

    import jax_q4k as jq

    return jax.lax.scan(lambda x, w: (jq.matmul(x, w), None), x, stack)[0]


def indexed(x: Any, stack: Any) -> Any:
    import jax

    import jax_q4k as jq

    layers = stack.shape[0]
    return jax.lax.fori_loop(0, layers, lambda i, x: jq.matmul(x, stack, index=i), x)


PROGRAMS: tuple[Callable[..., Any], ...] = (unrolled, sliced, indexed)


def weights(layers: int, size: int) -> tuple[Any, list[Any]]:
    """Returns a stack whose products neither grow nor vanish, and its layers as separate arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_q4k as jq

    rng = np.random.default_rng(0)
    part = jq.quantize(rng.standard_normal((64, size), np.float32) / np.sqrt(size), "Q4_K")
    tiles = (layers, size // 64, 1, 1)
    stack = jax.tree.map(
        lambda plane: jnp.tile(plane, tiles).reshape(layers, size, *plane.shape[1:]), part
    )
    return stack, list(stack)


def measure() -> list[dict[str, Any]]:
    """Returns times in ms and temporary bytes on the cores that this process may use."""
    import jax
    import jax.numpy as jnp

    found = []
    for layers, size in SHAPES:
        stack, each = weights(layers, size)
        for rows in ROWS:
            x = jnp.cos(jnp.arange(rows * size, dtype=jnp.float32)).reshape(rows, size)
            runs, temporary = {}, {}
            for function in PROGRAMS:
                args = x, each if function is unrolled else stack
                compiled: Any = jax.jit(function).lower(*args).compile()
                runs[function.__name__] = _call(compiled, args)
                temporary[function.__name__] = compiled.memory_analysis().temp_size_in_bytes
            shape = {"layers": layers, "size": size, "rows": rows}
            times = milliseconds(runs, SECONDS, ROUNDS, min)
            found.append(shape | {"milliseconds": times, "temporary_bytes": temporary})
    return found


def _call(compiled: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: compiled(*args)


def compiled_for_a_gpu() -> list[dict[str, Any]]:
    """Returns, for each loop on an H200, launches and written packed bytes per iteration.

    Also returns temporary bytes.
    """
    import jax
    import jax.numpy as jnp

    from jax_q4k import models

    found = []
    for layers, size in SHAPES:
        stack, _ = weights(layers, size)
        for rows in ROWS:
            x = jax.ShapeDtypeStruct((rows, size), jnp.float32)
            for function in (sliced, indexed):
                program = aot.compile_program(
                    jax.jit(function), x, stack, options=models.CUDA_COMPILER_OPTIONS
                )
                inside = [t for t in program.launches if t.is_in("kWhile")]
                written = [r for t in inside if t.instruction for r in t.instruction.results]
                found.append(
                    {
                        "program": function.__name__,
                        **{"layers": layers, "size": size, "rows": rows},
                        "launches": len(inside),
                        "packed_bytes_written": sum(r.elements for r in written if r.dtype == "u8"),
                        "temporary_bytes": program.temp_bytes,
                    }
                )
    return found


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "stacked_layers", __doc__)
    results: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 1), "cpu": []}
    for cores in core_sets():
        count = len(cores)
        rows = on_cores(cores, "stacked_layers", "measure")
        results["cpu"].append({"cores": count, "loops": rows})
        print(f"{count} core{'s' * (count > 1)}, ms (temporary KB)")
        for r in rows:
            cells = "".join(
                f"{r['milliseconds'][f.__name__]:9.3f} ({r['temporary_bytes'][f.__name__] >> 10})"
                for f in PROGRAMS
            )
            print(f"{r['layers']:3} x {r['size']}^2, {r['rows']:2} rows{cells}")
    if reason := aot.unavailable():
        print(reason)
    else:
        results["h200"] = compiled_for_a_gpu()
        for r in results["h200"]:
            print(r)
    print(write_results(file, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
