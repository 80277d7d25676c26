"""Command lines of benchmarks, their result files, and processes bound to some cores."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def core_sets(counts: Iterable[int] = (1, 2)) -> Iterator[set[int]]:
    """Yields sets of cores that this process may use, one per count that is available."""
    available = sorted(os.sched_getaffinity(0))
    for count in counts:
        if count <= len(available):
            yield set(available[:count])


def on_cores(cores: set[int], module: str, function: str, *args: Any) -> Any:
    """Runs `benchmarks.module.function(*args)` in a process that may use only these cores.

    The process is bound from its start, because JAX then sizes its thread pool; NumPy starts no
    threads. The result must fit JSON, and `args` must be literals.
    """
    code = (
        f"import json, os; os.sched_setaffinity(0, {sorted(cores)});"
        f" from benchmarks import {module};"
        f" print(json.dumps({module}.{function}(*{args!r})))"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def milliseconds(
    programs: dict[str, Callable[[], Any]],
    seconds: float,
    rounds: int,
    summary: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Times programs in turn, for at least `seconds` and `rounds`; returns milliseconds.

    A program returns an array; `summary` reduces its times to one number.
    """
    for run in programs.values():
        run().block_until_ready()
    times: dict[str, list[float]] = {name: [] for name in programs}
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        done += 1
        for name, run in programs.items():
            for again in range(3):  # the first run brings its own weights into the cache
                start = time.perf_counter()
                run().block_until_ready()
                if again:
                    times[name].append(time.perf_counter() - start)
    return {name: 1e3 * summary(taken) for name, taken in times.items()}


def part_of(program: str, description: str | None) -> None:
    """Runs the command line of a module that is only part of a program: help, or an error."""
    parser = argparse.ArgumentParser(
        description=f"{description}\n\npython -m benchmarks.{program} runs it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    parser.error(f"run python -m benchmarks.{program}")


def results_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the argument `file`; by default the results of benchmark `name`."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = RESULTS / f"{name}.json"
    parser.add_argument(
        "file", nargs="?", type=Path, default=default, metavar="FILE", help="JSON to write"
    )
    return parser


def results_file(arguments: list[str], name: str, description: str | None) -> Path:
    """Returns the file that a command line names; by default the results of benchmark `name`."""
    file: Path = results_parser(name, description).parse_args(arguments).file
    return file


if __name__ == "__main__":
    part_of("NAME", __doc__)
