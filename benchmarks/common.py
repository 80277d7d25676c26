"""What the benchmarks share: where and on what they ran, and their results as files."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "cuda-bindings", "gguf")


def commit() -> str | None:
    """The commit that is checked out, `-dirty` if files differ from it; None outside a
    repository.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host() -> str:
    """The CPU's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def on_cores(cores: set[int], module: str, function: str, *args: Any) -> Any:
    """What `benchmarks.module.function(*args)` returns in a process that may use these cores alone.

    From its start: JAX sizes its thread pool then. What is returned must fit JSON, `args` must be
    literals.
    """
    code = (
        f"import json, os; os.sched_setaffinity(0, {sorted(cores)}); from benchmarks import {module}; "
        f"print(json.dumps({module}.{function}(*{args!r})))"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def provenance() -> dict[str, Any]:
    """Date, commit, versions and host: what every result file begins with."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "host": host(),
    }


def results_file(arguments: list[str], name: str, description: str | None) -> Path:
    """The file that a command line names, or else the repository's results of the benchmark
    `name`.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = RESULTS / f"{name}.json"
    parser.add_argument(
        "file", nargs="?", type=Path, default=default, metavar="FILE", help="JSON to write"
    )
    return parser.parse_args(arguments).file


def write_results(path: Path, results: dict[str, Any]) -> Path:
    """Writes `provenance()` and `results` as JSON to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(provenance() | results, indent=1) + "\n")
    return path
