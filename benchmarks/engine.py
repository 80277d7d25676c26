"""Measures an Engine beside `generate` and llama-server: `python -m benchmarks.engine [FILE]`.

For each number of clients, which submit one request after the other: tokens per second, seconds to
the first token, and gaps between tokens; for the engine also the host's part of a step, and the
tokens per second of one `generate` call with as many prompts. Then requests that arrive at random
times, gaps of four running requests while a long prompt comes in, and the time of a prompt with a
cached beginning. All run in turn with the same prompts; figures are medians over ROUNDS.

llama-server of `--llama-cpp FOLDER` has as many slots as there are clients, a unified KV cache, and
continuous batching. Its requests come over HTTP from this process; the engine's do not.

Writes `benchmarks/results/engine.json`.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.results import write_results

from .common import RESULTS
from .http_servers import LlamaServer

ROUNDS = 3
CLIENTS = (1, 2, 4, 8, 16)
#: Tokens of prompts and answers: shortest and longest; requests per client and round.
PROMPT, ANSWER, REQUESTS = (16, 96), (32, 96), 2
LONG = 384  # default tokens of the long prompt; half of them are a prompt's cached beginning

#: Submits token ids and the number of tokens to generate; iterating gives one item per token.
Submit = Callable[[list[int], int], Iterable[Any]]


class Work:
    """Random prompts and lengths, equal for all that are compared."""

    def __init__(self, vocab: int, count: int, seed: int) -> None:
        self.seed, rng = seed, random.Random(seed)
        self.prompts = [_random_tokens(rng, vocab, rng.randint(*PROMPT)) for _ in range(count)]
        self.lengths = [rng.randint(*ANSWER) for _ in range(count)]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Reader(threading.Thread):
    """Reads one request's tokens and notes when they come."""

    def __init__(self, submit: Submit, prompt: list[int], tokens: int) -> None:
        super().__init__()
        self.times = [time.perf_counter()]
        self._request = submit(prompt, tokens)
        self.start()

    def run(self) -> None:
        for _ in self._request:
            self.times.append(time.perf_counter())

    @property
    def first(self) -> float:
        return self.times[1] - self.times[0]

    @property
    def gaps(self) -> list[float]:
        later = self.times[1:]
        return [after - before for before, after in zip(later, later[1:], strict=False)]


def closed(submit: Submit, work: Work, clients: int) -> dict[str, float]:
    """Runs clients that submit their next request when the last is answered."""
    readers, lock = [], threading.Lock()
    queue = list(zip(work.prompts, work.lengths, strict=True))

    def client() -> None:
        while True:
            with lock:
                if not queue:
                    return
                prompt, tokens = queue.pop()
            reader = Reader(submit, prompt, tokens)
            reader.join()
            with lock:
                readers.append(reader)

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _latencies(readers) | {"tokens_per_second": work.tokens / (time.perf_counter() - began)}


def poisson(submit: Submit, work: Work, rate: float) -> dict[str, float]:
    """Submits requests at random times, `rate` a second."""
    rng, readers = random.Random(work.seed), []
    began = time.perf_counter()
    for prompt, tokens in zip(work.prompts, work.lengths, strict=True):
        readers.append(Reader(submit, prompt, tokens))
        time.sleep(rng.expovariate(rate))
    for reader in readers:
        reader.join()
    return _latencies(readers) | {"tokens_per_second": work.tokens / (time.perf_counter() - began)}


def long_prompt(submit: Submit, vocab: int, tokens: int, seed: int) -> dict[str, float]:
    """Returns the gaps of four running requests while a prompt of `tokens` comes in."""
    rng = random.Random(seed)
    readers = [Reader(submit, _random_tokens(rng, vocab, 8), 96) for _ in range(4)]
    while any(len(reader.times) < 3 for reader in readers):
        time.sleep(0.001)
    long = Reader(submit, _random_tokens(rng, vocab, tokens), 1)
    for reader in (*readers, long):
        reader.join()
    meanwhile = [
        after - before
        for reader in readers
        for before, after in zip(reader.times[1:], reader.times[2:], strict=False)
        if long.times[0] < after and before < long.times[-1]
    ]
    return {"first_token": long.first, "gap_p99": _percentile(meanwhile, 99)}


def cached_prompt(submit: Submit, vocab: int, tokens: int, seed: int) -> dict[str, float]:
    """Returns the seconds of a prompt of `tokens` + 8, new and with `tokens` of them cached."""
    rng, seconds = random.Random(seed), []
    beginning = _random_tokens(rng, vocab, tokens)
    for _ in range(2):
        reader = Reader(submit, beginning + _random_tokens(rng, vocab, 8), 1)
        reader.join()
        seconds.append(reader.first)
    return {"new": seconds[0], "cached": seconds[1]}


