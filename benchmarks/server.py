"""Measures `jax-q4k serve` beside its engine and llama-server.

    python -m benchmarks.server [FILE]

For each number of clients, which submit one request after the other: tokens per second, seconds to
the first token, and gaps between events, of the engine in this process, of an equal engine behind
HTTP, and of llama-server of `--llama-cpp FOLDER`. All run in turn with the same prompts; figures
are medians over ROUNDS. `overhead` is the median of 1 - (tokens per second behind HTTP) / (tokens
per second of the engine) over the rounds. Then gaps of four running requests while a long prompt
comes in, and the time of a prompt with a cached beginning.

Writes `benchmarks/results/server.json`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tools.results import write_results

from . import engine as engine_benchmark
from .engine import ANSWER, CLIENTS, LONG, PROMPT, REQUESTS, ROUNDS, Work
from .http_servers import HttpServer, LlamaServer, OurServer


def measure(
    path: str,
    clients: tuple[int, ...] = CLIENTS,
    rounds: int = ROUNDS,
    long: int = LONG,
    llama_cpp: Path | None = None,
) -> dict[str, Any]:
    """Returns all figures of a model file."""
    from jax_q4k import models

    model, rows = models.load(path), max(clients)
    vocab = model.config.vocab_size
    context = max(long, PROMPT[1]) + ANSWER[1] + 32
    pages = rows * (context // 16 + 1)
    settings: dict[str, Any] = {"model": repr(model)}
    found: dict[int, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        options = "--rows", str(rows), "--context", str(context), "--pages", str(pages)
        ours = stack.enter_context(OurServer(path, *options))
        engine = stack.enter_context(
            models.Engine(model, max_rows=rows, max_context=context, pages=pages)
        )
        servers: dict[str, HttpServer] = {"server": ours}
        if llama_cpp is not None:
            peer = stack.enter_context(LlamaServer(llama_cpp, path, rows))
            servers["llama-server"], settings["llama-server"] = peer, peer.version
        targets = {"engine": engine_benchmark.submitter(engine)}
        targets |= {name: server.submit for name, server in servers.items()}
        for submit in targets.values():
            engine_benchmark.closed(submit, Work(vocab, rows, seed=1), rows)  # warms up
        for count in clients:
            turns = [
                {
                    name: _closed(
                        submit, servers.get(name), Work(vocab, count * REQUESTS, seed), count
                    )
                    for name, submit in targets.items()
                }
                for seed in range(100 * count, 100 * count + rounds)  # no cached prefix
            ]
            found[count] = {
                name: engine_benchmark.median([turn[name] for turn in turns]) for name in targets
            }
            found[count]["overhead"] = statistics.median(
                1 - turn["server"]["tokens_per_second"] / turn["engine"]["tokens_per_second"]
                for turn in turns
            )
            for name in targets:
                engine_benchmark.report(f"{count:2} clients, {name}", found[count][name])
            print(
                f"{count:2} clients, overhead: {100 * found[count]['overhead']:.1f} %", flush=True
            )
        others = {
            run.__name__: engine_benchmark.in_turn(
                f"{run.__name__}, {tokens} tokens",
                targets,
                [functools.partial(run, vocab=vocab, tokens=tokens, seed=i) for i in range(rounds)],
            )
            for run, tokens in (
                (engine_benchmark.long_prompt, long),
                (engine_benchmark.cached_prompt, long // 2),
            )
        }
    return settings | {"clients": found} | others


def _closed(
    submit: engine_benchmark.Submit, server: HttpServer | None, work: Work, clients: int
) -> dict[str, float]:
    """Returns figures of `closed`, and the processor time of a server per token."""
    before = 0.0 if server is None else server.cpu_seconds
    found = engine_benchmark.closed(submit, work, clients)
    if server is not None:
        found["cpu_ms_per_token"] = 1e3 * (server.cpu_seconds - before) / work.tokens
    return found


def main(arguments: list[str]) -> int:
    options = engine_benchmark.parsed(arguments, "server", __doc__)
    began, load = time.perf_counter(), round(os.getloadavg()[0], 1)
    results = measure(
        options.model, rounds=options.rounds, long=options.long, llama_cpp=options.llama_cpp
    )
    settings = {"load_before": load, "cores": len(os.sched_getaffinity(0))}
    settings["seconds"] = round(time.perf_counter() - began)
    print(write_results(options.file, settings | results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
