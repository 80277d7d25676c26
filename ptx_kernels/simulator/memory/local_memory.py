"""Local memory: each thread's own bytes, checked for bounds, alignment and unwritten bytes."""

from __future__ import annotations

import numpy as np

from ..access import Access
from ..address_space import LOCAL_BASE
from ..errors import Misaligned, OutOfBounds, UninitializedRead
from .items import ITEMS, item_view


class LocalMemory:
    def __init__(self, lanes: int, nbytes: int) -> None:
        """Allocates `nbytes` per thread."""
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        data = np.zeros(lanes * self.stride, np.uint8)
        written = np.zeros(lanes * self.stride, np.uint8)
        self.views = {width: item_view(data, width) for width in ITEMS}
        self.written = {width: written.reshape(-1, width) for width in ITEMS}

    def load(self, access: Access) -> np.ndarray:
        """Returns one item per lane, shape (lanes of the frame,)."""
        items, width = self._locate(access), access.width
        missing = ~self.written[width].take(items, axis=0).all(axis=1)
        if missing.any():
            position = int(np.argmax(missing))
            at = int(items[position]) * width % self.stride
            told = f"local offset {at}: read of {width} bytes never all written"
            raise access.fault(UninitializedRead, position, told)
        return self.views[width].take(items)

    def store(self, access: Access, values: np.ndarray) -> None:
        """Stores items, shape (lanes of the frame,) or (1,)."""
        items = self._locate(access)
        self.views[access.width][items] = values
        self.written[access.width][items] = 1

    def _locate(self, access: Access) -> np.ndarray:
        """Returns the item index per lane, shape (lanes of the frame,)."""
        frame, width = access.frame, access.width
        offsets = access.addresses.astype(np.int64) + (access.offset - LOCAL_BASE)
        offsets = np.broadcast_to(offsets, frame.count)
        outside = (offsets < 0) | (offsets > self.nbytes - width)
        if outside.any():
            position = int(np.argmax(outside))
            told = (
                f"local offset {int(offsets[position])} ({width} bytes): "
                f"the thread has {self.nbytes} bytes of local memory"
            )
            raise access.fault(OutOfBounds, position, told)
        odd = offsets % width != 0
        if odd.any():
            position = int(np.argmax(odd))
            told = f"local offset {int(offsets[position])} is no multiple of {width} bytes"
            raise access.fault(Misaligned, position, told)
        return (frame.all_lanes * self.stride + offsets) // width
