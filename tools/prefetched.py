"""Bytes that launches ask for ahead: how many have come when the launch begins that reads them.

Memory brings them in the order in which they were asked for, while launches leave it time: between
two of them, in prologues, and where something else than memory is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ptx_kernels.machine_code.model import Launch
from ptx_kernels.ptx import Kernel, Prefetch

_GRAIN = 1 << 14  # bytes: launches of one kernel then find the same


@dataclass(frozen=True)
class Found:
    """What a launch finds: bytes of its own that have come, that come, and others' before its."""

    resident: int = 0
    coming: int = 0
    queued: int = 0

    def by(self, launch: Launch) -> Launch:
        """The launch that finds it."""
        return replace(
            launch,
            resident_bytes=self.resident,
            coming_bytes=self.coming,
            queued_bytes=self.queued,
        )


@dataclass
class _Asked:
    """Rows of matrices that one launch asked for; bytes that have come, and that have not."""

    wanted: tuple[Prefetch, ...]
    coming: float
    resident: float = 0.0

    def is_for(self, kernel: Kernel) -> bool:
        """True of the launch that reads them: its planes have these shapes."""
        shapes = {b.shape[-3:] for b in kernel.operands if not b.ahead}
        return all((each.rows, *row) in shapes for each in self.wanted for row in each.planes)


class Prefetched:
    """What was asked for and not yet read, along a program's launches.

    rate: bytes/s that memory brings.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._asked: list[_Asked] = []

    def begin(self, kernel: Kernel) -> Found:
        """What a launch finds; it takes its own from the account."""
        own = [asked for asked in self._asked if asked.is_for(kernel)]
        self._asked = [asked for asked in self._asked if asked not in own]
        sums = (
            sum(asked.resident for asked in own),
            sum(asked.coming for asked in own),
            sum(asked.coming for asked in self._asked),
        )
        return Found(*(round(nbytes / _GRAIN) * _GRAIN for nbytes in sums))

    def pass_time(self, seconds: float, nbytes: float = 0.0) -> None:
        """A launch of so many seconds, in which memory moves so many bytes of its own."""
        free = max(0.0, seconds * self._rate - nbytes)
        for asked in self._asked:
            came = min(free, asked.coming)
            asked.coming -= came
            asked.resident += came
            free -= came

    def end(self, kernel: Kernel) -> None:
        """What a launch asks for at its end."""
        if kernel.ahead_bytes:
            wanted = kernel.arguments["prefetch"]
            self._asked.append(_Asked(wanted, float(kernel.ahead_bytes)))
