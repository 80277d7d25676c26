"""The oldest GPU architecture that kernels built now must run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..devices import LEAST

__all__ = [
    "COMMON",
    "LEAST",
    "MAX_SHARED_BYTES",
    "block_shared_bytes",
    "built_for",
    "current_oldest",
]

#: Number of the architecture (80 for sm_80) whose instructions kernels use by default. Newer ones
#: are used where an argument of a kernel asks for them.
COMMON = 80

#: Largest shared memory of a block on any device: sm_90 and sm_100. sm_80 has 163 KB, sm_120 99.
MAX_SHARED_BYTES = 227 << 10
#: The same for devices older than COMMON.
OLDER_SHARED_BYTES = 64 << 10

_oldest: ContextVar[int] = ContextVar("oldest", default=COMMON)


@contextlib.contextmanager
def built_for(sm: int) -> Iterator[None]:
    """Context inside which kernels are built for architecture `sm` and newer ones.

    Args:
      sm: 75 for sm_75; from COMMON on, kernels are those of COMMON.
    """
    token = _oldest.set(min(sm, COMMON))
    try:
        yield
    finally:
        _oldest.reset(token)


def block_shared_bytes(oldest: int) -> int:
    """Returns the largest shared memory of a block of a kernel that architecture `oldest` runs."""
    return MAX_SHARED_BYTES if oldest >= COMMON else OLDER_SHARED_BYTES


def current_oldest() -> int:
    """Returns the oldest architecture that kernels are built for now."""
    return _oldest.get()
