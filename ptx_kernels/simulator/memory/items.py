"""Items: the bytes of one access, moved as bits and never computed with."""

from __future__ import annotations

import numpy as np

ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def item_view(data: np.ndarray, width: int) -> np.ndarray:
    """Bytes as items of `width`; a tail that holds no whole item is left out."""
    return data[: data.size // width * width].view(ITEMS[width])
