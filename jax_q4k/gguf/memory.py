"""Allocates memory for tensors that are read from files."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import numpy as np

#: Bytes from which arrays are memory-mapped, and from which they use huge pages, as NumPy's do.
MAPPED, HUGE = 1 << 16, 1 << 22
BUFFER_ALIGNMENT = 64  # bytes; JAX adopts a CPU buffer with this alignment without a copy


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an uninitialized byte array, aligned to BUFFER_ALIGNMENT.

    A large array has an anonymous memory map of its own, which returns to the system when freed.
    glibc's arenas, one per thread, would keep it: several times a model's size after some loads.
    """
    nbytes = math.prod(shape)
    if nbytes >= MAPPED:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the system may lack huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses
        return np.frombuffer(mapped, np.uint8).reshape(shape)
    buffer = np.empty(nbytes + BUFFER_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % BUFFER_ALIGNMENT
    return buffer[start : start + nbytes].reshape(shape)


class Scratch(threading.local):
    """Memory of each thread for `TensorReader.allocate`, which its next tensor reuses.

    First accesses of new pages take longer than reading a file from the system's cache.
    """

    def __init__(self) -> None:
        self._memory, self._used = aligned((0,)), 0

    def reuse(self) -> None:
        """Makes all memory available again; arrays that were allocated must not be used anymore."""
        if self._used > self._memory.size:
            self._memory = aligned((self._used,))
        self._used = 0

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns an uninitialized byte array, see `aligned`."""
        start, nbytes = self._used, math.prod(shape)
        self._used += -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        if self._used > self._memory.size:
            return aligned(shape)
        return self._memory[start : start + nbytes].reshape(shape)
