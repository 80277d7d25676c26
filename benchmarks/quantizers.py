"""Measures the speed of the quantizers: `python -m benchmarks.quantizers [FILE] [--ggml PATH]`.

Quantizes normally distributed rows to every format, with one core and with all. Writes
`benchmarks/results/quantizers.json`. With ggml's library (libggml-base.so) at PATH, ggml quantizes
the same rows in turn, with as many threads; `rmse` is the error relative to the weights. Formats
that ggml quantizes only with an importance of the columns get an even one. Each figure is the
median of some runs, after one that compiles. If other programs use the cores too, use the rate
per second of CPU time.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.results import write_results

from .common import on_cores, results_parser

ROWS, COLUMNS = 2048, 4096
REPEATS = 3


def measure(format: str, ggml: str | None = None) -> dict[str, Any]:
    """Returns million weights per second, of wall and CPU time, on the cores of this process.

    ggml: path of ggml's library, whose figures are then `ggml`'s entries of the row.
    """
    import numpy as np

    from jax_q4k import quantizers
    from ptx_kernels import formats

    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    sides: dict[str, Callable[[], Any]] = {"": lambda: quantizers.quantize(x, format)}
    if ggml is not None:
        sides["ggml_"] = lambda: by_ggml(ggml, x, format)
    quantizers.quantize(x[: quantizers.CHUNK // COLUMNS], format)
    if ggml is not None:
        by_ggml(ggml, x[:8], format)  # makes tables
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    packed, after = {}, 0
    for _ in range(REPEATS):
        for side, run in sides.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            packed[side] = run()
            wall[side].append(time.perf_counter() - start)
            cpu[side].append(time.process_time() - cpu_start)
            after = after or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row: dict[str, Any] = {"format": format, "cores": len(os.sched_getaffinity(0))}
    for side, blocks in packed.items():
        block = formats.get(format)
        decoded = block.decode(block.split(blocks))
        row |= {
            f"{side}million_per_second": x.size / statistics.median(wall[side]) / 1e6,
            f"{side}million_per_cpu_second": x.size / statistics.median(cpu[side]) / 1e6,
            f"{side}rmse": float(np.sqrt(np.mean((decoded - x) ** 2.0) / np.mean(x**2.0))),
        }
    return row | {"peak_megabytes_beyond_the_input": (after - before) / 1024}


def by_ggml(path: str, x: Any, format: str) -> Any:
    """Quantizes float32 (rows, k) by ggml's library, like `quantizers.quantize`.

    One thread per core takes a part of the rows.
    """
    import gguf
    import numpy as np

    from ptx_kernels import formats

    library, number = ctypes.CDLL(path), gguf.GGMLQuantizationType[format].value
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    quantize_rows = library.ggml_quantize_chunk
    quantize_rows.restype = ctypes.c_size_t
    quantize_rows.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    library.ggml_quantize_init(number)  # tables, which threads share
    block, (rows, k) = formats.get(format), x.shape
    packed = np.zeros((rows, k // block.block_size, block.block_bytes), np.uint8)
    even = np.ones(k, np.float32)
    weights = even.ctypes.data if library.ggml_quantize_requires_imatrix(number) else None
    threads = len(os.sched_getaffinity(0))
    step = -(-rows // (8 * threads))

    def part(first: int) -> None:
        count = min(step, rows - first)
        quantize_rows(number, x.ctypes.data, packed.ctypes.data, first * k, count, k, weights)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(0, rows, step)))
    return packed


def measure_all(ggml: str | None = None) -> list[dict[str, Any]]:
    from jax_q4k import quantizers

    return [measure(format, ggml) for format in quantizers.names()]


def print_table(results: list[dict[str, Any]]) -> None:
    """Prints a line per format and number of cores, with ggml's figures if there are any."""
    heads = ["", "ggml_"] if "ggml_rmse" in results[0] else [""]
    columns = "".join(
        f"{head[:-1] + ' million/s':>16}{'per CPU s':>11}{'rmse':>9}" for head in heads
    )
    print(f"{'format':8}{'cores':>6}{columns}{'MB':>8}")
    for r in results:
        figures = "".join(
            f"{r[head + 'million_per_second']:16.1f}{r[head + 'million_per_cpu_second']:11.1f}"
            f"{r[head + 'rmse']:9.5f}"
            for head in heads
        )
        print(f"{r['format']:8}{r['cores']:6}{figures}{r['peak_megabytes_beyond_the_input']:8.0f}")


def main(arguments: list[str]) -> int:
    parser = results_parser("quantizers", __doc__)
    parser.add_argument("--ggml", metavar="PATH", help="ggml's library, to compare with")
    options = parser.parse_args(arguments)
    available = os.sched_getaffinity(0)
    results = [
        row
        for cores in ({max(available)}, available)
        for row in on_cores(cores, "quantizers", "measure_all", options.ggml)
    ]
    print_table(results)
    settings = {
        "rows": ROWS,
        "columns": COLUMNS,
        "repeats": REPEATS,
        "load_before": round(os.getloadavg()[0], 1),
    }
    print(write_results(options.file, settings | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
