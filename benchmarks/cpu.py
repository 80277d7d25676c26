"""Speed on a CPU, ours and llama.cpp's: `python -m benchmarks.cpu`.

Options: `--model FILE`, `--shape NAME`, `--llama-bench PATH`.

A llama of 1.04 billion random weights (written once, Q4_K_M, 609 MiB) with one core and with two:
from loading to the first token of a prompt of 4, compiling included; prompts of 128 and 512 tokens;
32 tokens decoded after none and after 2048; and the largest resident memory: loaded, at the first
token, in all, and of a process that runs but a prompt of 512. The cache is f16, as llama.cpp has
it. With the path of a `llama-bench` the same file is measured by it in turn, with as many threads
on the same cores; its time to the first token is that of its whole process, which has nothing to
import or to compile. Rates are medians of some runs after one that compiles; beside decoding stands
the rate at which packed weights are read, and what these cores can read at all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.results import write_results

from .common import RESULTS, core_sets, on_cores

#: Names of `random_file.SHAPES`.
SHAPES = ("llama-1b", "gemma3-1b", "moe-3b", "qwen35-800m")

FIRST_PROMPT = (1, 300, 301, 302)
PROMPTS = (128, 512)
CONTEXTS = (0, 2048)
NEW_TOKENS = 32
REPEATS = 3


def measure(path: str, started: float) -> dict[str, Any]:
    """Figures of this process, on the cores that it may use; `started`: the time of its start."""
    import jax.numpy as jnp

    import jax_q4k as jq
    from jax_q4k import models, native

    with jq.implementation("native"):
        begin = time.perf_counter()
        model = models.from_gguf(path)
        loaded = time.perf_counter()
        peak_loaded = _peak_megabytes()
        models.generate(model, [FIRST_PROMPT], max_new_tokens=1, cache_dtype=jnp.float16)
        figures: dict[str, Any] = {
            "kernels": native.kernels(),
            "load_seconds": loaded - begin,
            "load_to_first_token_seconds": time.perf_counter() - begin,
            "process_to_first_token_seconds": time.time() - started,
            "peak_megabytes_loaded": peak_loaded,
            "peak_megabytes_first_token": _peak_megabytes(),
        }
        for tokens in PROMPTS:
            figures[f"prefill_{tokens}"] = tokens / _prefill_seconds(model, tokens)
        for context in CONTEXTS:
            figures[f"decode_{context}"] = NEW_TOKENS / _decode_seconds(model, context)
        size = sum(leaf.nbytes for leaf in model.weights)
        figures["peak_megabytes"] = _peak_megabytes()
        figures["weights_gigabytes_per_second"] = figures["decode_0"] * size / 1e9
        figures["weights_megabytes"] = size / 2**20
    figures["read_gigabytes_per_second"] = read_bandwidth(len(os.sched_getaffinity(0)))
    return figures


def peak_of_prompt(path: str, tokens: int) -> float:
    """Largest resident memory, MiB, of this process, which only loads a file and runs a prompt."""
    import jax

    import jax_q4k as jq
    from jax_q4k import models

    with jq.implementation("native"):
        jax.block_until_ready(_prefill(models.from_gguf(path), tokens))
    return _peak_megabytes()


def _prefill(model: Any, tokens: int, room: int = 16) -> Any:
    """The state after a random prompt, with a cache for `room` tokens more."""
    import jax.numpy as jnp
    import numpy as np

    from jax_q4k.models.kv_cache import PagedCache

    cache = PagedCache.create(model.config, 1, tokens + room, dtype=jnp.float16)
    ids = (
        np.random.default_rng(0)
        .integers(300, model.config.vocab_size, (1, tokens))
        .astype(np.int32)
    )
    lengths = np.array([tokens], np.int32)
    return model.programs().start(model.weights, ids, lengths, cache, _parameters(room))


def _parameters(tokens: int) -> Any:
    """Of one row that takes the likeliest tokens."""
    from jax_q4k.models.sampling import Sampling
    from jax_q4k.models.ways import Parameters

    return Parameters.of([Sampling(max_new_tokens=tokens)])


def _prefill_seconds(model: Any, tokens: int) -> float:
    return _median(lambda _: _prefill(model, tokens))


def _decode_seconds(model: Any, context: int) -> float:
    """Seconds for NEW_TOKENS after a prompt of `context` tokens, at least 1.

    Each run starts from where the prompt left the cache.
    """
    import jax
    import jax.numpy as jnp

    before = _prefill(model, max(context, 1), NEW_TOKENS + 1)
    parameters = _parameters(NEW_TOKENS + 1)
    until = before.step + NEW_TOKENS
    return _median(
        lambda state: model.programs().loop(model.weights, state, parameters, until),
        lambda: jax.tree.map(jnp.copy, before),  # the loop takes it over
    )


def _peak_megabytes() -> float:
    """The most memory that this process ever had, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _median(run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """Seconds of run(prepare()) without preparing: median of REPEATS, after one that compiles."""
    import jax

    seconds = []
    for _ in range(REPEATS + 1):
        prepared = jax.block_until_ready(prepare())
        start = time.perf_counter()
        jax.block_until_ready(run(prepared))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def read_bandwidth(cores: int) -> float:
    """GB/s at which so many threads read memory that no cache holds."""
    import numpy as np

    parts = np.ones((cores, 2**26), np.float32)  # 256 MB each
    best = 0.0
    for _ in range(REPEATS):
        threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, parts.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def llama_bench(program: str, cores: set[int], path: str) -> dict[str, Any]:
    """The same figures by llama.cpp, with a thread on each of these cores."""

    def run(*arguments: str) -> tuple[Any, float, float]:
        """llama-bench's output, its seconds and its largest resident memory."""
        command = [program, "-m", path, "-t", str(len(cores)), "-o", "json", *arguments]
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # a process inherits them
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(0, ours)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
        return json.loads(printed), time.perf_counter() - begin, usage.ru_maxrss / 1024

    once = ["-n", "0", "-r", "1", "--no-warmup"]
    first = [run("-p", str(len(FIRST_PROMPT)), *once) for _ in range(REPEATS)]
    seconds = statistics.median(seconds for _, seconds, _ in first)
    figures = {"load_to_first_token_seconds": seconds, "process_to_first_token_seconds": seconds}
    figures["peak_megabytes_first_token"] = max(peak for _, _, peak in first)
    figures[f"peak_megabytes_{max(PROMPTS)}"] = run("-p", str(max(PROMPTS)), *once)[2]
    prompts, depths = ",".join(map(str, PROMPTS)), ",".join(map(str, CONTEXTS))
    # Without and with its fused attention: the faster one counts.
    ways = ["-r", str(REPEATS), "-fa", "0,1"]
    for arguments in (["-p", prompts, "-n", "0"], ["-p", "0", "-n", str(NEW_TOKENS), "-d", depths]):
        for row in run(*ways, *arguments)[0]:
            figures["build"] = row["build_commit"]
            name = f"prefill_{row['n_prompt']}" if row["n_prompt"] else f"decode_{row['n_depth']}"
            figures[name] = max(row["avg_ts"], figures.get(name, 0))
    return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", help="a GGUF file; one of random weights is written otherwise")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help="of the random weights")
    parser.add_argument("--llama-bench", help="llama.cpp's benchmark, to measure in turn")
    parser.add_argument(
        "--cores", type=int, nargs="+", default=[1, 2], help="how many, each measured by itself"
    )
    parser.add_argument(
        "--json", type=Path, help="where the results go; benchmarks/results/cpu.json, or cpu_SHAPE"
    )
    options = parser.parse_args(arguments)
    path = options.model
    if path is None:
        path = str(Path(tempfile.gettempdir()) / f"random-{options.shape}.Q4_K_M.gguf")
        if not os.path.exists(path):
            from . import random_file

            print(f"writing {path} ...")
            random_file.write(path, random_file.SHAPES[options.shape])
    results = []
    for cores in core_sets(options.cores):
        count = len(cores)
        ours = on_cores(cores, "cpu", "measure", path, time.time())
        ours[f"peak_megabytes_{max(PROMPTS)}"] = on_cores(
            cores, "cpu", "peak_of_prompt", path, max(PROMPTS)
        )
        theirs = llama_bench(options.llama_bench, cores, path) if options.llama_bench else {}
        results.append({"threads": count, "ours": ours, "llama.cpp": theirs})
        print(f"{count} thread{'s' * (count > 1)}")
        for name, value in ours.items():
            if isinstance(value, str):
                print(f"  {name:32}{value:>10}")
                continue
            peer = (
                f"{theirs[name]:10.2f} llama.cpp, ratio {value / theirs[name]:.2f}"
                if name in theirs
                else ""
            )
            print(f"  {name:32}{value:10.2f}{peer}")
    settings = {
        "model": Path(path).name,
        "repeats": REPEATS,
        "load_before": round(os.getloadavg()[0], 1),
    }
    of_shape = "" if options.shape == SHAPES[0] else f"_{options.shape.replace('-', '_')}"
    print(
        write_results(
            options.json or RESULTS / f"cpu{of_shape}.json", settings | {"results": results}
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
