"""Measures an Engine beside one batch of `generate`: `python -m benchmarks.engine [FILE]`.

For each number of clients: tokens per second of clients that submit one request after the other
(`closed`), of requests that arrive at random times (`poisson`), and of one `generate` call with as
many prompts; seconds to the first token, gaps between tokens, and the host's part of a step. Then
the gaps of running requests while a long prompt comes in, and the time of a prompt that is cached.
Runs take turns; figures are medians over ROUNDS. Writes `benchmarks/results/engine.json`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tools.results import write_results

from .common import RESULTS

ROUNDS = 3
CLIENTS = (1, 2, 4, 8, 16)
#: Tokens of prompts and answers: shortest and longest; requests per client and round.
PROMPT, ANSWER, REQUESTS = (16, 96), (32, 96), 2
LONG, CACHED = 384, 320  # tokens of the long prompt, and of the cached beginning


class Work:
    """Random prompts and lengths, equal for all that are compared."""

    def __init__(self, model: Any, count: int, seed: int) -> None:
        rng = random.Random(seed)
        vocab = model.config.vocab_size
        self.prompts = [
            [rng.randrange(vocab) for _ in range(rng.randint(*PROMPT))] for _ in range(count)
        ]
        self.lengths = [rng.randint(*ANSWER) for _ in range(count)]

    @property
    def samplings(self) -> list[Any]:
        from jax_q4k import models

        return [models.Sampling(max_new_tokens=n, ignore_end=True) for n in self.lengths]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Reader(threading.Thread):
    """Reads one request's pieces and notes when they come."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request, self.times = request, [time.perf_counter()]
        self.start()

    def run(self) -> None:
        for piece in self.request:
            if piece.token is not None:
                self.times.append(time.perf_counter())

    @property
    def first(self) -> float:
        return self.times[1] - self.times[0]

    @property
    def gaps(self) -> list[float]:
        later = self.times[1:]
        return [after - before for before, after in zip(later, later[1:], strict=False)]


def closed(engine: Any, model: Any, clients: int, seed: int) -> dict[str, Any]:
    """Runs clients that submit their next request when the last is answered."""
    work, readers, lock = Work(model, clients * REQUESTS, seed), [], threading.Lock()
    before = engine.stats()
    queue = list(zip(work.prompts, work.samplings, strict=True))

    def client() -> None:
        while True:
            with lock:
                if not queue:
                    return
                prompt, sampling = queue.pop()
            reader = Reader(engine.submit(prompt, sampling))
            reader.join()
            with lock:
                readers.append(reader)

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, after = time.perf_counter() - began, engine.stats()
    steps = after.steps - before.steps
    return _latencies(readers) | {
        "tokens_per_second": work.tokens / seconds,
        "host_ms_per_step": 1e3 * (after.host_seconds - before.host_seconds) / steps,
        "step_ms": 1e3 * seconds / steps,
    }


def poisson(engine: Any, model: Any, rate: float, count: int, seed: int) -> dict[str, Any]:
    """Submits requests at random times, `rate` a second."""
    work, rng, readers = Work(model, count, seed), random.Random(seed), []
    began = time.perf_counter()
    for prompt, sampling in zip(work.prompts, work.samplings, strict=True):
        readers.append(Reader(engine.submit(prompt, sampling)))
        time.sleep(rng.expovariate(rate))
    for reader in readers:
        reader.join()
    return _latencies(readers) | {"tokens_per_second": work.tokens / (time.perf_counter() - began)}


def batch(model: Any, count: int, seed: int) -> float:
    """Returns the tokens per second of one `generate` call, after one that compiles."""
    from jax_q4k import models

    work = Work(model, count, seed)
    for _ in range(2):
        began = time.perf_counter()
        models.generate(model, work.prompts, work.samplings)
    return work.tokens / (time.perf_counter() - began)


