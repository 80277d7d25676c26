"""Time from a process's start: `python -m benchmarks.startup [--before CHECKOUT] [FILE]`.

Imports, loading the demo model, the first token of a stream in Python, the host's part of a later
step, and the command line until its first token and its end. A stage is timed in processes of its
own; of each the fastest run of some counts, as other programs only add to it. With `--before` the
same stages run in another checkout, too. Writes `benchmarks/results/startup.json`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.results import write_results

from .common import RESULTS

HERE = Path(__file__).parents[1]
REPEATS = 5
PROMPT = "It is a truth universally acknowledged, that"

#: Stage -> what a new interpreter runs and times: all lines, or those behind a line of dashes.
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
#: Prints seconds that a step of a stream takes beside its program: the median of 300.
HOST = f"""
import statistics, sys, time
import jax
from jax_q4k import models
model, sampling = models.load("demo"), models.Sampling(max_new_tokens=310, ignore_end=True)
sys.modules[models.stream.__module__].FLUENT_CALL = 0.0  # a token a call
programs, ran = model.programs(sampling), []
loop = programs.loop
def timed(*arguments):
    began = time.perf_counter()
    state = jax.block_until_ready(loop(*arguments))
    ran.append(time.perf_counter() - began)
    return state
timed.lower, programs.loop = loop.lower, timed
pieces, took = models.stream(model, {PROMPT!r}, sampling), []
for _ in range(305):
    began = time.perf_counter()
    next(pieces)
    took.append(time.perf_counter() - began)
print(statistics.median(a - b for a, b in zip(took[6:], ran[5:])))
"""
COMMAND = ["-m", "jax_q4k", "generate", "--demo", "-p", PROMPT, "-n", "8"]


def environment(checkout: Path, caches: str) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": caches,
    }


def stage_seconds(name: str, checkout: Path, caches: str) -> float:
    """Seconds of a stage in a new process, without those of starting the interpreter."""
    before, _, timed = STAGES[name].rpartition("---\n")
    code = f"{before}\nimport time\nbegan = time.perf_counter()\n{timed}\n"
    return printed_seconds(code + "print(time.perf_counter() - began)", checkout, caches)


def printed_seconds(code: str, checkout: Path, caches: str) -> float:
    """The number that a new process prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env=environment(checkout, caches),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def command_seconds(checkout: Path, caches: str) -> tuple[float, float]:
    """Seconds from the start of a command's process to its first output, and to its end."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *COMMAND],
        cwd=checkout,
        env=environment(checkout, caches),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        process.stdout.read()
        code = process.wait()
    if code:
        raise RuntimeError(f"{' '.join(COMMAND)} ended with code {code}")
    return first, time.perf_counter() - began


def measure(checkout: Path) -> dict[str, float]:
    """Seconds of every stage in a checkout, the fastest of REPEATS runs.

    "first" and "second" start of the command: without and with the compilation cache of a first.
    """
    found: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as caches:
            for name in STAGES:
                found.setdefault(name, []).append(stage_seconds(name, checkout, caches))
            host = printed_seconds(HOST, checkout, caches)
            found.setdefault("host's part of a step", []).append(host)
            for start in ("first", "second"):
                token, end = command_seconds(checkout, caches)
                found.setdefault(f"command, {start} start: first token", []).append(token)
                found.setdefault(f"command, {start} start: end", []).append(end)
    return {name: min(seconds) for name, seconds in found.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of another commit")
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "startup.json")
    options = parser.parse_args(arguments)
    load = round(os.getloadavg()[0], 1)
    columns = {"seconds": measure(HERE)}
    if options.before is not None:
        columns = {"before": measure(options.before.resolve()), **columns}
    rows: list[dict[str, Any]] = [
        {"stage": name, **{column: found[name] for column, found in columns.items()}}
        for name in columns["seconds"]
    ]
    print(f"{'stage':36}" + "".join(f"{column:>10}" for column in columns))
    for row in rows:
        print(f"{row['stage']:36}" + "".join(f"{row[column]:10.6f}" for column in columns))
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
