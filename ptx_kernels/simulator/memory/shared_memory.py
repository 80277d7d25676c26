"""Shared memory of a batch of thread blocks, with checks.

It checks bounds, alignment, unwritten bytes and races.
"""

from __future__ import annotations

import numpy as np

from ..access import Access, Guard, Located
from ..address_space import SHARED_BASE
from ..errors import Misaligned, OutOfBounds, SharedRace
from ..frame import Frame
from ..layout import Layout
from ..races.conflicts import READING, Kind, kind_of
from ..races.releases import Releases
from ..races.shadow import Shadow
from ..races.strong import Strong
from ..text.program import Instruction, Program
from .context import Context
from .items import ITEMS, item_view


class SharedMemory:
    """Shared memory of all thread blocks of a batch, concatenated.

    Attributes:
      nbytes: bytes per thread block.
      stride: bytes from the start of one thread block's memory to the next.
      guards: functions called before every access; copies in flight register theirs.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        nbytes: int,
        context: Context,
        *,
        synchronizes: bool,
    ) -> None:
        """Allocates `nbytes` per thread block. `synchronizes`: see `Shadow`."""
        self.program, self.layout, self.context = program, layout, context
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        data = np.zeros(layout.blocks * self.stride, np.uint8)
        self.views = {width: item_view(data, width) for width in ITEMS}
        self.shadow = Shadow(
            data.size,
            SharedRace,
            between_blocks=layout.cluster_size > 1,
            must_be_written=True,
            synchronizes=synchronizes,
        )
        self.releases = Releases()
        self.guards: list[Guard] = []

    def load(self, access: Access) -> np.ndarray:
        """Returns one item per lane, shape (lanes of the frame,)."""
        return self.read(self.locate(access))

    def read(self, at: Located) -> np.ndarray:
        """Loads from located items."""
        self._touch("read", at)
        return self.views[at.width].take(at.items)

    def store(self, access: Access, values: np.ndarray) -> None:
        """Stores items, shape (lanes of the frame,) or (1,); a warp's highest lane wins."""
        self.write(self.locate(access), values)

    def write(self, at: Located, values: np.ndarray, *, counted: bool = True) -> None:
        """Stores to located items. `counted`: whether to add to the launch's traffic."""
        self._touch("write", at, counted=counted)
        self.scatter(at, values)
        if self.releases.known:
            self.releases.overwrite(at)

    def update(self, access: Access, strong: Strong) -> np.ndarray:
        """Performs atomic updates, or strong loads or stores, at one address per lane.

        Returns the previous items, one per lane.
        """
        at = self.locate(access)
        count = access.frame.count
        turns = self.context.freedom.turns(count)
        self._touch(kind_of(strong), at, strong, turns)
        found = strong.change(self.views[at.width], at.items, np.arange(count), turns)
        self.context.happens_before.synchronize(at, strong, self.releases, turns)
        return found

    def scatter(self, at: Located, values: np.ndarray) -> None:
        """Writes values without any check."""
        self.context.freedom.scatter(self.views[at.width], at.items, values)

    def _touch(
        self,
        kind: Kind,
        at: Located,
        strong: Strong | None = None,
        turns: np.ndarray | None = None,
        counted: bool = True,
    ) -> None:
        """Runs the checks common to all accesses: guards, races, traffic."""
        self.guard(at, "reads" if kind in READING else "writes" if kind == "write" else "updates")
        self.shadow.access(self.context.happens_before, kind, at, strong, turns)
        if counted and self.context.traffic is not None:
            self.context.traffic.count_shared(at)

    def guard(self, at: Located, what: str) -> None:
        for guard in self.guards:
            guard(at, what)

    def starts(self, frame: Frame) -> np.ndarray:
        """Returns the first byte of each lane's thread block, shape (lanes of the frame,)."""
        return frame.of_lanes(self.layout.block_of_lane) * self.stride

    def name(self, at: int) -> str:
        """Returns `variable + offset` for a byte of the batch's shared memory, for errors."""
        return self.program.shared_name(at % self.stride)

    def locate(self, access: Access, blocks: np.ndarray | None = None) -> Located:
        """Resolves an access, in each lane's own thread block or in `blocks` of the batch."""
        frame, width = access.frame, access.width
        offsets = access.addresses.astype(np.int64) + (access.offset - SHARED_BASE)
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high > self.nbytes - width:
            position = int(np.argmax((offsets < 0) | (offsets > self.nbytes - width)))
            told = (
                f"shared offset {int(offsets[position])} "
                f"({width} bytes): the block has {self.nbytes} bytes of shared memory"
            )
            raise access.fault(OutOfBounds, position, told)
        if int(np.bitwise_or.reduce(offsets)) & (width - 1):
            position = int(np.argmax(offsets & (width - 1) != 0))
            told = f"shared offset {int(offsets[position])} is no multiple of {width} bytes"
            raise access.fault(Misaligned, position, told)
        starts = self.starts(frame) if blocks is None else blocks * self.stride
        items = (offsets + starts) >> (width.bit_length() - 1)
        return self.at(frame, access.instruction, items, width)

    def at(self, frame: Frame, instruction: Instruction, items: np.ndarray, width: int) -> Located:
        """Returns the located access to items of `width` bytes."""

        def place(position: int) -> str:
            return self.name(int(items[position]) * width)

        return Located(frame, instruction, items, width, 0, place)
