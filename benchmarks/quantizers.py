"""Measures the speed of the quantizers: `python -m benchmarks.quantizers [FILE]`.

Quantizes normally distributed rows to every format, with one core and with all. Writes
`benchmarks/results/quantizers.json`. Each figure is the median of some runs, after one that
compiles. If other programs use the cores too, use the rate per second of CPU time.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from typing import Any

from tools.results import write_results

from .common import on_cores, results_file

ROWS, COLUMNS = 2048, 4096
REPEATS = 3


def measure(format: str) -> dict[str, Any]:
    """Returns million weights per second, of wall and CPU time, on the cores of this process."""
    import numpy as np

    from jax_q4k import quantizers

    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    quantizers.quantize(x[: quantizers.CHUNK // COLUMNS], format)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = [], []
    for _ in range(REPEATS):
        start, cpu_start = time.perf_counter(), time.process_time()
        quantizers.quantize(x, format)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "format": format,
        "cores": len(os.sched_getaffinity(0)),
        "million_per_second": x.size / statistics.median(wall) / 1e6,
        "million_per_cpu_second": x.size / statistics.median(cpu) / 1e6,
        "peak_megabytes_beyond_the_input": (after - before) / 1024,
    }


def measure_all() -> list[dict[str, Any]]:
    from jax_q4k import quantizers

    return [measure(format) for format in quantizers.names()]


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "quantizers", __doc__)
    available = os.sched_getaffinity(0)
    results = [
        row
        for cores in ({max(available)}, available)
        for row in on_cores(cores, "quantizers", "measure_all")
    ]
    print(f"{'format':8}{'cores':>6}{'million/s':>12}{'per CPU second':>16}{'MB':>8}")
    for r in results:
        print(
            f"{r['format']:8}{r['cores']:6}{r['million_per_second']:12.1f}{r['million_per_cpu_second']:16.1f}"
            f"{r['peak_megabytes_beyond_the_input']:8.0f}"
        )
    settings = {
        "rows": ROWS,
        "columns": COLUMNS,
        "repeats": REPEATS,
        "load_before": round(os.getloadavg()[0], 1),
    }
    print(write_results(file, settings | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
