"""Who touched which bytes, and when: what the race checks remember of a stretch of memory.

Per granule (the narrowest access so far) there is a record of the last write, the last read and the last atomic
update: the time, a lane, and whether several lanes read. Time counts the barriers of a launch. Lanes run in lockstep
here, but not on a GPU: what two lanes do is in order only if a barrier that both passed lies between, bar.sync for
lanes of one block, bar.warp.sync for lanes of one warp (a shuffle orders no memory, PTX ISA 9.7.9.6). Blocks of one
launch have no order at all. Where the lanes of one warp store to one place at one instruction, one of them wins,
which PTX leaves open but allows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import SimulationError, UninitializedRead
from .frame import WARP, Frame
from .program import Instruction

# a record: time << 32 | level << 30 | lane of the batch; 0: nobody
_TIME, _LEVEL = np.uint64(32), np.uint64(30)
_LOWEST_BITS = np.uint64((1 << 30) - 1)
_ZERO, _THREE = np.uint64(0), np.uint64(3)
_WARP = np.uint64(WARP)

# How far apart two lanes without order between them are; in a reader's record, how far apart the readers were.
_LANES, _WARPS, _BLOCKS = 1, 2, 3

Describe = Callable[[int], str]  # position in the frame -> the place, in words


def time_stamp(time: int) -> np.uint64:
    return np.uint64(time << 32)


class Shadow:
    """Records of one shared memory (of all blocks of a batch, apart) or of one global buffer.

    Args:
      error: what a race raises.
      between_blocks: whether several blocks reach the same bytes (global memory).
      must_be_written: reading what nobody wrote is an error.
    """

    def __init__(
        self, nbytes: int, error: type[SimulationError], *, between_blocks: bool, must_be_written: bool
    ) -> None:
        self.nbytes, self.error = nbytes, error
        self.between_blocks, self.must_be_written = between_blocks, must_be_written
        self.granule = 16
        self._writes = self._reads = self._updates = _NOTHING

    def read(self, frame: Frame, instruction: Instruction, index: np.ndarray, width: int, describe: Describe) -> None:
        """Records a load of items `index`, shape (lanes of the frame,), of `width` bytes; raises if it races."""
        self._refine(width)
        writes = self._known(frame, instruction, index, width, describe)
        self._check(frame, instruction, writes, "reads what {} wrote", describe)
        self._check(
            frame, instruction, self._at(self._updates, index, width), "reads what {} updated by an atomic", describe
        )
        self._reads = self._merge(frame, self._reads, index, width)

    def write(
        self,
        frame: Frame,
        instruction: Instruction,
        index: np.ndarray,
        width: int,
        describe: Describe,
    ) -> None:
        """Records a store, as `read` does."""
        self._refine(width)
        self._check(frame, instruction, self._at(self._writes, index, width), "writes what {} wrote", describe)
        self._check(frame, instruction, self._at(self._reads, index, width), "writes what {} read", describe)
        self._check(
            frame, instruction, self._at(self._updates, index, width), "writes what {} updated by an atomic", describe
        )
        self._writes = self._allocated(self._writes)
        stamps = _stamps(frame)
        self._view(self._writes, width)[index] = stamps
        after = self._at(self._writes, index, width)
        if not (after == stamps).all():
            what = "writes, at the same instruction, what {} wrote"
            self._check(frame, instruction, after, what, describe, least=_WARPS)

    def update(self, frame: Frame, instruction: Instruction, index: np.ndarray, width: int, describe: Describe) -> None:
        """Records an atomic update: in order with other atomic ones, a race with plain accesses."""
        self._refine(width)
        writes = self._known(frame, instruction, index, width, describe)
        self._check(frame, instruction, writes, "updates by an atomic what {} wrote", describe)
        reads = self._at(self._reads, index, width)
        self._check(frame, instruction, reads, "updates by an atomic what {} read", describe)
        self._updates = self._merge(frame, self._updates, index, width)

    def _known(
        self, frame: Frame, instruction: Instruction, index: np.ndarray, width: int, describe: Describe
    ) -> np.ndarray:
        """Records of the last writes; raises where there has to be one and is none."""
        writes = self._at(self._writes, index, width)
        if self.must_be_written and not (writes.size and writes.all()):
            position = int(np.argmax((writes == 0).any(axis=1))) if writes.size else 0
            what = f"{describe(position)}: nobody wrote all of these {width} bytes"
            raise frame.fault(UninitializedRead, instruction, position, what)
        return writes

    # --- records ----------------------------------------------------------------------------------------------------

    def _refine(self, width: int) -> None:
        """Splits the records where an access is narrower than all before it."""
        if width >= self.granule:
            return
        ratio, self.granule = self.granule // width, width
        for name in ("_writes", "_reads", "_updates"):
            old = getattr(self, name)
            if old.size:
                new = np.zeros(self.nbytes // width, np.uint64)
                known = np.flatnonzero(old)  # of a large buffer few: what is untouched takes no memory
                new[known[:, None] * ratio + np.arange(ratio)] = old[known, None]
                setattr(self, name, new)

    def _allocated(self, records: np.ndarray) -> np.ndarray:
        return records if records.size else np.zeros(self.nbytes // self.granule, np.uint64)  # lazy: untouched pages

    def _view(self, records: np.ndarray, width: int) -> np.ndarray:
        per_item = width // self.granule
        return records[: records.size // per_item * per_item].reshape(-1, per_item)

    def _at(self, records: np.ndarray, index: np.ndarray, width: int) -> np.ndarray:
        """Records of each item's granules, shape (lanes, granules); empty if there are none yet."""
        if not records.size:
            return _NOTHING
        return self._view(records, width).take(index, axis=0)

    def _merge(self, frame: Frame, records: np.ndarray, index: np.ndarray, width: int) -> np.ndarray:
        """Adds accesses that may overlap; a record then says how far apart those without order are."""
        records = self._allocated(records)
        view, stamps = self._view(records, width), _stamps(frame)
        before = view.take(index, axis=0)
        if (before == stamps).all():
            return records
        level = self._distance(frame, before)
        joined = np.broadcast_to(stamps, before.shape) if level is None else stamps | level << _LEVEL
        view[index] = joined
        after = view.take(index, axis=0)
        if not (after == joined).all():  # several lanes at one place at this very instruction
            level = self._distance(frame, after)
            assert level is not None
            order = np.argsort(level, axis=None, kind="stable")  # the farthest is written last
            granules = (index[:, None] * view.shape[1] + np.arange(view.shape[1])).ravel()
            records[granules[order]] = ((after & ~(_THREE << _LEVEL)) | level << _LEVEL).ravel()[order]
        return records

    def _distance(self, frame: Frame, records: np.ndarray) -> np.ndarray | None:
        """How far apart each record's lanes and the frame's are, 0 where they are one or in order; None: 0 for all."""
        batch = frame.batch
        barred = frame.of_lanes(batch.barred)[:, None]
        if not (records.any() if self.between_blocks else (records >= barred).any()):
            return None
        lanes = frame.all_lanes.astype(np.uint64)[:, None]
        other, level = records & _LOWEST_BITS, records >> _LEVEL & _THREE
        another_lane = (other != lanes) | (level >= _LANES)
        another_warp = (other // _WARP != lanes // _WARP) | (level >= _WARPS)
        since = frame.of_lanes(batch.synced)[:, None]
        if another_warp.any():
            since = np.where(another_warp, self._met(frame, other, level, barred), since)
        apart = np.where(another_lane & (records >= since), np.where(another_warp, _WARPS, _LANES), 0)
        if self.between_blocks:
            padded = np.uint64(batch.padded)
            another_block = (other // padded != lanes // padded) | (level == _BLOCKS) | (records < batch.start)
            apart = np.where(another_block, _BLOCKS, apart)
        return np.where(records != 0, apart, 0).astype(np.uint64)

    def _met(self, frame: Frame, other: np.ndarray, level: np.ndarray, barred: np.ndarray) -> np.ndarray:
        """Since when accesses of other warps of the block, those of the records, are not in order with the frame's."""
        batch = frame.batch
        if batch.met is None:
            return barred
        of_warp = batch.met.shape[1]
        mine = batch.met.reshape(-1, of_warp)[frame.all_lanes // WARP]  # shape (lanes, warps of a block)
        one = np.take_along_axis(mine, (other // _WARP % np.uint64(of_warp)).astype(np.int64), axis=1)
        return np.maximum(barred, np.where(level >= _WARPS, mine.min(axis=1)[:, None], one))

    # --- races ------------------------------------------------------------------------------------------------------

    def _check(
        self,
        frame: Frame,
        instruction: Instruction,
        records: np.ndarray,
        what: str,
        describe: Describe,
        least: int = _LANES,
    ) -> None:
        """Raises if a record is of an access without order to this one, at least so far apart."""
        if not records.size:
            return
        apart = self._distance(frame, records)
        if apart is None or int(apart.max()) < least:
            return
        position = int(np.argmax((apart >= least).any(axis=1)))
        granule = int(np.argmax(apart[position] >= least))
        distance, record = int(apart[position, granule]), int(records[position, granule])
        lane, several = record & int(_LOWEST_BITS), record >> 30 & 3
        mine, batch = int(frame.all_lanes[position]), frame.batch
        if distance == _BLOCKS:
            who = (
                "several blocks" if several == _BLOCKS else batch.block_name(batch.memory.block_of(record >> 32, lane))
            )
            told = f"this block {what.format(who)}: blocks run in any order"
        elif distance == _WARPS:
            who = "several warps" if several == _WARPS else f"warp {lane % batch.padded // WARP}"
            told = f"warp {mine % batch.padded // WARP} {what.format(who)}, without a barrier between"
        else:
            who = "several lanes" if several == _LANES else f"lane {lane % WARP}"
            told = f"lane {mine % WARP} {what.format(who)}, lanes of one warp, without a warp barrier between"
        raise frame.fault(self.error, instruction, position, f"{describe(position)}: {told}")


def _stamps(frame: Frame) -> np.ndarray:
    return frame.of_lanes(frame.batch.stamps())[:, None]


_NOTHING = np.zeros(0, np.uint64)
