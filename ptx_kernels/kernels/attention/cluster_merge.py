"""Merges the partial attention results (split-K) of the thread blocks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from ...ptx import Builder, Value, all_of, f32
from ..vectors import load_floats, store_floats
from .context import QueryHeads
from .head_output import Result
from .online_softmax import BlockState, Merged, Piece


class ClusterState:
    """Softmax states (m, l, o) of a cluster's thread blocks, each in its own shared memory.

    First each thread block merges its warps; the merged o replaces that of its first warp. Then the
    warps of all thread blocks divide the dimensions of o into pieces, and each warp merges its
    pieces over the thread blocks.
    """

    def __init__(self, k: Builder, state: BlockState, splits: int, run: int) -> None:
        """Declares shared memory for the queries' m and l.

        `run`: dimensions per lane in a piece.
        """
        self._k, self._state, self._splits, self._run = k, state, splits, run
        self._marks = k.shared("split_marks", f32, (state.queries, 2))

    def leave(self) -> None:
        """Emits the merge of the thread block's warps. All threads must reach it."""
        for some in self._state.merged(self._run):
            for piece, merged in some:
                first = all_of(piece.known, piece.group == 0, piece.first == 0)
                self._marks.at(piece.query).store(0, (merged.m, merged.l), where=first)
                store_floats(self._state.share(piece), merged.o, where=piece.known)

    def merge(self, heads: QueryHeads, sequence: Value, result: Result, warps: int) -> None:
        """Emits the merge over the cluster's thread blocks and the stores of the results.

        `warps`: per thread block. All threads must reach it.
        """
        k, state = self._k, self._state
        worker, workers = k.warp_id * self._splits + k.cluster_rank, self._splits * warps
        shape = state.queries, state.groups
        pieces = list(Piece.of_warp(k, *shape, worker, workers, self._run))
        gates: list[Sequence[Value] | None] = [None] * len(pieces)
        if result.gate is not None:  # loaded before the barrier, which hides their latency
            gates = [result.gates(sequence, heads.of(piece), piece) for piece in pieces]
        k.cluster_barrier()
        values = [self._merged(piece) for piece in pieces]
        k.cluster_barrier()  # no block may exit while others read its share
        for piece, value, of_piece in zip(pieces, values, gates, strict=True):
            with heads.owned(piece) as head:
                result.store(sequence, head, piece, value, of_piece)

    def _merged(self, piece: Piece) -> list[Value]:
        """Returns o / l merged over the cluster, for the lane's dimensions of the piece."""
        k, ranks = self._k, range(self._splits)
        marks, address = self._marks.at(piece.query), self._state.share(piece)
        each = [k.peer(marks, rank).load(vector=2) for rank in ranks]
        shares = [load_floats(k.peer(address, rank), piece.run) for rank in ranks]
        return Merged.of(k, each, shares).normalized(k)
