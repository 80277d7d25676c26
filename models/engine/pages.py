"""Allocates KV pages and state snapshots on the host: reference counts and the prefix cache.

A page that is full of known tokens has a key: a hash of these tokens and of all tokens before them.
Sequences with equal beginnings share such pages. A page without references keeps its key and its
contents until the pool needs it, least recently used first. Nothing here touches the device.
"""

from __future__ import annotations

import collections
import hashlib
import secrets
from collections.abc import Iterable, Sequence

import numpy as np

from ..kv_cache.shapes import PAGE_SIZE

#: Makes keys unpredictable, so that nobody can construct two prompts with the same key.
_SECRET = secrets.token_bytes(16)


class OutOfPagesError(Exception):
    """A pool has fewer free pages than were asked for."""


def page_keys(tokens: Sequence[int], before: list[bytes], salt: bytes) -> list[bytes]:
    """Returns the keys of all full pages of `tokens`.

    A key identifies a page's tokens, all tokens before it, and `salt`, which separates whatever
    else the contents depend on. before: keys of the first pages, as an earlier call returned them.
    """
    keys = list(before)
    parent = keys[-1] if keys else hashlib.blake2b(salt, digest_size=16, key=_SECRET).digest()
    for first in range(len(keys) * PAGE_SIZE, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        page = np.array(tokens[first : first + PAGE_SIZE], np.int32).tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=16, key=_SECRET).digest()
        keys.append(parent)
    return keys


class PagePool:
    """Pages 0 to count - 1 of one kind of layers, or places for state snapshots.

    A page is in one of three states: referenced by sequences; cached, with a key but no reference;
    or empty. Cached and empty pages are free.

    Attributes:
      count: number of pages.
      evictions: cached pages that were overwritten so far.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.evictions = 0
        self._empty = list(range(count - 1, -1, -1))  # the last is allocated next
        self._references = [0] * count
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first

    @property
    def free(self) -> int:
        """Number of pages that `allocate` can return."""
        return len(self._empty) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of pages that only the prefix cache holds."""
        return len(self._cached)

    def grow(self, count: int) -> None:
        """Adds empty pages, up to `count` in total."""
        self._empty[:0] = range(count - 1, self.count - 1, -1)
        self._references += [0] * (count - self.count)
        self.count = count

    def allocate(self) -> int:
        """Returns a page with one reference: an empty one, else the least recently used cached one.

        Raises OutOfPagesError if no page is free.
        """
        if self._empty:
            page = self._empty.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self.evictions += 1
        else:
            raise OutOfPagesError(f"all {self.count} pages are in use")
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        """Adds a reference to a page that has a key; returns the page."""
        if not self._references[page]:
            del self._cached[page]
        self._references[page] += 1
        return page

    def release(self, page: int, *, evict_first: bool = False) -> None:
        """Removes a reference. Without further ones the page becomes cached or empty.

        evict_first: makes a cached page the next to be evicted instead of the last.
        """
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._key_of:
            self._cached[page] = None
            self._cached.move_to_end(page, last=not evict_first)
        else:
            self._empty.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Makes a referenced page findable, unless it has a key or another page has `key`."""
        if key not in self._page_of and page not in self._key_of:
            self._key_of[page], self._page_of[key] = key, page

    def find(self, key: bytes) -> int | None:
        """Returns the page with this key, or None."""
        return self._page_of.get(key)

    def is_referenced(self, page: int) -> bool:
        return self._references[page] > 0

    def forget(self) -> None:
        """Drops the keys of all pages; cached pages become empty."""
        self._empty += self._cached
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check(self, held: Iterable[int]) -> None:
        """Checks the books: every page is in one state, and references equal those in `held`.

        held: pages of all sequences, once per reference.

        Raises AssertionError with what is wrong.
        """
        counted = collections.Counter(held)
        for page, references in enumerate(self._references):
            assert references == counted[page], (
                f"page {page} has {references} references; sequences hold {counted[page]}"
            )
        used = {page for page, references in enumerate(self._references) if references}
        free = [*self._empty, *self._cached]
        assert len(set(free)) == len(free), "a page is free twice"
        assert used.isdisjoint(free), f"pages {used.intersection(free)} are used and free"
        assert len(used) + len(free) == self.count, "pages are lost"
        assert set(self._cached) <= set(self._key_of), "a cached page has no key"
        assert not set(self._empty) & set(self._key_of), "an empty page has a key"
        assert {p: k for k, p in self._page_of.items()} == self._key_of, "keys and pages disagree"
