"""Counts the CPUs that this process may use: its affinity, and the CPU quota of a container."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import Path

from . import control_groups

__all__ = ["THREADS", "available", "limit_threads", "limited_to", "quota"]

#: Variables with the number of threads of XLA's CPU client, which also run this package's kernels,
#: by precedence.
THREADS = ("PJRT_NPROC", "NPROC")


_limited_to: float | None = None  # quota that `limit_threads` has applied


def available() -> int:
    """Returns how many threads can run at once: CPUs, or fewer if a quota allows fewer."""
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    limit = quota()
    return count if limit is None else max(1, min(count, math.ceil(limit)))


def limit_threads() -> None:
    """Sets $PJRT_NPROC to `available()` if a quota is below the number of CPUs.

    XLA counts CPUs only. Threads that spin beyond the quota use it up, and then all wait. Affects
    JAX's CPU client if it does not run yet; does nothing if the number is already set.
    """
    global _limited_to
    if any(os.environ.get(name) for name in THREADS) or (limit := quota()) is None:
        return
    if (count := available()) < len(os.sched_getaffinity(0)):
        os.environ[THREADS[0]], _limited_to = str(count), limit


def limited_to() -> float | None:
    """Returns the quota that `limit_threads` has applied; None if it has changed nothing."""
    return _limited_to


@functools.cache
def quota(root: Path = Path("/")) -> float | None:
    """Returns the CPU quota of this process's control groups, in CPUs; None: no quota.

    Reads versions 1 and 2 of Linux's cgroups; the smallest quota of a group and its parents counts.
    Read once per process: XLA's threads do not follow a change either.
    root: folder that has `proc` and `sys`.
    """
    limits = map(_limit, control_groups.folders("cpu", root))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(folder: Path) -> float | None:
    """Returns the quota of a control group's folder, in CPUs; None: none, or no such file."""
    of_group = control_groups.text_of(folder / "cpu.max").split()
    if not of_group:
        of_group = [
            control_groups.text_of(folder / f"cpu.cfs_{name}_us").strip()
            for name in ("quota", "period")
        ]
    with contextlib.suppress(ValueError, OverflowError):
        time, period = map(int, of_group)  # microseconds; "max" and -1: none
        if time > 0 and period > 0:
            return time / period
    return None