def measure(
    model: Any,
    clients: tuple[int, ...] = CLIENTS,
    rounds: int = ROUNDS,
    long: int = LONG,
    peer: Submit | None = None,
    cache_dtype: Any = "float32",
) -> dict[str, Any]:
    """Returns all figures of an engine in default and in deterministic mode, and of a peer."""
    from jax_q4k import models

    vocab, rows = model.config.vocab_size, max(clients)
    context = max(long, PROMPT[1]) + ANSWER[1] + 32
    options: dict[str, Any] = {"max_rows": rows, "max_context": context, "cache_dtype": cache_dtype}
    options["pages"] = rows * (context // 16 + 1)
    results: dict[str, Any] = {"clients": {count: {} for count in clients}}
    with models.Engine(model, **options) as engine:
        targets = {"engine": submitter(engine)} | ({} if peer is None else {"llama-server": peer})
        for submit in targets.values():
            closed(submit, Work(vocab, rows, seed=1), rows)  # warms up
        for count in clients:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
            found["generate"] = []
            for seed in range(rounds):
                work = Work(vocab, count * REQUESTS, 100 * count + seed)  # no cached prefix
                for name, submit in targets.items():
                    before, began = engine.stats(), time.perf_counter()
                    one = closed(submit, work, count)
                    if name == "engine":
                        one |= _of_steps(before, engine.stats(), time.perf_counter() - began)
                    found[name].append(one)
                speed = _generate(model, Work(vocab, count, 100 * count + seed), cache_dtype)
                found["generate"].append({"tokens_per_second": speed})
            for name, ones in found.items():
                results["clients"][count][name] = median(ones)
                report(f"{count:2} clients, {name}", results["clients"][count][name])
        most = results["clients"][rows]["engine"]["tokens_per_second"]
        for load in (0.25, 0.75):
            rate = load * most / (sum(ANSWER) / 2)
            works = [Work(vocab, rows, int(10**6 * load) + s) for s in range(rounds)]
            results[f"poisson_{load}"] = in_turn(
                f"{load} of the engine's speed",
                targets,
                [functools.partial(poisson, work=work, rate=rate) for work in works],
            )
        seeds = range(rounds)
        results["long_prompt"] = in_turn(
            f"a prompt of {long} tokens",
            targets,
            [functools.partial(long_prompt, vocab=vocab, tokens=long, seed=s) for s in seeds],
        )
        results["cached_prompt"] = in_turn(
            f"{long // 2} cached tokens",
            targets,
            [
                functools.partial(cached_prompt, vocab=vocab, tokens=long // 2, seed=s)
                for s in seeds
            ],
        )
        results["compilations"] = engine.stats().compilations
        results["reused_tokens"] = engine.stats().reused_tokens
    with models.Engine(model, **options, deterministic=True) as engine:
        for count in clients:
            work = Work(vocab, count * REQUESTS, 100 * count + 1)
            results["clients"][count]["deterministic"] = closed(submitter(engine), work, count)
            name = f"{count:2} clients, deterministic"
            report(name, results["clients"][count]["deterministic"])
    return results


def in_turn(
    name: str, targets: dict[str, Submit], runs: Sequence[Callable[[Submit], dict[str, float]]]
) -> dict[str, dict[str, float]]:
    """Runs each of `runs` with all targets in turn; returns each target's medians."""
    turns = [{target: run(submit) for target, submit in targets.items()} for run in runs]
    found = {target: median([turn[target] for turn in turns]) for target in targets}
    for target, one in found.items():
        report(f"{name}, {target}", one)
    return found


def submitter(engine: Any) -> Submit:
    """Returns a function that submits requests to an engine."""
    return lambda prompt, tokens: (
        piece
        for piece in engine.submit(prompt, max_new_tokens=tokens, ignore_end=True)
        if piece.token is not None
    )


def _generate(model: Any, work: Work, cache_dtype: Any) -> float:
    """Returns the tokens per second of one `generate` call, after one that compiles."""
    from jax_q4k import models

    samplings = [models.Sampling(max_new_tokens=n, ignore_end=True) for n in work.lengths]
    for _ in range(2):
        began = time.perf_counter()
        models.generate(model, work.prompts, samplings, cache_dtype=cache_dtype)
    return work.tokens / (time.perf_counter() - began)


def _of_steps(before: Any, after: Any, seconds: float) -> dict[str, float]:
    steps = after.steps - before.steps
    host = after.host_seconds - before.host_seconds
    return {"host_ms_per_step": 1e3 * host / steps, "step_ms": 1e3 * seconds / steps}


def _random_tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


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


def median(found: list[dict[str, float]]) -> dict[str, float]:
    """Returns the medians of figures."""
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def report(name: str, figures: dict[str, float]) -> None:
    """Prints figures, seconds in milliseconds."""
    shown = {
        key: f"{value:.2f}" if "per" in key or "ms" in key else f"{1e3 * value:.1f} ms"
        for key, value in figures.items()
    }
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)


def parsed(arguments: list[str], name: str, description: str | None) -> argparse.Namespace:
    """Returns the options of a benchmark that writes `benchmarks/results/NAME.json`."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--model", default="demo", help="GGUF file; default: the demo model")
    parser.add_argument("--llama-cpp", metavar="FOLDER", type=Path, help="has llama-server")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--long", type=int, default=LONG, help="tokens; default: %(default)s")
    return parser.parse_args(arguments)


def surroundings(model: Any) -> dict[str, Any]:
    """Returns what a results file says of the model and the machine."""
    return {
        "model": repr(model),
        "load_before": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def main(arguments: list[str]) -> int:
    options = parsed(arguments, "engine", __doc__)
    from jax_q4k import models

    model = models.load(options.model)
    settings = surroundings(model)
    if options.llama_cpp is None:
        results = measure(model, rounds=options.rounds, long=options.long)
    else:
        with LlamaServer(options.llama_cpp, options.model, max(CLIENTS)) as server:
            args = options.rounds, options.long, server.submit
            results = measure(model, CLIENTS, *args)
            settings["llama-server"] = server.version
    print(write_results(options.file, settings | results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
