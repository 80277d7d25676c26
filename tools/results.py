"""Result files in JSON, with their provenance: date, commit, versions and host."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "cuda-bindings", "gguf")


def commit() -> str | None:
    """Returns the commit that is checked out, with `-dirty` if files differ; None without git."""
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
    """Returns the versions of Python and of the relevant packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host() -> str:
    """Returns the CPU's name and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].split(":", 1)[1].strip() if models else name
    bound = hasattr(os, "sched_getaffinity")
    return f"{name}, {len(os.sched_getaffinity(0)) if bound else os.cpu_count()} cores"


def provenance() -> dict[str, Any]:
    """Returns date, commit, versions and host, the beginning of every result file."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "host": host(),
    }


def write_results(path: Path, results: dict[str, Any]) -> Path:
    """Writes `provenance()` and `results` as JSON to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(provenance() | results, indent=1) + "\n")
    return path
