"""Limits the memory and the mappings of a process that runs tests."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

#: Resident memory in MB above which compiled programs are dropped. It keeps a worker below 3 GB.
_MEGABYTES = 1800
#: Minimum growth in MB since the last drop, for processes that stay above the limit.
_MORE_MEGABYTES = 300
#: A process crashes at the system limit of 65,530; each XLA CPU program takes about eleven.
_MAPPINGS = 16_000
#: Of glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def resident_megabytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


class Bound:
    """Plugin that drops JAX's compiled programs when a process has grown too large.

    JAX keeps every program, and Python's collector runs rarely (see `pytest_collection_finish`).
    JAX's on-disk compilation cache makes it cheap to get a program again.
    """

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        if hasattr(self.libc, "mallopt"):  # glibc: else half of the heap is holes
            self.libc.mallopt(_M_ARENA_MAX, 2)
            self.libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        self.after = 0
        self.whole = _MEGABYTES - _MORE_MEGABYTES  # size after the last full collection
        self.module = ""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        jax = sys.modules.get("jax")
        if jax is None or not Path("/proc/self/statm").exists():
            return
        if resident_megabytes() > max(_MEGABYTES, self.after + _MORE_MEGABYTES) or (
            self._is_new(nodeid.partition("::")[0])
            and Path("/proc/self/maps").read_bytes().count(b"\n") > _MAPPINGS
        ):
            jax.clear_caches()
            gc.collect()
            if resident_megabytes() > self.whole + _MORE_MEGABYTES:
                gc.unfreeze()  # frozen objects may be garbage by now
                gc.collect()
                self.whole = resident_megabytes()
            gc.freeze()  # the next collection scans only newer objects
            if hasattr(self.libc, "malloc_trim"):
                self.libc.malloc_trim(0)
            self.after = resident_megabytes()

    def _is_new(self, module: str) -> bool:
        """Whether a new module begins; counting mappings takes a millisecond, so only then."""
        before, self.module = self.module, module
        return before != module
