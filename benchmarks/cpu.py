"""Measures the CPU speed of jax-q4k, llama.cpp and ik_llama.cpp: `python -m benchmarks.cpu`.

Options: `--model FILE`, `--shape NAME`, `--llama-cpp FOLDER`, `--ik-llama-cpp FOLDER`,
`--contexts`, `--rounds N`.

Uses a llama of 1.04 billion random weights (written once, Q4_K_M, 609 MiB) with one core and with
two. It measures the time from loading to the first token of a prompt of 4, compilation included;
prompts of 128 and 512 tokens; 32 tokens decoded after contexts of 0 and 2048, for 2 to 16 sequences
in a batch, and with other processes computing on the same cores (`decode_shared`); the fraction of
a core that an idle model uses (`idle_percent`); the time to the first token with programs cached by
an earlier process; and the peak resident memory: loaded, at the first token, in total, and of a
process that only runs a prompt of 512.

The cache is f16, as in llama.cpp. If the folders of peers' programs are given, they run the same
file in turn, with as many threads on the same cores, with and without their fused attention and
repacking, whichever is faster. Their time to the first token is that of a full process, which has
nothing to import or compile. A round measures all of them. Figures are medians over the rounds, and
ratios are printed with their minimum and maximum. Decoding is also given as the bandwidth of
reading packed weights, measured in turn with the read bandwidth of these cores, and as a fraction
of it.
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
BANDWIDTHS = 7  # measurements of decoding, each between two of reading


def measure(path: str, started: float, contexts: list[int]) -> dict[str, Any]:
    """Measures this process on the cores that it may use; `started`: time of its start."""
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
    """Measures GB/s of decoding, which reads `size` bytes of weights, and of reading memory.

    Other users of the same memory make both vary within seconds. Each is therefore measured between
    two of the other, and the ratio is the median over adjacent measurements.
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
    """Measures seconds from a loaded model to its first token, with programs in `folder`."""
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
    """Measures peak resident memory, MiB, of a process that only loads a file and runs a prompt."""
    import jax_q4k as jq
    from jax_q4k import models

    with jq.implementation("native"):
        _generate(models.from_gguf(path), tokens, 1)
    return _peak_megabytes()


def _generate(model: Any, tokens: int, new_tokens: int, batch: int = 1, **options: Any) -> Any:
    """Continues random prompts of `tokens` tokens with the most probable tokens.

    Returns the timings of the call.
    """
    import jax.numpy as jnp
    import numpy as np

    from jax_q4k import models

    prompts = np.random.default_rng(0).integers(300, model.config.vocab_size, (batch, tokens))
    options |= {"cache_dtype": jnp.float16, "max_new_tokens": new_tokens, "ignore_end": True}
    timings = models.generate(model, list(prompts), **options)[0].timings
    if timings.new_tokens != batch * new_tokens:
        raise RuntimeError(f"{timings.new_tokens} tokens were generated, not {batch * new_tokens}")
    return timings


def _prefill_seconds(model: Any, tokens: int) -> float:
    """Measures seconds until the first token after a prompt of `tokens` tokens."""
    return _median(lambda: _generate(model, tokens, 1).first_token)


def _decode_seconds(model: Any, context: int, batch: int = 1) -> float:
    """Measures seconds for NEW_TOKENS after prompts of `context` tokens, at least 1.

    Runs of a single sequence share a prefix cache, so that a long prompt is computed once.
    """
    from jax_q4k import models

    prefix = models.Prefix() if batch == 1 else None

    def run() -> float:
        timings = _generate(model, max(context, 1), NEW_TOKENS + 1, batch, prefix=prefix)
        return float(timings.decode)

    return _median(run)


def _peak_megabytes() -> float:
    """Returns the peak memory of this process in MiB, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _median(seconds: Callable[[], float]) -> float:
    """Returns the median of REPEATS measurements, after two that compile.

    The second one compiles what only a prompt with a cached prefix needs.
    """
    return statistics.median([seconds() for _ in range(2 + REPEATS)][2:])


def read_bandwidth(parts: Any) -> float:
    """Measures GB/s of threads that read arrays larger than the caches, one each, by BLAS dot."""
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
    """Measures a peer's programs: the figures of `measure` that they have, and memory."""
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
    prefill = peer.first_token(path, cores, max(PROMPTS))
    return figures | {f"peak_megabytes_{max(PROMPTS)}": prefill["megabytes"]}


def our_figures(path: str, cores: set[int], contexts: list[int]) -> dict[str, Any]:
    """Returns the figures of `measure` and `peak_of_prompt`, each from a process on these cores."""
    figures: dict[str, Any] = on_cores(cores, "cpu", "measure", path, time.time(), contexts)
    peak = on_cores(cores, "cpu", "peak_of_prompt", path, max(PROMPTS))
    with tempfile.TemporaryDirectory() as folder:  # the second process finds the first's programs
        for _ in range(2):
            cached = on_cores(cores, "cpu", "kept_first_token", path, folder)
    figures["kept_first_token_seconds"] = cached
    return figures | {f"peak_megabytes_{max(PROMPTS)}": peak}


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each figure; strings are the same in all rounds."""
    return {
        name: value
        if isinstance(value, str)
        else statistics.median(figures[name] for figures in rounds)
        for name, value in rounds[0].items()
    }


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns ours over theirs for each common figure: (minimum, median, maximum) of the rounds."""
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
        from . import random_file  # not needed when only a part is measured: it imports JAX

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
    """Prints the figures for one number of threads, with those of peers and the ratios."""
    print(f"{row['threads']} thread{'s' * (row['threads'] > 1)}")
    for name, value in row["ours"].items():
        if isinstance(value, str):
            print(f"  {name:32}{value:>10}")
            continue
        peers = ""
        for peer, found in row["ratios"].items():
            if name in found:
                low, middle, high = found[name]
                peers += f"{row[peer][name]:10.2f} {peer}, "
                peers += f"ratio {middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"  {name:32}{value:10.2f}{peers}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
