"""Paged KV cache and recurrent state of a batch."""

from .paged import PagedCache

__all__ = ["PagedCache"]
