"""Global memory buffers of a launch, far apart in a 64-bit address space."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..access import Access
from ..address_space import BUFFER_BIT, FIRST_BUFFER, buffer_base
from ..errors import GlobalRace, OutOfBounds
from ..races.releases import Releases
from ..races.shadow import Shadow
from .items import ITEMS, item_view

Role = Literal["in", "out", "inout"]


@dataclass
class DeviceBuffer:
    """An array to which a kernel gets a pointer. Stores go directly into `array`.

    Attributes:
      array: C-contiguous, any dtype and shape, at a 16-byte aligned address.
      role: an `in` buffer must not be written; only such a buffer may be read by `ld.global.nc`.
      initialized: whether the bytes may be read before the kernel writes them.
    """

    name: str
    array: np.ndarray
    role: Role = "inout"
    initialized: bool = True

    base: int = field(default=0, init=False, repr=False)
    #: Per byte: 0xff once written. None if the bytes may be read from the start.
    written: np.ndarray | None = field(default=None, init=False, repr=False)
    views: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    written_views: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    #: Shadow memory of a buffer that may be written.
    shadow: Shadow | None = field(default=None, init=False, repr=False)

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
        """Starts race detection for a launch: earlier accesses are forgotten.

        `synchronizes`: see `Shadow`.
        """
        if self.role != "in":
            self.shadow = Shadow(
                self.nbytes,
                GlobalRace,
                between_blocks=True,
                must_be_written=False,
                synchronizes=synchronizes,
            )


class Buffers:
    """Buffers of one launch, found by address, and the vector clocks released in them."""

    def __init__(self, buffers: list[DeviceBuffer], *, synchronizes: bool) -> None:
        """Assigns an address to each buffer.

        Args:
          buffers: the same DeviceBuffer can occur twice, for two parameters; both then hold one
            address.
          synchronizes: see `Shadow`.
        """
        self.all: list[DeviceBuffer] = []
        self.releases = Releases()
        for buffer in buffers:
            if not any(buffer is known for known in self.all):
                buffer.watch(synchronizes)
                buffer.base = buffer_base(len(self.all))
                self.all.append(buffer)

    def find(self, address: int) -> DeviceBuffer | None:
        number = (address - FIRST_BUFFER) >> BUFFER_BIT
        return self.all[number] if 0 <= number < len(self.all) else None

    def split(self, access: Access) -> list[np.ndarray]:
        """Groups the positions of an access by buffer; raises if an address lies in no buffer."""
        addresses = access.addresses + np.uint64(access.offset % 2**64)
        numbers = (addresses - np.uint64(FIRST_BUFFER)) >> np.uint64(BUFFER_BIT)
        parts = [np.flatnonzero(numbers == n) for n in np.unique(numbers)]
        for positions in parts:
            buffer = self.find(int(addresses[positions[0]]))
            if buffer is None:
                outside = np.ones(positions.size, np.bool_)
            else:
                offsets = (addresses[positions] - np.uint64(buffer.base)).astype(np.float64)
                outside = offsets > buffer.nbytes - access.width
            if outside.any():
                position = int(positions[np.argmax(outside)])
                address = int(addresses[position])
                told = f"address {address:#x} ({access.width} bytes): {self._describe(address)}"
                raise access.fault(OutOfBounds, position, told)
        return parts

    def _describe(self, address: int) -> str:
        if not self.all:
            return "the kernel has no buffers"
        nearest = min(
            self.all, key=lambda b: min(abs(address - b.base), abs(address - b.base - b.nbytes))
        )
        offset = address - nearest.base
        if abs(offset) >= 1 << (BUFFER_BIT - 1):
            return "far from every buffer"
        return f"offset {offset} of {nearest.name}, which has {nearest.nbytes} bytes"
