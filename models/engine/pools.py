"""Assigns pages of all kinds of layers to sequences, and finds cached prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..kv_cache.shapes import PAGE_SIZE, window_pages
from .pages import PagePool, page_keys
from .sequence import NO_PAGE, Kind, Sequence

#: Decoding stores the recurrent state every so many tokens, for prompts that continue the answer.
ROLLING = 64

#: Prefill stores the recurrent state every so many tokens of a long prompt.
SNAPSHOT_INTERVAL = 1024


@dataclasses.dataclass(frozen=True)
class Hit:
    """Part of a prompt that the prefix cache holds.

    Attributes:
      length: tokens, a multiple of the page size, below the prompt's length.
      place: snapshot of the recurrent state after them; None without recurrent layers.
      lost: why a longer part could not be used although full attention has it: `window`,
        `no_snapshot`, or None.
      known: tokens whose pages full attention has; without it, the windowed layers.
    """

    length: int = 0
    place: int | None = None
    lost: str | None = None
    known: int = 0


class Pools:
    """Page pools of one group of devices.

    Attributes:
      kinds: kinds of layers that have pages: None for full attention, or a window.
      pages: the pool of each kind.
      snapshots: places for recurrent states; None without recurrent layers.
    """

    def __init__(
        self, counts: dict[Kind, int], snapshots: int | None = None, *, align: int = PAGE_SIZE
    ) -> None:
        """Creates empty pools.

        counts: number of pages of each kind. snapshots: number of places; None without recurrent
        layers. align: cached prefixes are used up to a multiple of this many tokens.
        """
        self.kinds = tuple(counts)
        self.pages = {kind: PagePool(count) for kind, count in counts.items()}
        self.snapshots = None if snapshots is None else PagePool(snapshots)
        self._align = align // PAGE_SIZE

    @property
    def keeps_states(self) -> bool:
        """Whether there are places for recurrent states."""
        return self.snapshots is not None and self.snapshots.count > 0

    def hit(self, sequence: Sequence) -> Hit:
        """Returns how much of the tokens that the sequence prefills the prefix cache holds.

        At least one token remains to be computed, because the next one depends on its logits.
        """
        sequence.keys = page_keys(sequence.tokens, sequence.keys, sequence.salt)
        keys = sequence.keys[: (sequence.prefill_end - 1) // PAGE_SIZE]
        candidates = list(range(1, len(keys) + 1))
        known = len(keys)
        lost = None
        for kind in sorted(self.kinds, key=lambda kind: kind is not None):  # full attention first
            pool = self.pages[kind]
            ends = _usable_lengths([pool.find(key) is not None for key in keys], kind)
            kept = [length for length in candidates if length in ends]
            if kind is None:
                known = len(ends)
                keys = keys[:known]
            elif None in self.pages and candidates and (not kept or kept[-1] < candidates[-1]):
                lost = "window"
            candidates = kept
        if None not in self.pages:
            known = candidates[-1] if candidates else 0
        place = None
        if self.snapshots is not None:
            places = [self.snapshots.find(keys[length - 1]) for length in candidates]
            kept = [n for n, found in zip(candidates, places, strict=True) if found is not None]
            if candidates and (not kept or kept[-1] < candidates[-1]):
                lost = "no_snapshot"
            candidates = kept
        candidates = [length for length in candidates if length % self._align == 0]
        length = candidates[-1] if candidates else 0
        if length and self.snapshots is not None:
            place = self.snapshots.find(keys[length - 1])
        return Hit(length * PAGE_SIZE, place, lost, known * PAGE_SIZE)

    def take(self, sequence: Sequence, hit: Hit) -> None:
        """Gives a sequence without pages the cached pages of `hit`."""
        count = sequence.registered = hit.length // PAGE_SIZE
        for kind, pool in self.pages.items():
            first = _first_page(kind, hit.length)
            shared = (pool.find(key) for key in sequence.keys[first:count])
            sequence.pages[kind] = [NO_PAGE] * first + [pool.share(page) for page in _found(shared)]
        if self.snapshots is not None and hit.place is not None:
            self.snapshots.release(self.snapshots.share(hit.place))  # now the last to be evicted

    def room_for(self, sequence: Sequence, hit: Hit, most: int) -> dict[Kind, int]:
        """Returns the free pages of each kind that prefilling the sequence takes.

        Counts cached pages of the hit, because using them takes them out of the free ones.

        most: maximum tokens of a step.
        """
        needed = {}
        count = hit.length // PAGE_SIZE
        for kind, pool in self.pages.items():
            first = _first_page(kind, hit.length)
            keys = sequence.keys[first:count]
            cached = sum(not pool.is_referenced(page) for page in _found(map(pool.find, keys)))
            total = _pages_of(kind, sequence.prefill_end, most)
            needed[kind] = max(total - len(keys), 0) + cached
        return needed

    def outstanding(self, sequence: Sequence, kind: Kind, most: int) -> int:
        """Returns how many more pages of a kind the sequence takes before its prompt is stored."""
        if not sequence.is_prefilling:
            return 0
        held = len(sequence.page_list(kind))
        return max(_pages_of(kind, sequence.prefill_end, most) - held, 0)

    def fits(self, length: int, most: int) -> bool:
        """Returns whether a sequence of `length` tokens fits if it is alone.

        most: maximum tokens of a step.
        """
        pools = self.pages.items()
        return all(_pages_of(kind, length, most) <= pool.count for kind, pool in pools)

    def missing(self, sequence: Sequence, kind: Kind, last: int) -> int:
        """Returns how many pages a step takes that stores the tokens up to `last - 1`."""
        return max(-(-last // PAGE_SIZE) - len(sequence.pages[kind]), 0)

    def extend(self, sequence: Sequence, first: int, last: int) -> bool:
        """Makes the sequence hold the pages that a step on tokens `first` to `last - 1` accesses.

        Releases pages that windowed layers no longer need. Returns False, and allocates nothing, if
        a pool has too few free pages.
        """
        end = -(-last // PAGE_SIZE)
        missing = {}
        for kind, pool in self.pages.items():
            pages = sequence.pages.setdefault(kind, [])
            needed = _first_page(kind, first)
            for at in range(min(needed, len(pages)) - 1, -1, -1):
                if pages[at] == NO_PAGE:
                    break
                pool.release(pages[at])
                pages[at] = NO_PAGE
            pages += [NO_PAGE] * (needed - len(pages))
            missing[kind] = end - len(pages)
        if any(missing[kind] > pool.free for kind, pool in self.pages.items()):
            return False
        for kind, pool in self.pages.items():
            sequence.pages[kind] += [pool.allocate() for _ in range(missing[kind])]
        return True

    def register(self, sequence: Sequence, length: int) -> None:
        """Makes the sequence's full pages among its first `length` tokens findable."""
        count = length // PAGE_SIZE
        if len(sequence.keys) < count:
            sequence.keys = page_keys(sequence.tokens, sequence.keys, sequence.salt)
        for kind, pool in self.pages.items():
            pages = sequence.pages[kind]
            for at in range(sequence.registered, count):
                if pages[at] != NO_PAGE:
                    pool.register(pages[at], sequence.keys[at])
        sequence.registered = max(sequence.registered, count)

    def release(self, sequence: Sequence) -> None:
        """Releases all pages and snapshots of the sequence, the last pages to be evicted first."""
        for kind, pool in self.pages.items():
            for page in reversed(sequence.page_list(kind)):
                pool.release(page)
        sequence.pages, sequence.registered = {}, 0
        if self.snapshots is not None:
            for _, place in sequence.unnamed:
                self.snapshots.release(place)
            if sequence.rolling is not None:
                self.snapshots.release(sequence.rolling)
        sequence.unnamed, sequence.rolling = [], None

    def snapshot(self, sequence: Sequence, length: int) -> int | None:
        """Returns a place for the state after the sequence's first `length` tokens, all known.

        None if one exists, or all places are in use.
        """
        pool, key = self.snapshots, sequence.keys[length // PAGE_SIZE - 1]
        if pool is None or not pool.free or pool.find(key) is not None:
            return None
        place = pool.allocate()
        pool.register(place, key)
        pool.release(place)
        return place

    def rolling_snapshot(self, sequence: Sequence, length: int) -> int | None:
        """Returns a place for the state after `length` tokens, the last of which are unknown yet.

        None if all places are in use.
        """
        if self.snapshots is None or not self.snapshots.free:
            return None
        place = self.snapshots.allocate()
        sequence.unnamed.append((length, place))
        return place

    def name_snapshots(self, sequence: Sequence, known: int) -> None:
        """Makes decoding's snapshots findable whose tokens, up to `known`, are known now."""
        pool = self.snapshots
        if pool is None:
            return
        while sequence.unnamed and sequence.unnamed[0][0] <= known:
            length, place = sequence.unnamed.pop(0)
            pool.register(place, sequence.keys[length // PAGE_SIZE - 1])
            if sequence.rolling is not None:
                pool.release(sequence.rolling, evict_first=True)
            sequence.rolling = place

    def forget(self) -> None:
        """Drops all cached prefixes."""
        for pool in (*self.pages.values(), self.snapshots):
            if pool is not None:
                pool.forget()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Checks that the pools' books and the sequences' pages agree; raises AssertionError."""
        sequences = list(sequences)
        for kind, pool in self.pages.items():
            pool.check(page for sequence in sequences for page in sequence.page_list(kind))
        if self.snapshots is not None:
            places = [place for sequence in sequences for _, place in sequence.unnamed]
            places += [s.rolling for s in sequences if s.rolling is not None]
            self.snapshots.check(places)


def _first_page(kind: Kind, position: int) -> int:
    """Returns the first logical page that a token at `position` reads."""
    return 0 if kind is None else max(position - kind + 1, 0) // PAGE_SIZE


def _pages_of(kind: Kind, length: int, most: int) -> int:
    """Returns the most pages that a sequence of `length` tokens holds at a time."""
    return min(-(-length // PAGE_SIZE), window_pages(kind, PAGE_SIZE, most))


def _usable_lengths(found: list[bool], kind: Kind) -> set[int]:
    """Returns the lengths, in pages, at which every page that later tokens read is there.

    found: whether each page is cached.
    """
    lengths, run = set(), 0
    for at, is_found in enumerate(found):
        run = run + 1 if is_found else 0
        if run == 0 and kind is None:
            break
        length = at + 1
        if run >= length - _first_page(kind, length * PAGE_SIZE):
            lengths.add(length)
    return lengths


def _found(pages: Iterable[int | None]) -> list[int]:
    """Returns the pages, none of which may be missing."""
    found = list(pages)
    assert None not in found, "a cached page has gone"
    return found  # type: ignore[return-value]
