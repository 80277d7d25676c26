"""Runs all checks of `jax-q4k doctor --gpu` and prints a report that can be pasted."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator

import jax_q4k as jq
from jax_q4k.gpu_checks import plugin

from . import processes
from .checks import CHECKS
from .results import Result, failed, not_run, ok

_PACKAGES = (
    "jax",
    "jaxlib",
    *plugin.PLUGINS.values(),
    "cuda-bindings",
    "numpy",
)
#: Seconds after which no further check starts; the simulator needs longer than a GPU.
WHOLE_LIMIT, SIMULATED_WHOLE_LIMIT = 600, 1800
_WIDTH = max(map(len, CHECKS))


def run_checks(simulated: bool, show: Callable[[str], object]) -> bool:
    """Runs all checks and shows the report line by line; returns whether none failed."""
    show(_versions())
    if simulated:
        show("dry run: the kernels run in the simulator, no GPU is used")
    limit, began = SIMULATED_WHOLE_LIMIT if simulated else WHOLE_LIMIT, time.monotonic()
    found: dict[str, Result] = {}
    for name, check in CHECKS.items():
        if check.without is not None and found["generation"].status != "failed":
            continue  # nothing to search for
        lacks = [need for need in check.needs if need in found and found[need].status == "failed"]
        if lacks:
            result = not_run(f"because {lacks[0]} failed")
        elif time.monotonic() - began > limit:
            result = failed(f"did not start: the checks before it took {limit} seconds")
        else:
            result = processes.run(name, simulated=simulated)
        if check.without is not None and result.status == "ok":
            result = ok(result.line, check.advice)
        found[name] = result
        for line in _lines(name, result):
            show(line)
    good = all(result.status != "failed" for result in found.values())
    show("no check failed" if good else "a check failed")
    return good


def _lines(name: str, result: Result) -> Iterator[str]:
    yield f"{name:{_WIDTH}}  {result.status:7}  {result.line}"
    for detail in result.details:
        yield f"{'':{_WIDTH}}           {detail}"


def _versions() -> str:
    found = [f"jax-q4k {jq.__version__}", f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"{platform.system()} {platform.machine()}"])
