"""Shadow memory: records the last accesses to every byte of a memory, and finds races.

Each granule of bytes (as wide as the narrowest access so far) has one record, an epoch, of the last
access per kind: the time, a lane, and whether several lanes made the access. Lanes run in lockstep
here, but not on a GPU. One of two lanes' accesses happens before the other only through a barrier
that both passed (bar.sync in a thread block, bar.warp.sync in a warp), or through a release by one
lane that the other acquires. A shuffle orders no memory (PTX ISA 9.7.9.6). If lanes of one warp
store to one place in one instruction, one of them wins; PTX allows this but leaves open which.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..access import Located
from ..errors import SimulationError, UninitializedRead
from ..frame import Frame
from .access_log import AccessLog, farthest
from .concurrency import AsyncWriter, concurrency, report
from .conflicts import CONFLICTS, READING, Kind
from .epoch import ASYNC, BLOCKS, LANE_BITS, SCOPE_MASK, SCOPE_SHIFT, WARPS, scope_of
from .happens_before import HappensBefore
from .strong import Strong

#: (records at the frame's items) -> scope at which each is concurrent with the frame's lane
Measure = Callable[[HappensBefore, Frame, np.ndarray], np.ndarray | None]
#: (kind of another access, its records, text of what the access does with it)
Also = Callable[[Kind, np.ndarray, str], None]


class Shadow:
    """Access records of one global buffer, or of a batch's shared memories, apart by thread block.

    Args:
      error: type that a race raises.
      between_blocks: whether several thread blocks access the same bytes (global memory).
      must_be_written: raises if unwritten bytes are read.
      synchronizes: whether the program orders accesses by other means than barriers.
    """

    def __init__(
        self,
        nbytes: int,
        error: type[SimulationError],
        *,
        between_blocks: bool,
        must_be_written: bool,
        synchronizes: bool,
    ) -> None:
        self.nbytes, self.error = nbytes, error
        self.between_blocks, self.must_be_written = between_blocks, must_be_written
        self.granule = 16
        self._records: dict[Kind, np.ndarray] = dict.fromkeys(CONFLICTS, _NOTHING)
        self._log = AccessLog() if synchronizes else None
        self._writer: AsyncWriter | None = None

    def access(
        self,
        happens_before: HappensBefore,
        kind: Kind,
        at: Located,
        strong: Strong | None = None,
        turns: np.ndarray | None = None,
    ) -> None:
        """Records an access; raises if it races with a recorded one.

        Strong accesses are served in the order of `turns`.
        """
        index, width = at.items, at.width
        self._refine(width)
        needs_bytes = self.must_be_written and kind != "write" and (strong is None or strong.reads)
        for other, what, least in CONFLICTS[kind]:
            records = self._at(other, index, width)
            if other == "write" and needs_bytes and not (records.size and records.all()):
                self._check_written(at)
            if records.size:
                self._check(happens_before, at, other, records, what, least)
        if kind == "write":
            stamps = _stamps(happens_before, at.frame)
            self._overwrite(index, width, stamps)
            after = self._at("write", index, width)
            if not (after == stamps).all():
                what = "writes, at the same instruction, what {} wrote"
                self._check(happens_before, at, "write", after, what, WARPS)
            return
        self._merge(happens_before, kind, at)
        if strong is not None and strong.writes and self._log is not None:
            assert turns is not None
            stamps = np.broadcast_to(
                _stamps(happens_before, at.frame), (index.size, width // self.granule)
            )
            self._log.add(
                kind,
                self._granules(index, width)[turns].ravel(),
                stamps[turns].ravel(),
                strong.returns,
            )
        if kind == "block update":
            what = "updates by an atomic of .cta scope, at the same instruction, what {} updated"
            self._check(happens_before, at, kind, self._at(kind, index, width), what, BLOCKS)

    def check(self, happens_before: HappensBefore, kind: Kind, at: Located, also: Also) -> None:
        """Checks an access for races without recording it.

        `also` is called with the records of the same bytes.
        """
        self._refine(at.width)
        if kind != "write":
            self._check_written(at)
        for other, what, least in CONFLICTS[kind]:
            records = self._at(other, at.items, at.width)
            if records.size:
                self._check(happens_before, at, other, records, what, least)
                also(other, records, what)

    def write_async(
        self,
        happens_before: HappensBefore,
        index: np.ndarray,
        width: int,
        counters: np.ndarray,
        writer: AsyncWriter,
    ) -> None:
        """Records the bytes written by an asynchronous copy.

        `counters`: indices of the mbarriers that count the bytes.
        """
        self._writer = writer
        stamps = happens_before.stamps()[:1] & ~LANE_BITS | ASYNC | counters.astype(np.uint64)
        self._overwrite(index, width, stamps[:, None])

    def _check_written(self, at: Located) -> None:
        missing = np.ones((at.items.size, 1), np.bool_)
        kinds: tuple[Kind, ...] = ("write", "update", "block update")
        for kind in kinds:
            records = self._at(kind, at.items, at.width)
            missing = missing & (records == 0) if records.size else missing
        if missing.any():
            position = int(np.argmax(missing.any(axis=1)))
            raise at.fault(
                UninitializedRead, position, f"nobody wrote all of these {at.width} bytes"
            )

    # --- records ---

    def _refine(self, width: int) -> None:
        """Splits the granules if an access is narrower than all before it."""
        if width >= self.granule:
            return
        ratio, self.granule = self.granule // width, width
        for kind, old in self._records.items():
            if old.size:
                new = np.zeros(self.nbytes // width, np.uint64)
                # few records of a large buffer are set; untouched pages take no memory
                known = np.flatnonzero(old)
                new[known[:, None] * ratio + np.arange(ratio)] = old[known, None]
                self._records[kind] = new
        if self._log is not None:
            self._log.refine(ratio)

    def _allocated(self, kind: Kind) -> np.ndarray:
        if not self._records[kind].size:
            # lazily allocated: untouched pages take no memory
            self._records[kind] = np.zeros(self.nbytes // self.granule, np.uint64)
        return self._records[kind]

    def _view(self, records: np.ndarray, width: int) -> np.ndarray:
        per_item = width // self.granule
        return records[: records.size // per_item * per_item].reshape(-1, per_item)

    def _at(self, kind: Kind, index: np.ndarray, width: int) -> np.ndarray:
        """Returns the records of each item's granules, shape (lanes, granules).

        The result is empty if there are no records of this kind yet.
        """
        records = self._records[kind]
        return self._view(records, width).take(index, axis=0) if records.size else records

    def _granules(self, index: np.ndarray, width: int) -> np.ndarray:
        """Returns the indices of each item's granules, shape (lanes, granules)."""
        per_item = width // self.granule
        return index[:, None] * per_item + np.arange(per_item)

    def _overwrite(self, index: np.ndarray, width: int, stamps: np.ndarray) -> None:
        """Records writes that come after all accesses so far."""
        self._view(self._allocated("write"), width)[index] = stamps
        if self._log is None:
            return
        others = [
            records for kind, records in self._records.items() if records.size and kind != "write"
        ]
        if any(self._view(records, width)[index].any() for records in others):
            for records in others:
                self._view(records, width)[index] = 0
            self._log.forget(self._granules(index, width))

    def _merge(self, happens_before: HappensBefore, kind: Kind, at: Located) -> None:
        """Adds accesses to the records, which then hold the scope at which these are concurrent."""
        index, width = at.items, at.width
        records = self._allocated(kind)
        view, stamps = self._view(records, width), _stamps(happens_before, at.frame)
        before = view.take(index, axis=0)
        if (before == stamps).all():
            return
        scope = self._concurrency(happens_before, at.frame, before)
        joined = (
            np.broadcast_to(stamps, before.shape)
            if scope is None
            else stamps | scope << SCOPE_SHIFT
        )
        view[index] = joined
        after = view.take(index, axis=0)
        if not (after == joined).all():  # several lanes at one place in this instruction
            scope = self._concurrency(happens_before, at.frame, after)
            assert scope is not None
            widest_last = np.argsort(scope, axis=None, kind="stable")
            granules = self._granules(index, width).ravel()
            joined = (after & ~(SCOPE_MASK << SCOPE_SHIFT)) | scope << SCOPE_SHIFT
            records[granules[widest_last]] = joined.ravel()[widest_last]
        if self._log is not None and kind in READING:
            self._remember(kind, index, width, before, np.broadcast_to(stamps, before.shape))

    def _remember(
        self, kind: Kind, index: np.ndarray, width: int, before: np.ndarray, now: np.ndarray
    ) -> None:
        """Logs the single accesses behind records that several lanes now share."""
        assert self._log is not None
        shared = scope_of(self._at(kind, index, width)) != 0
        granules = self._granules(index, width)
        alone = shared & (before != 0) & (scope_of(before) == 0)
        for where, records in ((alone, before), (shared, now)):
            self._log.add(kind, granules[where], records[where], False)

    # --- races ---

    def _concurrency(
        self, happens_before: HappensBefore, frame: Frame, records: np.ndarray
    ) -> np.ndarray | None:
        return concurrency(happens_before, frame, records, self.between_blocks)

    def singly(
        self,
        happens_before: HappensBefore,
        at: Located,
        kind: Kind,
        records: np.ndarray,
        apart: np.ndarray,
        measure: Measure,
    ) -> np.ndarray:
        """Returns scopes `apart`, recomputed from logged accesses for records that lanes share."""
        if self._log is None:
            return apart
        rows, columns = np.nonzero((apart != 0) & (scope_of(records) != 0))
        granules = self._granules(at.items, at.width)
        asked, single, returns = self._log.find(kind, granules[rows, columns])
        if asked.size:
            far = measure(happens_before, at.frame.subset(rows[asked]), single[:, None])
            far = np.zeros((asked.size, 1), np.uint64) if far is None else far
            apart = apart.copy()
            apart[rows, columns] = farthest(asked, far[:, 0], returns, rows.size)
        return apart

    def _check(
        self,
        happens_before: HappensBefore,
        at: Located,
        kind: Kind,
        records: np.ndarray,
        what: str,
        least: int,
    ) -> None:
        """Raises if a recorded access is concurrent with this one at scope `least` or wider."""
        apart = self._concurrency(happens_before, at.frame, records)
        if apart is None or int(apart.max()) < least:
            return
        apart = self.singly(happens_before, at, kind, records, apart, self._concurrency)
        if int(apart.max()) < least:
            return
        position = int(np.argmax((apart >= least).any(axis=1)))
        granule = int(np.argmax(apart[position] >= least))
        scope, record = int(apart[position, granule]), records[position, granule]
        told = report(happens_before, at.frame, position, what, scope, record, self._writer)
        raise at.fault(self.error, position, told)


def _stamps(happens_before: HappensBefore, frame: Frame) -> np.ndarray:
    return frame.of_lanes(happens_before.stamps())[:, None]


_NOTHING = np.zeros(0, np.uint64)
