"""What a batch keeps between steps: pages of keys and values, and recurrent state."""

from .paged import PagedCache

__all__ = ["PagedCache"]
