"""Rounds sizes up to buckets, so that a new length rarely compiles a new program."""

from __future__ import annotations

SMALLEST = 8


def bucket(size: int) -> int:
    """Returns the smallest of 8, 16, 32, 64, ... that is at least `size`."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def fine_bucket(size: int) -> int:
    """Returns `bucket(size)` up to 64, then the next of 80, 96, 112, 128, 160, ...

    Above 64 there are four buckets per doubling.
    """
    step = bucket(size) // 8
    return bucket(size) if size <= 64 else -(-size // step) * step
