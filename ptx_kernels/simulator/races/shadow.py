"""Who touched which bytes, and when: what the race checks remember of a stretch of memory.

Per granule (the narrowest access so far) there is a record of the last access of each kind: the
time, a lane, and whether several lanes made it. Lanes run in lockstep here, but not on a GPU: what
two lanes do is in order only if a barrier that both passed lies between, bar.sync for lanes of one
block, bar.warp.sync for lanes of one warp (a shuffle orders no memory, PTX ISA 9.7.9.6), or a
release of one that the other acquires. Where the lanes of one warp store to one place at one
instruction, one of them wins, which PTX leaves open but allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import MissingProxyFence, SimulationError, UninitializedRead
from ..frame import Frame
from ..text.program import Instruction
from .access_log import History, farthest
from .concurrency import BLOCKS, LEVEL, THREE, WARPS, distance, tell, unproxied
from .conflicts import CONFLICTS, READING, Kind
from .happens_before import COPIED, LOWEST_BITS
from .vector_clock import Strong


class Access(NamedTuple):
    """What an instruction does to a memory, lane by lane.

    Attributes:
      items: of `width` bytes, by their index, shape (lanes of the frame,).
      describe: position in the frame -> the place, in words.
    """

    frame: Frame
    instruction: Instruction
    items: np.ndarray
    width: int
    describe: Callable[[int], str]

    def fault(self, error: type[SimulationError], position: int, what: str) -> SimulationError:
        """An error at the lane with this position in the frame."""
        return self.frame.fault(
            error, self.instruction, position, f"{self.describe(position)}: {what}"
        )


class Shadow:
    """Records of one shared memory (of all blocks of a batch, apart) or of one global buffer.

    Args:
      error: what a race raises.
      between_blocks: whether several blocks reach the same bytes (global memory).
      must_be_written: reading what nobody wrote is an error.
      synchronizes: whether the program orders accesses otherwise than by barriers.
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
        self._history = History() if synchronizes else None

    def access(
        self,
        kind: Kind,
        access: Access,
        strong: Strong | None = None,
        turns: np.ndarray | None = None,
    ) -> None:
        """Records it; raises if it races. Strong ones are served in the order of `turns`."""
        frame, _, index, width, _ = access
        self._refine(width)
        needs_bytes = self.must_be_written and kind != "write" and (strong is None or strong.reads)
        for other, what, least in CONFLICTS[kind]:
            records = self._at(other, index, width)
            if other == "write" and needs_bytes and not (records.size and records.all()):
                self._check_written(access)
            if records.size:
                self._check(access, other, records, what, least)
        if kind == "write":
            stamps = _stamps(frame)
            self._overwrite(index, width, stamps)
            after = self._at("write", index, width)
            if not (after == stamps).all():
                what = "writes, at the same instruction, what {} wrote"
                self._check(access, "write", after, what, WARPS)
            return
        self._merge(kind, frame, index, width)
        if strong is not None and strong.writes and self._history is not None:
            assert turns is not None
            stamps = np.broadcast_to(_stamps(frame), (index.size, width // self.granule))
            self._history.add(
                kind,
                self._granules(index, width)[turns].ravel(),
                stamps[turns].ravel(),
                strong.returns,
            )
        if kind == "block update":
            what = "updates by an atomic of .cta scope, at the same instruction, what {} updated"
            self._check(access, kind, self._at(kind, index, width), what, BLOCKS)

    def start_copy(self, kind: Kind, access: Access) -> None:
        """Checks an access by the async proxy, without a record; since the accesses of threads that
        it would meet, its lanes must have a proxy fence behind them."""
        self._refine(access.width)
        if kind != "write":
            self._check_written(access)
        for other, what, least in CONFLICTS[kind]:
            records = self._at(other, access.items, access.width)
            if records.size:
                self._check(access, other, records, what, least)
            if records.size and other != "fetch":
                self._check_proxy(access, other, records, f"this copy {what}")

    def end_copy(self, frame: Frame, index: np.ndarray, width: int, barriers: np.ndarray) -> None:
        """Bytes of a copy arrive; who knows of their mbarriers' phases may read them."""
        stamps = frame.batch.order.stamps()[:1] & ~LOWEST_BITS | COPIED | barriers.astype(np.uint64)
        self._overwrite(index, width, stamps[:, None])

    def _check_proxy(self, access: Access, kind: Kind, records: np.ndarray, what: str) -> None:
        """Raises if the async proxy cannot see accesses that its lanes are in order with."""
        apart = self._singly(access, kind, records, unproxied(access.frame, records), unproxied)
        if apart.any():
            position = int(np.argmax(apart.any(axis=1)))
            thread = (
                int(records[position, np.argmax(apart[position])] & LOWEST_BITS)
                % access.frame.batch.padded
            )
            told = f"{what.format(f'thread {thread}')}, without a fence.proxy.async between"
            raise access.fault(MissingProxyFence, position, told)

    def _check_written(self, access: Access) -> None:
        missing = np.ones((access.items.size, 1), np.bool_)
        for kind in ("write", "update", "block update"):
            records = self._at(kind, access.items, access.width)  # type: ignore[arg-type]
            missing = missing & (records == 0) if records.size else missing
        if missing.any():
            position = int(np.argmax(missing.any(axis=1)))
            raise access.fault(
                UninitializedRead, position, f"nobody wrote all of these {access.width} bytes"
            )

    # --- records
    # ----------------------------------------------------------------------------------------------------

    def _refine(self, width: int) -> None:
        """Splits the records where an access is narrower than all before it."""
        if width >= self.granule:
            return
        ratio, self.granule = self.granule // width, width
        for kind, old in self._records.items():
            if old.size:
                new = np.zeros(self.nbytes // width, np.uint64)
                known = np.flatnonzero(
                    old
                )  # of a large buffer few: what is untouched takes no memory
                new[known[:, None] * ratio + np.arange(ratio)] = old[known, None]
                self._records[kind] = new
        if self._history is not None:
            self._history.refine(ratio)

    def _allocated(self, kind: Kind) -> np.ndarray:
        if not self._records[kind].size:
            self._records[kind] = np.zeros(
                self.nbytes // self.granule, np.uint64
            )  # lazy: untouched pages
        return self._records[kind]

    def _view(self, records: np.ndarray, width: int) -> np.ndarray:
        per_item = width // self.granule
        return records[: records.size // per_item * per_item].reshape(-1, per_item)

    def _at(self, kind: Kind, index: np.ndarray, width: int) -> np.ndarray:
        """Records of each item's granules, shape (lanes, granules); empty if there are none yet."""
        records = self._records[kind]
        return self._view(records, width).take(index, axis=0) if records.size else records

    def _granules(self, index: np.ndarray, width: int) -> np.ndarray:
        """Numbers of each item's granules, shape (lanes, granules)."""
        per_item = width // self.granule
        return index[:, None] * per_item + np.arange(per_item)

    def _overwrite(self, index: np.ndarray, width: int, stamps: np.ndarray) -> None:
        """Records writes, which all accesses so far are in order with."""
        self._view(self._allocated("write"), width)[index] = stamps
        if self._history is None:
            return
        others = [
            records for kind, records in self._records.items() if records.size and kind != "write"
        ]
        if any(self._view(records, width)[index].any() for records in others):
            for records in others:
                self._view(records, width)[index] = 0
            self._history.forget(self._granules(index, width))

    def _merge(self, kind: Kind, frame: Frame, index: np.ndarray, width: int) -> None:
        """Adds accesses that may overlap; a record then says how far apart those without order are."""
        records = self._allocated(kind)
        view, stamps = self._view(records, width), _stamps(frame)
        before = view.take(index, axis=0)
        if (before == stamps).all():
            return
        level = self._distance(frame, before)
        joined = np.broadcast_to(stamps, before.shape) if level is None else stamps | level << LEVEL
        view[index] = joined
        after = view.take(index, axis=0)
        if not (after == joined).all():  # several lanes at one place at this very instruction
            level = self._distance(frame, after)
            assert level is not None
            order = np.argsort(level, axis=None, kind="stable")  # the farthest is written last
            granules = self._granules(index, width).ravel()
            records[granules[order]] = ((after & ~(THREE << LEVEL)) | level << LEVEL).ravel()[order]
        if self._history is not None and kind in READING:
            self._remember(kind, index, width, before, np.broadcast_to(stamps, before.shape))

    def _remember(
        self, kind: Kind, index: np.ndarray, width: int, before: np.ndarray, now: np.ndarray
    ) -> None:
        """Notes the single accesses of records that have become those of several lanes."""
        assert self._history is not None
        shared = self._at(kind, index, width) >> LEVEL & THREE != 0
        granules = self._granules(index, width)
        alone = shared & (before != 0) & (before >> LEVEL & THREE == 0)
        for where, records in ((alone, before), (shared, now)):
            self._history.add(kind, granules[where], records[where], False)

    # --- races ------------------------------------------------------------------------------------------------------

    def _distance(self, frame: Frame, records: np.ndarray) -> np.ndarray | None:
        return distance(frame, records, self.between_blocks)

    def _singly(
        self,
        access: Access,
        kind: Kind,
        records: np.ndarray,
        apart: np.ndarray,
        measure: Callable[[Frame, np.ndarray], np.ndarray | None],
    ) -> np.ndarray:
        """The same distances, looking at the single accesses where a record is of several lanes."""
        if self._history is None:
            return apart
        rows, columns = np.nonzero((apart != 0) & (records >> LEVEL & THREE != 0))
        granules = self._granules(access.items, access.width)
        asked, single, returns = self._history.find(kind, granules[rows, columns])
        if asked.size:
            far = measure(access.frame.subset(rows[asked]), single[:, None])
            far = np.zeros((asked.size, 1), np.uint64) if far is None else far
            apart = apart.copy()
            apart[rows, columns] = farthest(asked, far[:, 0], returns, rows.size)
        return apart

    def _check(
        self, access: Access, kind: Kind, records: np.ndarray, what: str, least: int
    ) -> None:
        """Raises if a record is of an access without order to this one, at least so far apart."""
        apart = self._distance(access.frame, records)
        if apart is None or int(apart.max()) < least:
            return
        apart = self._singly(access, kind, records, apart, self._distance)
        if int(apart.max()) < least:
            return
        position = int(np.argmax((apart >= least).any(axis=1)))
        granule = int(np.argmax(apart[position] >= least))
        told = tell(
            access.frame, position, what, int(apart[position, granule]), records[position, granule]
        )
        raise access.fault(self.error, position, told)


def _stamps(frame: Frame) -> np.ndarray:
    return frame.of_lanes(frame.batch.order.stamps())[:, None]


_NOTHING = np.zeros(0, np.uint64)
