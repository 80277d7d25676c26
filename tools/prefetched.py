"""Simulates how many prefetched bytes have arrived when the reading launch starts.

Memory delivers them in the order of the requests whenever launches leave it idle: between two
launches, in prologues, and while something other than memory is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ptx_kernels.machine_code.model import Launch
from ptx_kernels.ptx import Kernel, Prefetch

_GRAIN = 1 << 14  # bytes: launches of one kernel then have equal counts


@dataclass(frozen=True)
class Found:
    """Prefetched bytes at a launch's start: its own in L2 and in flight, and others before."""

    resident: int = 0
    coming: int = 0
    queued: int = 0

    def by(self, launch: Launch) -> Launch:
        """Returns the launch with these bytes."""
        return replace(
            launch,
            resident_bytes=self.resident,
            coming_bytes=self.coming,
            queued_bytes=self.queued,
        )


@dataclass
class _Asked:
    """Rows of matrices that one launch prefetched: bytes in flight, and bytes that arrived."""

    wanted: tuple[Prefetch, ...]
    coming: float
    resident: float = 0.0

    def is_for(self, kernel: Kernel) -> bool:
        """Returns whether a launch reads them: its planes have these shapes."""
        shapes = {b.shape[-3:] for b in kernel.operands if not b.ahead}
        return all((each.rows, *row) in shapes for each in self.wanted for row in each.planes)


class Prefetched:
    """Prefetches that have not been read, along a program's launches.

    rate: bytes/s of the memory; kept: fraction of the bytes that L2 still holds when they are read.
    """

    def __init__(self, rate: float, kept: float = 1.0) -> None:
        self._rate, self._kept = rate, kept
        self._asked: list[_Asked] = []

    def begin(self, kernel: Kernel) -> Found:
        """Returns the prefetched bytes of a launch, and removes its own from the account."""
        mine = [asked for asked in self._asked if asked.is_for(kernel)]
        self._asked = [asked for asked in self._asked if asked not in mine]
        sums = (
            sum(asked.resident for asked in mine),
            sum(asked.coming for asked in mine),
            sum(asked.coming for asked in self._asked),
        )
        return Found(*(round(nbytes / _GRAIN) * _GRAIN for nbytes in sums))

    def pass_time(self, seconds: float, nbytes: float = 0.0) -> None:
        """Advances by a launch of `seconds` that moves `nbytes` through memory itself."""
        free = max(0.0, seconds * self._rate - nbytes)
        for asked in self._asked:
            came = min(free, asked.coming)
            asked.coming -= came
            asked.resident += came
            free -= came

    def end(self, kernel: Kernel) -> None:
        """Adds the prefetches at a launch's end."""
        if kernel.ahead_bytes:
            wanted = kernel.arguments["prefetch"]
            self._asked.append(_Asked(wanted, self._kept * kernel.ahead_bytes))
