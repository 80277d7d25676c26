"""Addresses that a simulated kernel sees: the base of each memory and of each buffer."""

from __future__ import annotations

#: Base of shared and local addresses. It is not 0, so that a null address is an error.
SHARED_BASE = 0x400
LOCAL_BASE = 0x400

#: Generic addresses. Global: the buffer's own address. Shared, local: the window's start plus the
#: shared or local address.
WINDOW_BIT = 60
SHARED_WINDOW = 1 << WINDOW_BIT
LOCAL_WINDOW = 2 << WINDOW_BIT

#: Shared addresses within a cluster: a block's own address, or (rank + 1) << CLUSTER_BIT added to
#: it.
CLUSTER_BIT = 24

# Buffer i starts at (i + 1) * 2^40 - 256. 32-bit address arithmetic then leaves the buffer or drops
# a carry at once, and no alignment beyond the 256 bytes that allocators promise holds by luck.
BUFFER_BIT = 40
FIRST_BUFFER = -256 % (1 << BUFFER_BIT)


def buffer_base(number: int) -> int:
    """Returns the base address of buffer `number`."""
    return (number << BUFFER_BIT) + FIRST_BUFFER
