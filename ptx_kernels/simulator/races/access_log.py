"""Single accesses behind the records that several lanes share, for programs in which threads are in
order otherwise
than by barriers: whether the last of several readers is in order says nothing about the others."""

from __future__ import annotations

import numpy as np

Entries = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # granule, record, whether the access returned what it found


class History:
    """By kind of access, in the order of execution; arrays have one entry per access and
    granule.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, list[Entries]] = {}

    def add(self, kind: str, granules: np.ndarray, records: np.ndarray, returns: bool) -> None:
        if granules.size:
            self._chunks.setdefault(kind, []).append(
                (granules, records, np.full(granules.size, returns))
            )

    def refine(self, ratio: int) -> None:
        """Granules have become smaller."""
        for kind in self._chunks:
            granules, records, returns = self._all(kind)
            parts = (granules[:, None] * ratio + np.arange(ratio)).ravel()
            self._chunks[kind] = [(parts, np.repeat(records, ratio), np.repeat(returns, ratio))]

    def forget(self, granules: np.ndarray) -> None:
        """Somebody writes these after all accesses so far; who comes later need only ask for that
        write.
        """
        for kind in self._chunks:
            known, records, returns = self._all(kind)
            kept = ~np.isin(known, granules)
            self._chunks[kind] = [(known[kept], records[kept], returns[kept])]

    def find(self, kind: str, granules: np.ndarray) -> Entries:
        """All accesses of each granule asked for, the oldest first; the granule as its position in
        `granules`.
        """
        known, records, returns = self._all(kind)
        order = np.argsort(known, kind="stable")
        first, last = (np.searchsorted(known[order], granules, side) for side in ("left", "right"))
        counts = last - first
        asked = np.repeat(np.arange(granules.size), counts)
        at = order[
            np.arange(asked.size)
            - np.repeat(np.cumsum(counts) - counts, counts)
            + np.repeat(first, counts)
        ]
        return asked, records[at], returns[at]

    def _all(self, kind: str) -> Entries:
        chunks = self._chunks.get(kind, [])
        if len(chunks) != 1:
            empty = np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.bool_)
            granules, records, returns = zip(empty, *chunks, strict=True)
            chunks = [(np.concatenate(granules), np.concatenate(records), np.concatenate(returns))]
            self._chunks[kind] = chunks
        return chunks[0]


def farthest(asked: np.ndarray, apart: np.ndarray, returns: np.ndarray, count: int) -> np.ndarray:
    """Of each of `count` granules, how far apart its accesses are at most, shape (count,); the
    others as `find` has it.

    What an atomic update found there happened before it, and so before whatever comes after it.
    """
    turn = np.arange(asked.size)
    chained = np.full(count, -1)
    in_order = returns & (apart == 0)
    np.maximum.at(chained, asked[in_order], turn[in_order])
    most = np.zeros(count, apart.dtype)
    np.maximum.at(most, asked, np.where(turn < chained[asked], 0, apart))
    return most
