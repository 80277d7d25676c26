"""Counts the CPUs that this process may use: its affinity, and the CPU quota of a container."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["THREADS", "available", "limit_threads", "limited_to", "quota"]

#: Variables with the number of threads of XLA's CPU client, which also run this package's kernels,
#: by precedence.
THREADS = ("PJRT_NPROC", "NPROC")
_LONGEST = 1 << 20  # bytes of a file in /proc or /sys


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


def quota(root: Path = Path("/")) -> float | None:
    """Returns the CPU quota of this process's control groups, in CPUs; None: no quota.

    Reads versions 1 and 2 of Linux's cgroups; the smallest quota of a group and its parents counts.
    root: folder that has `proc` and `sys`.
    """
    limits = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Yields folders of control groups whose quotas apply to this process."""
    groups: dict[str, str] = {}  # controller -> group; version 2 has the name ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (line.split(":", 2) + ["", ""])[:3]
        groups |= dict.fromkeys(controllers.split(","), group)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = (filesystem.split(" ", 2) + ["", ""])[:3]
        name = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        fields = mount.split(" ")
        if name not in groups or (name == "cpu" and "cpu" not in options.split(",")):
            continue
        if len(fields) < 5:
            continue
        top = root / fields[4].lstrip("/")
        path = PurePosixPath(groups[name])
        # Inside a container the group may be named as outside, where its mount has another root.
        if path.is_relative_to(fields[3]):
            path = path.relative_to(fields[3])
        parts = [part for part in path.parts if part not in ("/", "..")]
        yield from (top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def _limit(folder: Path) -> float | None:
    """Returns the quota of a control group's folder, in CPUs; None: none, or no such file."""
    of_group = _text(folder / "cpu.max").split()
    if not of_group:
        of_group = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    with contextlib.suppress(ValueError, OverflowError):
        time, period = map(int, of_group)  # microseconds; "max" and -1: none
        if time > 0 and period > 0:
            return time / period
    return None


def _text(path: Path) -> str:
    """Returns a file's text; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST).decode(errors="replace")
    except OSError:
        return ""
