"""Records each lane's vector clock at its last fence, for the race detector."""

from __future__ import annotations

import numpy as np


class Fences:
    """Vector clock of each lane at its last fence, in the arrays of `HappensBefore`.

    Attributes:
      time: time of the fence, 0 if there was none, shape (lanes,).
      barred, synced, clustered, acquired: as in `HappensBefore`.
      met: versions of `HappensBefore.met`.
      version: index of each lane's version in `met`.
    """

    def __init__(self, lanes: int) -> None:
        self.time, self.barred, self.synced, self.clustered = np.zeros((4, lanes), np.uint64)
        self.acquired, self.version = np.zeros((2, lanes), np.int64)
        self.met: list[np.ndarray | None] = []

    def pass_by(
        self,
        lanes: np.ndarray,
        now: np.uint64,
        barred: np.ndarray,
        synced: np.ndarray,
        clustered: np.ndarray,
        acquired: np.ndarray | None,
        met: np.ndarray | None,
    ) -> None:
        self.time[lanes] = now
        self.barred[lanes], self.synced[lanes] = barred[lanes], synced[lanes]
        self.clustered[lanes] = clustered[lanes]
        self.acquired[lanes] = 0 if acquired is None else acquired[lanes]
        if not self.met or self.met[-1] is not met:
            self.met.append(met)
        self.version[lanes] = len(self.met) - 1
