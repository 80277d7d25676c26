"""A bound on the memory of a process that runs tests, and on its mappings."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

#: Resident memory above which compiled programs go. A worker stays below 3 GB with it.
_MEGABYTES = 1800
#: And further memory that has come since, where others keep what is there.
_MORE_MEGABYTES = 300
#: A process crashes at the system's 65,530; each of XLA's programs for a CPU takes about eleven.
_MAPPINGS = 16_000


def resident_megabytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


class Bound:
    """A plugin that drops what JAX has compiled where a process has become large.

    JAX keeps every program, and Python's collector comes seldom (see `pytest_collection_finish`).
    JAX's compilation cache on disk makes it cheap to have a program again.
    """

    def __init__(self) -> None:
        self.after = 0
        self.whole = _MEGABYTES - _MORE_MEGABYTES  # since the collector has looked at everything
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
                gc.unfreeze()  # some of what was alive may be garbage now
                gc.collect()
                self.whole = resident_megabytes()
            gc.freeze()  # so that the next time it looks at what has come since alone
            if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)
            self.after = resident_megabytes()

    def _is_new(self, module: str) -> bool:
        """True for the first test of a module: counting mappings takes a millisecond."""
        before, self.module = self.module, module
        return before != module
