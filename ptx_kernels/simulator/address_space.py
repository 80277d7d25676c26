"""Addresses that a simulated kernel sees: where each memory and each buffer lies."""

from __future__ import annotations

#: Where shared and local addresses start; not 0, so that a null address is an error.
SHARED_BASE = 0x400
LOCAL_BASE = 0x400

#: Generic addresses: the buffers' own, or a window's start plus the shared or local address.
WINDOW_BIT = 60
SHARED_WINDOW = 1 << WINDOW_BIT
LOCAL_WINDOW = 2 << WINDOW_BIT

#: Shared addresses of a cluster's blocks: a block's own, or (rank + 1) << CLUSTER_BIT beside it.
CLUSTER_BIT = 24

# Buffer i starts at (i + 1) * 2^40 - 256: 32-bit address arithmetic loses the buffer or a carry at
# once, and no alignment beyond the 256 bytes that allocators promise holds by luck.
BUFFER_BIT = 40
FIRST_BUFFER = -256 % (1 << BUFFER_BIT)


def buffer_base(number: int) -> int:
    """Address of the buffer with this number."""
    return (number << BUFFER_BIT) + FIRST_BUFFER
