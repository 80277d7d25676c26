"""Global, shared and local memory, each access checked."""

from __future__ import annotations

import numpy as np

from .errors import MisalignedFault, OutOfBoundsFault, PendingCopyFault, UnwrittenFault

BASE = 0x7F12_0000_0000
_PAGE, _GAP = 256, 1024
UNWRITTEN, WRITTEN, PENDING = range(3)  # states of a byte of shared memory
FILL = 0xA5  # bytes of results, and of shared memory, before anything is written
LOCAL_BYTES = 4096  # per thread; the stack grows down from its end


def _check_alignment(addresses: np.ndarray, size: int) -> None:
    if (bad := addresses % size != 0).any():
        raise MisalignedFault(f"address {int(addresses[bad][0]):#x} for {size} bytes")


def words(data: np.ndarray, size: int) -> np.ndarray:
    """Views bytes as elements of an access: (n,) up to four bytes, else (n, size / 4) words."""
    if size <= 4:
        return data.view(f"u{size}")
    return data.view(np.uint32).reshape(-1, size // 4)


class GlobalMemory:
    """Buffers in one array, apart from each other.

    Every page of 256 bytes knows how many of its bytes belong to a buffer.
    """

    def __init__(self, sizes: list[int]) -> None:
        starts, end = list[int](), 0
        for size in sizes:
            starts.append(end)
            end += -(-max(size, 1) // _PAGE) * _PAGE + _GAP
        self.starts, self.data = starts, np.full(end, FILL, np.uint8)
        self._valid = np.zeros(end // _PAGE, np.int64)
        for start, size in zip(starts, sizes, strict=True):
            whole, rest = divmod(size, _PAGE)
            self._valid[start // _PAGE :][:whole] = _PAGE
            self._valid[start // _PAGE + whole] = rest or self._valid[start // _PAGE + whole]

    def address(self, buffer: int) -> int:
        return BASE + self.starts[buffer]

    def bytes_of(self, buffer: int, size: int) -> np.ndarray:
        """Returns a buffer's bytes, a view."""
        return self.data[self.starts[buffer] :][:size]

    def place(self, addresses: np.ndarray, size: int, used: int | np.ndarray = 0) -> np.ndarray:
        """Returns offsets in the array; of each access only the first `used` bytes, or all, count.

        Raises:
          MisalignedFault, OutOfBoundsFault.
        """
        _check_alignment(addresses, size)
        offsets = addresses - BASE
        if len(offsets) and (offsets.min() < 0 or offsets.max() >= len(self.data)):
            bad = (offsets < 0) | (offsets >= len(self.data))
            raise OutOfBoundsFault(f"global address {int(addresses[bad][0]):#x} is in no buffer")
        ends = (offsets & (_PAGE - 1)) + (used if isinstance(used, np.ndarray) else used or size)
        bad = ends > self._valid[offsets >> 8]
        if bad.any():
            raise OutOfBoundsFault(f"global address {int(addresses[bad][0]):#x} is in no buffer")
        return offsets

    def load(self, offsets: np.ndarray, size: int) -> np.ndarray:
        return words(self.data, size)[offsets // size]

    def store(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
        words(self.data, size)[offsets // size] = values


class SharedMemory:
    """Shared memory of each block, with the state of each byte.

    Args:
      reserved: bytes at the beginning that belong to the system.
      members: (clusters, blocks of a cluster) -> number of the block.
    """

    def __init__(self, blocks: int, reserved: int, size: int, cluster_size: int) -> None:
        self._reserved, self._end = reserved, reserved + size
        self._stride = -(-self._end // 16) * 16
        self.data = np.zeros(blocks * self._stride, np.uint8)
        self._states = np.zeros(blocks * self._stride, np.uint8)
        self.clusters = np.zeros(blocks, np.int64)
        self.members = np.zeros((max(1, blocks // cluster_size), cluster_size), np.int64)

    def reset(self) -> None:
        self.data[...] = FILL
        self._states[...] = UNWRITTEN

    def place(self, addresses: np.ndarray, size: int, blocks: np.ndarray) -> np.ndarray:
        """Returns offsets in the array of addresses that threads of these blocks use.

        Bits 24 and up of an address are the rank of a block in the cluster.

        Raises:
          MisalignedFault, OutOfBoundsFault.
        """
        _check_alignment(addresses, size)
        rank, offsets = addresses >> 24, addresses & 0xFFFFFF
        bad = (offsets < self._reserved) | (offsets + size > self._end)
        bad |= (rank < 0) | (rank >= self.members.shape[1])
        if bad.any():
            raise OutOfBoundsFault(
                f"shared address {int(addresses[bad][0]):#x} for {size} bytes is not in "
                f"{self._reserved:#x} to {self._end:#x}"
            )
        if self.members.shape[1] > 1:
            blocks = self.members[self.clusters[blocks], rank]
        return blocks * self._stride + offsets

    def load(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Loads.

        Raises:
          UnwrittenFault, PendingCopyFault.
        """
        at = offsets // size
        states = words(self._states, size)[at]
        if (states != _of_words(size)).any():
            of_bytes = np.ascontiguousarray(states).view(np.uint8)
            if (of_bytes == PENDING).any():
                raise PendingCopyFault("a load of what an asynchronous copy still writes")
            raise UnwrittenFault("a load of shared memory that nobody wrote")
        return words(self.data, size)[at]

    def store(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
        """Stores.

        Raises:
          PendingCopyFault.
        """
        at, states = offsets // size, words(self._states, size)
        if (np.ascontiguousarray(states[at]).view(np.uint8) == PENDING).any():
            raise PendingCopyFault("a store to what an asynchronous copy still writes")
        states[at] = _of_words(size)
        words(self.data, size)[at] = values

    def expect(self, offsets: np.ndarray, size: int) -> None:
        """Marks what a copy will write.

        Raises:
          PendingCopyFault: another copy is still to write there.
        """
        at, states = offsets // size, words(self._states, size)
        if (np.ascontiguousarray(states[at]).view(np.uint8) == PENDING).any():
            raise PendingCopyFault("a copy to what another copy still writes")
        states[at] = np.multiply(_of_words(size), PENDING, dtype=states.dtype)

    def write(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
        """Writes what a copy brings, before others may read it."""
        words(self.data, size)[offsets // size] = values

    def arrive(self, offsets: np.ndarray, size: int) -> None:
        """Marks what a copy has written."""
        words(self._states, size)[offsets // size] = _of_words(size)


def _of_words(size: int) -> int:
    """Returns the states of an element whose bytes are all written."""
    return int.from_bytes(bytes([WRITTEN]) * min(size, 4), "little")
