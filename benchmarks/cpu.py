"""Speed on a CPU, ours, llama.cpp's and ik_llama.cpp's: `python -m benchmarks.cpu`.

Options: `--model FILE`, `--shape NAME`, `--llama-cpp FOLDER`, `--ik-llama-cpp FOLDER`,
`--contexts`, `--rounds N`.

A llama of 1.04 billion random weights (written once, Q4_K_M, 609 MiB) with one core and with two:
from loading to the first token of a prompt of 4, compiling included; prompts of 128 and 512 tokens;
32 tokens decoded after none and after 2048, for 2 to 16 sequences together, and beside processes
that compute on the same cores (`decode_shared`); how much of a core a model takes that waits
(`idle_percent`); the first token with programs that an earlier process kept; and the largest
resident memory: loaded, at the first token, in all, and of a process that runs but a prompt of 512.
The cache is f16, as llama.cpp has it. With the folders of peers' programs the same file is measured
by them in turn, with as many threads on the same cores, with and without their fused attention and
repacking, whichever is faster; their time to the first token is that of a whole process, which has
nothing to import or to compile. A round measures all of them; figures are medians of the rounds,
and ratios are printed with the least and the greatest of them. Beside decoding stands the rate at
which packed weights are read, in turn with what these cores can read at all, and its share.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.results import write_results

from .common import RESULTS, core_sets, on_cores
from .cpu_peers import Peer, competing

#: Names of `random_file.SHAPES`.
SHAPES = ("llama-1b", "gemma3-1b", "moe-3b", "qwen35-800m")

IK = "ik_llama.cpp"
PEERS = {"llama.cpp": "llama-cpp", IK: "ik-llama-cpp"}  # name -> option

FIRST_PROMPT = (1, 300, 301, 302)
PROMPTS = (128, 512)
CONTEXTS = (0, 2048)
BATCHES = (2, 4, 8, 16)
NEW_TOKENS = 32
REPEATS = 3
BANDWIDTHS = 7  # of decoding, each between two of reading


def measure(path: str, started: float, contexts: list[int]) -> dict[str, Any]:
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
        first_token = time.perf_counter()
        figures: dict[str, Any] = {
            "kernels": native.kernels(),
            "load_seconds": loaded - begin,
            "load_to_first_token_seconds": first_token - begin,
            "first_token_seconds": first_token - loaded,
            "process_to_first_token_seconds": time.time() - started,
            "peak_megabytes_loaded": peak_loaded,
            "peak_megabytes_first_token": _peak_megabytes(),
        }
        for tokens in PROMPTS:
            figures[f"prefill_{tokens}"] = tokens / _prefill_seconds(model, tokens)
        for context in contexts:
            figures[f"decode_{context}"] = NEW_TOKENS / _decode_seconds(model, context)
        for batch in BATCHES:
            figures[f"batch_{batch}"] = batch * NEW_TOKENS / _decode_seconds(model, 0, batch)
        with competing(os.sched_getaffinity(0)):
            figures["decode_shared"] = NEW_TOKENS / _decode_seconds(model, 0)
        busy = time.process_time()
        time.sleep(1)
        figures["idle_percent"] = (time.process_time() - busy) * 100
        size = sum(leaf.nbytes for leaf in model.weights)
        figures["weights_megabytes"] = size / 2**20
        figures["peak_megabytes"] = _peak_megabytes()
        return figures | bandwidths(model, size)


def bandwidths(model: Any, size: int) -> dict[str, float]:
    """GB/s of weights, `size` bytes, that decoding reads, and of memory that these cores read.

    Other machines on the same memory make both of them vary within seconds: each is measured
    between two of the other, and the share is the median of those of neighbours.
    """
    import numpy as np

    parts = np.ones((len(os.sched_getaffinity(0)), 2**26), np.float32)  # 256 MB each
    decoding, reading = [], [read_bandwidth(parts)]
    for _ in range(BANDWIDTHS):
        decoding.append(size * NEW_TOKENS / _decode_seconds(model, 0) / 1e9)
        reading.append(read_bandwidth(parts))
    shares = [2 * d / (reading[i] + reading[i + 1]) for i, d in enumerate(decoding)]
    return {
        "weights_gigabytes_per_second": statistics.median(decoding),
        "read_gigabytes_per_second": statistics.median(reading),
        "read_share": statistics.median(shares),
    }


def kept_first_token(path: str, folder: str) -> float:
    """Seconds from a loaded model to its first token, with the programs that `folder` keeps."""
    import jax.numpy as jnp

    import jax_q4k as jq
    from jax_q4k import models
    from jax_q4k.cache.program_cache import ProgramCache
    from jax_q4k.models.cli.cache import MAX_BYTES

    with jq.implementation("native"):
        model = models.from_gguf(path)
        model.program_cache = ProgramCache(Path(folder), MAX_BYTES)
        begin = time.perf_counter()
        models.generate(model, [FIRST_PROMPT], max_new_tokens=1, cache_dtype=jnp.float16)
        return time.perf_counter() - begin


def peak_of_prompt(path: str, tokens: int) -> float:
    """Largest resident memory, MiB, of this process, which only loads a file and runs a prompt."""
    import jax

    import jax_q4k as jq
    from jax_q4k import models

    with jq.implementation("native"):
        jax.block_until_ready(_prefill(models.from_gguf(path), tokens))
    return _peak_megabytes()


def _prefill(model: Any, tokens: int, room: int = 16, batch: int = 1) -> Any:
    """The state after random prompts, with a cache for `room` tokens more of each."""
    import jax.numpy as jnp
    import numpy as np

    from jax_q4k.models.kv_cache import PagedCache

    cache = PagedCache.create(model.config, batch, tokens + room, dtype=jnp.float16)
    ids = (
        np.random.default_rng(0)
        .integers(300, model.config.vocab_size, (batch, tokens))
        .astype(np.int32)
    )
    lengths = np.full(batch, tokens, np.int32)
    return model.programs().start(model.weights, ids, lengths, cache, _parameters(room, batch))


def _parameters(tokens: int, batch: int = 1) -> Any:
    """Of rows that take the likeliest tokens."""
    from jax_q4k.models.sampling import Sampling
    from jax_q4k.models.sampling.stages import SamplingArrays

    return SamplingArrays.of([Sampling(max_new_tokens=tokens)] * batch)


def _prefill_seconds(model: Any, tokens: int) -> float:
    return _median(lambda _: _prefill(model, tokens))


def _decode_seconds(model: Any, context: int, batch: int = 1) -> float:
    """Seconds for NEW_TOKENS after prompts of `context` tokens, at least 1.

    Each run starts from where the prompt left the cache.
    """
    import jax
    import jax.numpy as jnp

    before = _prefill(model, max(context, 1), NEW_TOKENS + 1, batch)
    parameters = _parameters(NEW_TOKENS + 1, batch)
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


def read_bandwidth(parts: Any) -> float:
    """GB/s at which threads read arrays that no cache holds, one each, by BLAS's dot product."""
    import numpy as np

    best = 0.0
    for _ in range(REPEATS):
        threads = [threading.Thread(target=np.dot, args=(part, part)) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, parts.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def their_figures(peer: Peer, path: str, cores: set[int], contexts: list[int]) -> dict[str, Any]:
    """The figures of `measure` that a peer's programs have, and memory."""
    figures = peer.measure(
        path,
        cores,
        prompts=PROMPTS,
        contexts=contexts,
        batches=BATCHES,
        tokens=NEW_TOKENS,
        repeats=REPEATS,
    )
    first = peer.first_token(path, cores, len(FIRST_PROMPT), REPEATS)
    for name in ("load_to_first_token_seconds", "process_to_first_token_seconds"):
        figures[name] = first["seconds"]
    figures["peak_megabytes_first_token"] = first["megabytes"]
    whole = peer.first_token(path, cores, max(PROMPTS))
    return figures | {f"peak_megabytes_{max(PROMPTS)}": whole["megabytes"]}


def our_figures(path: str, cores: set[int], contexts: list[int]) -> dict[str, Any]:
    """The figures of `measure` and `peak_of_prompt`, each of a process on these cores."""
    figures: dict[str, Any] = on_cores(cores, "cpu", "measure", path, time.time(), contexts)
    peak = on_cores(cores, "cpu", "peak_of_prompt", path, max(PROMPTS))
    with tempfile.TemporaryDirectory() as folder:  # the first process leaves what the second finds
        for _ in range(2):
            kept = on_cores(cores, "cpu", "kept_first_token", path, folder)
    figures["kept_first_token_seconds"] = kept
    return figures | {f"peak_megabytes_{max(PROMPTS)}": peak}


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure the median; what is no number is alike in all."""
    return {
        name: value
        if isinstance(value, str)
        else statistics.median(figures[name] for figures in rounds)
        for name, value in rounds[0].items()
    }


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of each figure that both have, ours over theirs: (least, median, greatest) of the rounds."""
    found = {}
    for name, value in theirs[0].items():
        if name in ours[0] and not isinstance(value, str):
            each = sorted(a[name] / b[name] for a, b in zip(ours, theirs, strict=True))
            found[name] = [round(r, 3) for r in (each[0], statistics.median(each), each[-1])]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", help="a GGUF file; one of random weights is written otherwise")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help="of the random weights")
    for name, option in PEERS.items():
        parser.add_argument(
            f"--{option}", type=Path, metavar="FOLDER", help=f"of {name}'s programs, to measure"
        )
    parser.add_argument(
        "--cores", type=int, nargs="+", default=[1, 2], help="how many, each measured by itself"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens before those decoded"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all are measured in turn")
    parser.add_argument(
        "--json", type=Path, help="where the results go; benchmarks/results/cpu.json, or cpu_SHAPE"
    )
    options = parser.parse_args(arguments)
    path = options.model
    if path is None:
        from . import random_file  # not where only a part is measured: it imports JAX

        path = random_file.written(options.shape)
    folders = {name: getattr(options, option.replace("-", "_")) for name, option in PEERS.items()}
    peers = [Peer(name, at, repacks=name == IK) for name, at in folders.items() if at]
    results = []
    for cores in core_sets(options.cores):
        rounds: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            ours = our_figures(path, cores, list(options.contexts))
            rounds.setdefault("ours", []).append(ours)
            for peer in peers:
                figures = their_figures(peer, path, cores, list(options.contexts))
                rounds.setdefault(peer.name, []).append(figures)
        row: dict[str, Any] = {"threads": len(cores)}
        row |= {who: medians(each) for who, each in rounds.items()}
        row["ratios"] = {peer.name: ratios(rounds["ours"], rounds[peer.name]) for peer in peers}
        results.append(row)
        _print(row)
    settings = {
        "model": Path(path).name,
        "rounds": options.rounds,
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


def _print(row: dict[str, Any]) -> None:
    """Figures of one number of threads, with those of peers and ratios beside them."""
    print(f"{row['threads']} thread{'s' * (row['threads'] > 1)}")
    for name, value in row["ours"].items():
        if isinstance(value, str):
            print(f"  {name:32}{value:>10}")
            continue
        beside = ""
        for peer, found in row["ratios"].items():
            if name in found:
                least, middle, most = found[name]
                beside += f"{row[peer][name]:10.2f} {peer}, "
                beside += f"ratio {middle:.2f} ({least:.2f} to {most:.2f})"
        print(f"  {name:32}{value:10.2f}{beside}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
