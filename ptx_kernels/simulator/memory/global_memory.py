"""Global memory as accessed by a batch of thread blocks; every access is checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..access import Access, Guard, Located
from ..errors import Misaligned, NonCoherentRead, ReadOnlyWrite, UninitializedRead
from ..races.conflicts import Kind, kind_of
from ..races.strong import Strong
from .buffers import Buffers, DeviceBuffer
from .context import Context
from .items import ITEMS

_ALL_ONES = {width: np.full(width, 0xFF, np.uint8).view(ITEMS[width])[0] for width in ITEMS}


class GlobalMemory:
    """Loads, stores and atomic updates of a launch's global buffers.

    Attributes:
      guards: functions called before every access to a buffer that may be written.
    """

    def __init__(self, buffers: Buffers, context: Context) -> None:
        self.buffers, self.context = buffers, context
        self.guards: list[Guard] = []

    def load(self, access: Access, *, non_coherent: bool = False) -> np.ndarray:
        """Returns one item per address, shape (addresses,)."""
        located = self._locate(access)
        if located is None:
            result: np.ndarray = np.empty(access.addresses.size, ITEMS[access.width])
            for positions in self.buffers.split(access):
                result[positions] = self.load(access.subset(positions), non_coherent=non_coherent)
            return result
        buffer, items = located
        if non_coherent and buffer.role != "in":
            told = f"non-coherent load from {buffer.name}, which the kernel may write"
            raise access.fault(NonCoherentRead, 0, told)
        if buffer.shadow is not None or self.context.traffic is not None:
            self._touch("read", buffer, self._at(access, buffer, items))
        self._check_written(access, buffer, items)
        return buffer.views[access.width].take(items)

    def check(self, access: Access) -> None:
        """Raises, like a load, for addresses that lie in no buffer or are not aligned."""
        if self._locate(access) is None:
            for positions in self.buffers.split(access):
                self.check(access.subset(positions))

    def store(self, access: Access, values: np.ndarray) -> None:
        """Stores items, shape (addresses,) or (1,); on a collision the highest lane wins."""
        located = self._locate(access)
        if located is None:
            for positions in self.buffers.split(access):
                part = values if values.size == 1 else values[positions]
                self.store(access.subset(positions), part)
            return
        buffer, items = located
        at = self._at(access, buffer, items)
        self._touch("write", buffer, at)
        self.context.freedom.scatter(buffer.views[access.width], items, values)
        self._mark_written(buffer, items, access.width)
        if self.buffers.releases.known:
            self.buffers.releases.overwrite(at)

    def update(self, access: Access, strong: Strong) -> np.ndarray:
        """Performs atomic updates, or strong loads or stores, at one address per lane.

        Returns the previous items, one per lane.
        """
        located = self._locate(access)
        if located is None:
            return self._update_parts(access, strong)
        buffer, items = located
        count = access.frame.count
        turns = self.context.freedom.turns(count)
        at = self._at(access, buffer, items)
        self._touch(kind_of(strong), buffer, at, strong, turns)
        if strong.reads:
            self._check_written(access, buffer, items)
        found = strong.change(buffer.views[access.width], items, np.arange(count), turns)
        if strong.writes:
            self._mark_written(buffer, items, access.width)
        self.context.happens_before.synchronize(at, strong, self.buffers.releases, turns)
        return found

    def _update_parts(self, access: Access, strong: Strong) -> np.ndarray:
        """Performs updates at addresses of several buffers, one buffer at a time."""
        found: np.ndarray = np.empty(access.addresses.size, ITEMS[access.width])
        for positions in self.buffers.split(access):

            def part(
                view: np.ndarray,
                index: np.ndarray,
                lanes: np.ndarray,
                turns: np.ndarray,
                of: np.ndarray = positions,
            ) -> np.ndarray:
                return strong.change(view, index, of[lanes], turns)

            found[positions] = self.update(access.subset(positions), replace(strong, change=part))
        return found

    def _check_written(self, access: Access, buffer: DeviceBuffer, items: np.ndarray) -> None:
        if buffer.written is None:
            return
        width = access.width
        written = buffer.written_views[width].take(items).view(np.uint8).reshape(items.size, width)
        missing = (written != 0xFF).any(axis=1)
        if missing.any():
            first = int(np.argmax(missing))
            told = (
                f"offset {int(items[first]) * width} of {buffer.name}: "
                f"read of {width} bytes that were never all written"
            )
            raise access.fault(UninitializedRead, first, told)

    def _mark_written(self, buffer: DeviceBuffer, items: np.ndarray, width: int) -> None:
        if buffer.written is not None:
            buffer.written_views[width][items] = _ALL_ONES[width]

    def _touch(
        self,
        kind: Kind,
        buffer: DeviceBuffer,
        at: Located,
        strong: Strong | None = None,
        turns: np.ndarray | None = None,
    ) -> None:
        """Runs the checks common to all accesses: permission, guards, races, traffic."""
        context = self.context
        if buffer.role == "in" and (kind == "write" or (strong is not None and strong.writes)):
            told = f"store to {buffer.name}, which is an input"
            raise at.frame.fault(ReadOnlyWrite, at.instruction, 0, told)
        if buffer.shadow is not None:
            for guard in self.guards:
                guard(at, "touches")
            buffer.shadow.access(context.happens_before, kind, at, strong, turns)
        if context.traffic is not None:
            context.traffic.count_global(at)

    def _at(self, access: Access, buffer: DeviceBuffer, items: np.ndarray) -> Located:
        """Returns the access at one item per lane, or at one item for all lanes."""
        width, where = access.width, np.broadcast_to(items, access.frame.count)

        def place(position: int) -> str:
            return f"offset {int(where[position]) * width} of {buffer.name}"

        return Located(access.frame, access.instruction, where, width, buffer.base, place)

    def _locate(self, access: Access) -> tuple[DeviceBuffer, np.ndarray] | None:
        """Returns (buffer, item index per address), or None if several buffers are addressed."""
        addresses, offset, width = access.addresses, access.offset, access.width
        buffer = self.buffers.find(int(addresses[0]) + offset)
        if buffer is None:
            return None
        # an address below the base wraps to a huge offset
        offsets = addresses - np.uint64((buffer.base - offset) % 2**64)
        if int(offsets.max()) > buffer.nbytes - width:
            return None
        if width > 1:
            if int(np.bitwise_or.reduce(offsets)) & (width - 1):
                position = int(np.argmax((offsets & np.uint64(width - 1)) != 0))
                at = int(offsets[position])
                told = (
                    f"address {buffer.base + at:#x}, offset {at} of {buffer.name}, is no multiple "
                    f"of {width} bytes"
                )
                raise access.fault(Misaligned, position, told)
            offsets >>= np.uint64(width.bit_length() - 1)
        return buffer, offsets.view(np.int64)
