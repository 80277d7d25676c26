"""Logs the single accesses behind a shadow memory record that several lanes share.

It serves programs that order threads by other means than barriers. If the last of several readers
happens before an access, the other readers need not.
"""

from __future__ import annotations

import numpy as np

#: (granule, record, whether the access returned what it read)
Entries = tuple[np.ndarray, np.ndarray, np.ndarray]


class AccessLog:
    """Logged accesses by kind, in the order of execution; one entry per access and granule."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[Entries]] = {}

    def add(self, kind: str, granules: np.ndarray, records: np.ndarray, returns: bool) -> None:
        if granules.size:
            self._chunks.setdefault(kind, []).append(
                (granules, records, np.full(granules.size, returns))
            )

    def refine(self, ratio: int) -> None:
        """Splits each granule into `ratio` granules."""
        for kind in self._chunks:
            granules, records, returns = self._all(kind)
            parts = (granules[:, None] * ratio + np.arange(ratio)).ravel()
            self._chunks[kind] = [(parts, np.repeat(records, ratio), np.repeat(returns, ratio))]

    def forget(self, granules: np.ndarray) -> None:
        """Drops the entries of granules that a write overwrites, after all their accesses so far.

        Later accesses need to be compared with that write only.
        """
        for kind in self._chunks:
            known, records, returns = self._all(kind)
            kept = ~np.isin(known, granules)
            self._chunks[kind] = [(known[kept], records[kept], returns[kept])]

    def find(self, kind: str, granules: np.ndarray) -> Entries:
        """Returns the granules' accesses, oldest first; each names its position in `granules`."""
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
    """Returns the widest scope of each granule's concurrent accesses, shape (count,).

    Args:
      asked, returns: as returned by `AccessLog.find`.
      apart: scope of each access.

    An atomic update happens after the accesses whose result it reads, so accesses ordered after the
    update are ordered after these too.
    """
    turn = np.arange(asked.size)
    chained = np.full(count, -1)
    ordered = returns & (apart == 0)
    np.maximum.at(chained, asked[ordered], turn[ordered])
    most = np.zeros(count, apart.dtype)
    np.maximum.at(most, asked, np.where(turn < chained[asked], 0, apart))
    return most
