"""Simulates more threads than a machine has: `python -m benchmarks.cpu_threads`.

Schedules the tasks that the CPU kernels make of a step of the llama of `benchmarks.cpu` on 1, 2, 4
and 8 threads like `jax_q4k/native/src/threads.h`: no thread is idle while a task is waiting. A task
takes its share of the time that one core measured (`benchmarks/results/cpu.json`), as if memory
gave every core the same bandwidth. Each call of a kernel starts with CALL seconds of one thread.
The result for two threads is printed with the measurement on two cores. Writes
`benchmarks/results/cpu_threads.json`.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator
from typing import Any

from tools.random_model import LLAMA_1B
from tools.results import write_results

from .common import RESULTS

THREADS = (1, 2, 4, 8)
CALL = 10e-6  # seconds: XLA's work between kernels, and waking a waiting thread
PROMPT = 512
#: Constants of `threads.h`, `kernels.h` and `attention_handlers.cpp`.
WORTH_WAKING, WORTH_TAKING = 1 << 19, 1 << 14
TILE, SHARING = 64, 64

#: tasks of a call, and multiply-adds of each
Call = tuple[int, float]


def products(rows: int, threads: int) -> Iterator[Call]:
    """Yields the calls of a step's products, with `rows` rows of activations."""
    c = LLAMA_1B
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = [
        (heads + 2 * kv_heads, c.hidden_size, 1),
        (c.hidden_size, heads, 1),
        (c.intermediate_size, c.hidden_size, 2),
        (c.hidden_size, c.intermediate_size, 1),
    ]
    for n, k, matrices in layer * c.num_layers + [(c.vocab_size, c.hidden_size, 1)]:
        m = 1 if n == c.vocab_size else rows  # logits of the last token only
        share = max(16, min(256, n // (threads * 8) // 16 * 16))
        size = TILE if m > 8 else share
        yield -(-n // size), size * k * m * matrices


def attention(rows: int) -> Iterator[Call]:
    """Yields the calls of a prompt's attention.

    A step of one token without context takes no time.
    """
    c = LLAMA_1B
    group = c.num_heads // c.num_kv_heads
    steps = rows * group // SHARING
    for _ in range(c.num_layers if steps else 0):
        yield c.num_kv_heads * steps, SHARING * rows * c.head_dim


def seconds(calls: list[Call], rate: float, threads: int) -> float:
    """Returns the seconds of calls in sequence, at `rate` multiply-adds per second and thread."""
    total = 0.0
    for tasks, work in calls:
        grain = max(1, int(WORTH_TAKING // work))
        worth = int(tasks * work // WORTH_WAKING)
        busy = max(1, min(threads, -(-tasks // grain), worth))
        free = [0.0] * busy
        for first in range(0, tasks, grain):
            heapq.heapreplace(free, free[0] + min(grain, tasks - first) * work / rate)
        total += CALL + max(free)
    return total


def simulated(rows: int, tokens_per_second: float) -> dict[int, float]:
    """Returns tokens per second by number of threads, based on one thread's measured rate."""

    def calls(threads: int) -> list[Call]:
        return [*products(rows, threads), *attention(rows)]

    one = calls(1)
    work = sum(tasks * each for tasks, each in one)
    rate = work / (rows / tokens_per_second - CALL * len(one))
    return {threads: rows / seconds(calls(threads), rate, threads) for threads in THREADS}


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measured = {
        r["threads"]: r["ours"] for r in json.loads((RESULTS / "cpu.json").read_text())["results"]
    }
    results: list[dict[str, Any]] = []
    for name, rows in (("prefill_512", PROMPT), ("decode_0", 1)):
        predicted = simulated(rows, measured[1][name])
        results.append(
            {
                "figure": name,
                "predicted": {str(t): round(rate, 1) for t, rate in predicted.items()},
                "measured": {str(t): round(ours[name], 1) for t, ours in measured.items()},
            }
        )
        speedups = ", ".join(f"{t} threads {r / predicted[1]:.2f}" for t, r in predicted.items())
        print(f"{name}, predicted times as fast as one thread: {speedups}")
        print(f"  measured with 2 cores: {measured[2][name] / measured[1][name]:.2f}")
    print(write_results(RESULTS / "cpu_threads.json", {"results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