def long_prompt(engine: Any, model: Any, seed: int) -> dict[str, float]:
    """Returns the gaps of four running requests while a prompt of LONG tokens comes in."""
    from jax_q4k import models

    rng = random.Random(seed)
    vocab = model.config.vocab_size
    running = models.Sampling(max_new_tokens=96, ignore_end=True)
    readers = [Reader(engine.submit([rng.randrange(vocab)] * 8, running)) for _ in range(4)]
    while any(len(reader.times) < 8 for reader in readers):
        time.sleep(0.001)
    prompt = [rng.randrange(vocab) for _ in range(LONG)]
    long = Reader(engine.submit(prompt, models.Sampling(max_new_tokens=1)))
    for reader in (*readers, long):
        reader.join()
    meanwhile = [
        after - before
        for reader in readers
        for before, after in zip(reader.times[1:], reader.times[2:], strict=False)
        if long.times[0] < after and before < long.times[-1]
    ]
    return {"first_token": long.first, "gap_p99": _percentile(meanwhile, 99)}


def cached_prompt(engine: Any, model: Any, seed: int) -> dict[str, float]:
    """Returns the seconds of a prompt of CACHED + 8 tokens, new and with CACHED of them cached."""
    rng, seconds = random.Random(seed), []
    vocab = model.config.vocab_size
    beginning = [rng.randrange(vocab) for _ in range(CACHED)]
    for _ in range(2):
        prompt = beginning + [rng.randrange(vocab) for _ in range(8)]
        began = time.perf_counter()
        engine.submit(prompt, max_new_tokens=1).result()
        seconds.append(time.perf_counter() - began)
    return {"new": seconds[0], "cached": seconds[1]}


def measure(model: Any, clients: tuple[int, ...] = CLIENTS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Returns all figures of a model."""
    from jax_q4k import models

    results: dict[str, Any] = {"clients": {}}
    with models.Engine(model, max_rows=max(clients)) as engine:
        for count in clients:
            found: list[dict[str, Any]] = []
            for seed in range(rounds + 1):
                one = closed(engine, model, count, seed)
                one["generate_tokens_per_second"] = batch(model, count, seed)
                found.append(one)
            results["clients"][count] = _median(found[1:])  # the first compiles
        most = results["clients"][max(clients)]["tokens_per_second"]
        for load in (0.25, 0.75):
            rate = load * most / (sum(ANSWER) / 2)
            found = [poisson(engine, model, rate, 2 * max(clients), seed) for seed in range(rounds)]
            results[f"poisson_{load}"] = _median(found)
        results["long_prompt"] = _median([long_prompt(engine, model, s) for s in range(rounds)])
        results["cached_prompt"] = _median([cached_prompt(engine, model, s) for s in range(rounds)])
        results["compilations"] = engine.stats().compilations
    return results


def _latencies(readers: list[Reader]) -> dict[str, float]:
    first = [reader.first for reader in readers]
    gaps = [gap for reader in readers for gap in reader.gaps]
    return {
        f"{name}_p{part}": _percentile(values, part)
        for name, values in (("first_token", first), ("gap", gaps))
        for part in (50, 99)
    }


def _percentile(values: list[float], part: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) * part // 100, len(ordered) - 1)]


def _median(found: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "engine.json")
    parser.add_argument("--model", default="demo", help="GGUF file; default: the demo model")
    options = parser.parse_args(arguments)
    from jax_q4k import models

    settings = {
        "model": options.model,
        "load_before": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
    }
    results = measure(models.load(options.model))
    for count, one in results["clients"].items():
        ratio = one["tokens_per_second"] / one["generate_tokens_per_second"]
        print(
            f"{count:3} clients {one['tokens_per_second']:8.0f} tokens/s, {ratio:5.2f} of generate;"
            f" first token {1e3 * one['first_token_p50']:7.1f} ms,"
            f" gaps {1e3 * one['gap_p50']:6.2f} ms (p99 {1e3 * one['gap_p99']:6.2f});"
            f" host {one['host_ms_per_step']:5.2f} of {one['step_ms']:6.2f} ms a step"
        )
    print(write_results(options.file, settings | results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
