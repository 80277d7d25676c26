"""Global memory: buffers far apart in a 64-bit address space, every access checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ..errors import (
    GlobalRace,
    Misaligned,
    NonCoherentRead,
    OutOfBounds,
    ReadOnlyWrite,
    UninitializedRead,
)
from ..frame import Frame
from ..races.conflicts import Kind, kind_of
from ..races.shadow import Access, Shadow
from ..races.vector_clock import Places, Strong
from ..text.program import Instruction

Role = Literal["in", "out", "inout"]

# Buffer i starts at (i + 1) * 2^40 - 256: 32-bit address arithmetic loses the buffer or a carry at
# once, and no alignment beyond the 256 bytes that allocators promise holds by luck.
_SPACING = 40
_LOW = -256 % (1 << 40)
ITEMS = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}  # moved as bits, never computed


def buffer_base(number: int) -> int:
    """Address of the buffer with this number."""
    return (number << _SPACING) + _LOW


def item_view(data: np.ndarray, width: int) -> np.ndarray:
    """Bytes as items of `width`; a tail that holds no whole item is left out."""
    return data[: data.size // width * width].view(ITEMS[width])


@dataclass
class DeviceBuffer:
    """An array that a kernel gets a pointer to. Stores go straight into `array`, nothing is copied.

    Attributes:
      array: C-contiguous, any dtype and shape, at a 16-byte aligned address.
      role: `in` must not be written, and is the only one that `ld.global.nc` may read.
      initialized: whether the bytes may be read before the kernel writes them.
    """

    name: str
    array: np.ndarray
    role: Role = "inout"
    initialized: bool = True

    base: int = field(default=0, init=False, repr=False)
    written: np.ndarray | None = field(
        default=None, init=False, repr=False
    )  # per byte: 0xff once written
    views: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    written_views: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    shadow: Shadow | None = field(
        default=None, init=False, repr=False
    )  # of buffers that may be written

    def __post_init__(self) -> None:
        if not isinstance(self.array, np.ndarray) or self.array.dtype.hasobject:
            raise TypeError(
                f"buffer {self.name} must be a NumPy array of numbers, not {self.array!r:.80}"
            )
        if not self.array.flags.c_contiguous or self.array.ctypes.data % 16:
            raise ValueError(
                f"buffer {self.name}: the array must be C-contiguous and 16-byte aligned"
            )
        if self.role != "in" and not self.array.flags.writeable:
            raise ValueError(f"buffer {self.name} has role {self.role} but its array is read-only")
        self.bytes = self.array.reshape(-1).view(np.uint8)
        self.nbytes = self.bytes.size
        self.views = {width: item_view(self.bytes, width) for width in ITEMS}
        if not self.initialized:
            self.written = np.zeros(self.nbytes, np.uint8)
            self.written_views = {width: item_view(self.written, width) for width in ITEMS}

    def watch(self, synchronizes: bool) -> None:
        """A launch begins: races are between its accesses only."""
        if self.role != "in":
            self.shadow = Shadow(
                self.nbytes,
                GlobalRace,
                between_blocks=True,
                must_be_written=False,
                synchronizes=synchronizes,
            )


class GlobalMemory:
    def __init__(self, buffers: list[DeviceBuffer], *, synchronizes: bool = False) -> None:
        """The same DeviceBuffer may come twice, under two parameters: both then hold one address.

        Args:
          synchronizes: see `Shadow`.
        """
        self.buffers: list[DeviceBuffer] = []
        self.places = Places()
        self.time = 0  # counts barriers, releases and batches
        self._batches: list[
            tuple[int, np.ndarray, int]
        ] = []  # time of the start, blocks, lanes per block
        for buffer in buffers:
            if not any(buffer is known for known in self.buffers):
                buffer.watch(synchronizes)
                buffer.base = buffer_base(len(self.buffers))
                self.buffers.append(buffer)

    def load(
        self,
        frame: Frame,
        instruction: Instruction,
        addresses: np.ndarray,
        offset: int,
        width: int,
        non_coherent: bool,
    ) -> np.ndarray:
        """One item of `width` bytes per address, shape (addresses,)."""
        located = self._locate(frame, instruction, addresses, offset, width)
        if located is None:
            result: np.ndarray = np.empty(addresses.size, ITEMS[width])
            for positions in self._split(frame, instruction, addresses, offset, width):
                result[positions] = self.load(
                    frame.subset(positions),
                    instruction,
                    addresses[positions],
                    offset,
                    width,
                    non_coherent,
                )
            return result
        buffer, index = located
        if non_coherent and buffer.role != "in":
            raise frame.fault(
                NonCoherentRead,
                instruction,
                0,
                f"non-coherent load from {buffer.name}, which the kernel may write",
            )
        self._touch("read", frame, instruction, buffer, index, width)
        self._check_written(frame, instruction, buffer, index, width)
        return buffer.views[width].take(index)

    def store(
        self,
        frame: Frame,
        instruction: Instruction,
        addresses: np.ndarray,
        offset: int,
        width: int,
        items: np.ndarray,
    ) -> None:
        """Stores items, shape (addresses,) or (1,); where lanes collide the highest lane wins."""
        located = self._locate(frame, instruction, addresses, offset, width)
        if located is None:
            for positions in self._split(frame, instruction, addresses, offset, width):
                part = items if items.size == 1 else items[positions]
                self.store(
                    frame.subset(positions), instruction, addresses[positions], offset, width, part
                )
            return
        buffer, index = located
        self._touch("write", frame, instruction, buffer, index, width)
        frame.batch.scatter(buffer.views[width], index, items)
        self._mark_written(buffer, index, width)
        if self.places.known:
            self.places.overwrite(buffer.base, index, width)

    def update(
        self,
        frame: Frame,
        instruction: Instruction,
        addresses: np.ndarray,
        offset: int,
        width: int,
        strong: Strong,
    ) -> np.ndarray:
        """Atomic updates, or strong loads or stores, at one address per lane; what each lane found,
        as items.
        """
        located = self._locate(frame, instruction, addresses, offset, width)
        if located is None:
            found: np.ndarray = np.empty(addresses.size, ITEMS[width])
            for positions in self._split(frame, instruction, addresses, offset, width):

                def part(
                    view: np.ndarray,
                    index: np.ndarray,
                    lanes: np.ndarray,
                    turns: np.ndarray,
                    of: np.ndarray = positions,
                ) -> np.ndarray:
                    return strong.change(view, index, of[lanes], turns)

                some, one = frame.subset(positions), replace(strong, change=part)
                found[positions] = self.update(
                    some, instruction, addresses[positions], offset, width, one
                )
            return found
        buffer, index = located
        turns = frame.batch.turns(frame.count)
        self._touch(kind_of(strong), frame, instruction, buffer, index, width, strong, turns)
        if strong.reads:
            self._check_written(frame, instruction, buffer, index, width)
        found = strong.change(buffer.views[width], index, np.arange(frame.count), turns)
        if strong.writes:
            self._mark_written(buffer, index, width)
        frame.batch.order.synchronize(frame, strong, self.places, buffer.base, index, width, turns)
        return found

    def begin(self, blocks: np.ndarray, padded: int) -> int:
        """The time at which a batch of these blocks starts, each of `padded` lanes."""
        self.time += 1
        self._batches.append((self.time, blocks, padded))
        return self.time

    def blocks_of(self, times: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Numbers of the blocks that these lanes of the batches that ran at these times belong to,
        shape (n,).
        """
        numbers = np.zeros(times.size, np.int64)
        ran = np.searchsorted([start for start, _, _ in self._batches], times, "right") - 1
        for batch in np.unique(ran):
            _, blocks, padded = self._batches[batch]
            numbers[ran == batch] = blocks[lanes[ran == batch] // padded]
        return numbers

    def _check_written(
        self,
        frame: Frame,
        instruction: Instruction,
        buffer: DeviceBuffer,
        index: np.ndarray,
        width: int,
    ) -> None:
        if buffer.written is None:
            return
        written = buffer.written_views[width].take(index).view(np.uint8).reshape(index.size, width)
        missing = (written != 0xFF).any(axis=1)
        if missing.any():
            first = int(np.argmax(missing))
            raise frame.fault(
                UninitializedRead,
                instruction,
                first,
                f"offset {int(index[first]) * width} of {buffer.name}: "
                f"read of {width} bytes that were never all written",
            )

    def _mark_written(self, buffer: DeviceBuffer, index: np.ndarray, width: int) -> None:
        if buffer.written is not None:
            buffer.written_views[width][index] = _ALL_ONES[width]

    def _touch(
        self,
        kind: Kind,
        frame: Frame,
        instruction: Instruction,
        buffer: DeviceBuffer,
        index: np.ndarray,
        width: int,
        strong: Strong | None = None,
        turns: np.ndarray | None = None,
    ) -> None:
        """What all accesses share, at one index per lane or at one for all: may it be, does it
        race, what moves.
        """
        if buffer.role == "in" and (kind == "write" or (strong is not None and strong.writes)):
            raise frame.fault(
                ReadOnlyWrite, instruction, 0, f"store to {buffer.name}, which is an input"
            )
        if buffer.shadow is not None:
            where = np.broadcast_to(index, frame.count)

            def describe(position: int) -> str:
                return f"offset {int(where[position]) * width} of {buffer.name}"

            access = Access(frame, instruction, where, width, describe)
            if frame.batch.bulk_stores is not None:
                frame.batch.bulk_stores.check_target(access, buffer.base)
            buffer.shadow.access(kind, access, strong, turns)
        if frame.batch.traffic is not None:
            frame.batch.traffic.count_global(frame, instruction, index, width)

    def _locate(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> tuple[DeviceBuffer, np.ndarray] | None:
        """(buffer, item index per address), or None if not all addresses lie in one buffer."""
        buffer = self._find(int(addresses[0]) + offset)
        if buffer is None:
            return None
        offsets = addresses - np.uint64(
            (buffer.base - offset) % 2**64
        )  # wraps to huge below the base
        if int(offsets.max()) > buffer.nbytes - width:
            return None
        if width > 1:
            if int(np.bitwise_or.reduce(offsets)) & (width - 1):
                position = int(np.argmax((offsets & np.uint64(width - 1)) != 0))
                at = int(offsets[position])
                raise frame.fault(
                    Misaligned,
                    instruction,
                    position,
                    f"address {buffer.base + at:#x}, offset {at} of {buffer.name}, is no multiple of {width} bytes",
                )
            offsets >>= np.uint64(width.bit_length() - 1)
        return buffer, offsets.view(np.int64)

    def _find(self, address: int) -> DeviceBuffer | None:
        number = (address - _LOW) >> _SPACING
        return self.buffers[number] if 0 <= number < len(self.buffers) else None

    def _split(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> list[np.ndarray]:
        """Positions of the addresses of each buffer; an error if some lie in none."""
        addresses = addresses + np.uint64(offset % 2**64)
        numbers = (addresses - np.uint64(_LOW)) >> np.uint64(_SPACING)
        parts = [np.flatnonzero(numbers == n) for n in np.unique(numbers)]
        for positions in parts:
            buffer = self._find(int(addresses[positions[0]]))
            if buffer is None:
                outside = np.ones(positions.size, np.bool_)
            else:
                outside = (addresses[positions] - np.uint64(buffer.base)).astype(
                    np.float64
                ) > buffer.nbytes - width
            if outside.any():
                position = int(positions[np.argmax(outside)])
                address = int(addresses[position])
                raise frame.fault(
                    OutOfBounds,
                    instruction,
                    position,
                    f"address {address:#x} ({width} bytes): {self._describe(address)}",
                )
        return parts

    def _describe(self, address: int) -> str:
        if not self.buffers:
            return "the kernel has no buffers"
        nearest = min(
            self.buffers, key=lambda b: min(abs(address - b.base), abs(address - b.base - b.nbytes))
        )
        offset = address - nearest.base
        if abs(offset) >= 1 << (_SPACING - 1):
            return "far from every buffer"
        return f"offset {offset} of {nearest.name}, which has {nearest.nbytes} bytes"


_ALL_ONES = {width: np.full(width, 0xFF, np.uint8).view(ITEMS[width])[0] for width in ITEMS}
