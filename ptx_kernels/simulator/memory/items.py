"""Views memory as items: the bytes of one access, moved as bits without arithmetic."""

from __future__ import annotations

import numpy as np

ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def item_view(data: np.ndarray, width: int) -> np.ndarray:
    """Views bytes as items of `width`; drops a tail shorter than one item."""
    return data[: data.size // width * width].view(ITEMS[width])
