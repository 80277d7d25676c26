"""Measures times from a process's start: `python -m benchmarks.startup [FILE]`.

Times imports, loading the demo model, the first token of a stream in Python, the host's part of a
later step, and the command line until its first token and its end, for the demo model, for one of
24 small layers and for that of `benchmarks.cpu`, 609 MiB. Each stage is timed in new processes. The
fastest of some runs counts, because other programs only add time. "CPU" is processor time of the
process and its threads, to which others add less. With `--before CHECKOUT` the same stages also run
in another checkout; with `--llama-cpp FOLDER` its `llama-completion` runs the same commands. All of
them take turns. Writes `benchmarks/results/startup.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jax_q4k.models import demo_path
from tools.random_model import LLAMA_1B
from tools.results import write_results

from . import random_file
from .common import RESULTS
from .cpu_peers import Peer

HERE = Path(__file__).parents[1]
REPEATS = 5
PROMPT = "It is a truth universally acknowledged, that"

#: Stage -> code that a new interpreter runs and times: all lines, or those after a line of dashes.
STAGES = {
    "import jax": "import jax",
    "import jax_q4k": "import jax_q4k",
    "import jax_q4k.models": "import jax_q4k.models",
    "load": "from jax_q4k import models\nmodels.generate\n---\nmodels.load('demo')",
    "first token": (
        "from jax_q4k import models\nmodel = models.load('demo')\n"
        f"next(models.stream(model, {PROMPT!r}, max_new_tokens=8))"
    ),
}
#: Prints the seconds of a stream's step outside its program: the median of 300. Here the host waits
#: for each program, which otherwise runs at the same time.
HOST = f"""
import statistics, time
import jax
from jax_q4k import models
from jax_q4k.models.engine import loop
from jax_q4k.models.runner.engine_steps import DecodeRows
model, sampling = models.load("demo"), models.Sampling(max_new_tokens=310, ignore_end=True)
loop.FLUENT_STEP = 0.0  # a token a step
ran, jitted = [], DecodeRows.jitted
def timed_program(self, **options):
    program = jitted(self, **options)
    def timed(*arguments):
        began = time.perf_counter()
        results = jax.block_until_ready(program(*arguments))
        ran.append(time.perf_counter() - began)
        return results
    timed.lower = program.lower
    return timed
DecodeRows.jitted = timed_program
pieces, took = models.stream(model, {PROMPT!r}, sampling), []
for _ in range(305):
    began = time.perf_counter()
    next(pieces)
    took.append(time.perf_counter() - began)
print(statistics.median(a - b for a, b in zip(took[5:], ran[5:])))
"""
NEW_TOKENS = 8
COMMAND = ["-m", "jax_q4k", "generate", "-p", PROMPT, "-n", str(NEW_TOKENS)]
THEIR_OPTIONS = ["--no-conversation", "--no-display-prompt", "-p", PROMPT, "-n", str(NEW_TOKENS)]
LLAMA_CPP = "llama.cpp"
LAYERS = 24
SMALL = dataclasses.replace(
    LLAMA_1B,
    num_layers=LAYERS,
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rope_dim=32,
)


def environment(checkout: Path, caches: str) -> dict[str, str]:
    """Returns environment variables of processes; bytecode is cached, as in an installation."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return variables | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": caches,
    }


def stage_seconds(name: str, checkout: Path, caches: str) -> float:
    """Times a stage in a new process, without the start of the interpreter; in seconds."""
    before, _, timed = STAGES[name].rpartition("---\n")
    code = f"{before}\nimport time\nbegan = time.perf_counter()\n{timed}\n"
    return printed_seconds(code + "print(time.perf_counter() - began)", checkout, caches)


def printed_seconds(code: str, checkout: Path, caches: str) -> float:
    """Returns the last number that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env=environment(checkout, caches),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def command_seconds(command: list[str], folder: Path, caches: str) -> dict[str, float]:
    """Times a command: seconds to its first output and to its end, and CPU seconds."""
    before, began = os.times(), time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder, caches),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        process.stdout.read()
        code = process.wait()
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with code {code}")
    end, after = time.perf_counter() - began, os.times()
    system = after.children_system - before.children_system
    return {
        "first token": first,
        "end": end,
        "CPU": after.children_user - before.children_user + system,
    }


def measure(checkout: Path, models: dict[str, str]) -> dict[str, float]:
    """Returns the seconds of every stage in a checkout, run once.

    models: name -> the command's argument. The command starts twice: "first" without and "second"
    with the programs cached by the first.
    """
    with tempfile.TemporaryDirectory() as caches:
        found = {name: stage_seconds(name, checkout, caches) for name in STAGES}
        found["host's part of a step"] = printed_seconds(HOST, checkout, caches)
        for model, path in models.items():
            for start in ("first", "second"):
                command = [sys.executable, *COMMAND, path]
                found |= _named(model, start, command_seconds(command, checkout, caches))
    return found


def measure_theirs(programs: Path, models: dict[str, str]) -> dict[str, float]:
    """Returns the seconds of llama.cpp's command, run once; it has no programs to cache."""
    peer, cores = Peer(LLAMA_CPP, programs), len(os.sched_getaffinity(0))
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, path in models.items():
            command = peer.command("llama-completion", path, cores, *THEIR_OPTIONS)
            seconds = command_seconds(command, Path(folder), folder)
            for start in ("first", "second"):
                found |= _named(model, start, seconds)
    return found


def _named(model: str, start: str, seconds: dict[str, float]) -> dict[str, float]:
    return {f"command, {model}, {start} start: {what}": s for what, s in seconds.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of another commit")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="of its programs")
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "startup.json")
    options = parser.parse_args(arguments)
    load = round(os.getloadavg()[0], 1)
    checkouts = {"seconds": HERE}
    if options.before is not None:
        checkouts = {"before": options.before.resolve(), **checkouts}
    runs: dict[str, list[dict[str, float]]] = {column: [] for column in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": "demo", f"{LAYERS} layers": f"{folder}/model.gguf"}
        random_file.write(models[f"{LAYERS} layers"], SMALL)
        models["llama-1b"] = random_file.written("llama-1b")
        files = models | {"demo": str(demo_path())}
        for _ in range(1 + REPEATS):
            for column, checkout in checkouts.items():
                runs[column].append(measure(checkout, models))
            if options.llama_cpp is not None:
                runs.setdefault(LLAMA_CPP, []).append(measure_theirs(options.llama_cpp, files))
    columns = {  # the first run writes bytecode, and reads files that others find in memory
        column: {name: min(run[name] for run in found[1:]) for name in found[0]}
        for column, found in runs.items()
    }
    rows: list[dict[str, Any]] = [
        {"stage": name} | {who: found[name] for who, found in columns.items() if name in found}
        for name in columns["seconds"]
    ]
    print(f"{'stage':46}" + "".join(f"{column:>10}" for column in columns))
    for row in rows:
        shown = (f"{row[column]:10.6f}" for column in columns if column in row)
        print(f"{row['stage']:46}" + "".join(shown))
    settings: dict[str, Any] = {"repeats": REPEATS, "load_before": load}
    if options.before is not None:
        settings["commit_before"] = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=options.before,
            capture_output=True,
            text=True,
        ).stdout.strip()
    print(write_results(options.file, settings | {"results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
