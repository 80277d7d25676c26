"""The merge of a cluster: its blocks' shares of the same query heads become results."""

from __future__ import annotations

from ...ptx import Builder, Value, all_of, f32
from .context import QueryHeads
from .head_output import Result
from .online_softmax import BlockState, Merged, Piece


class ClusterState:
    """The softmax of every block of a cluster, each in its own shared memory.

    A block's o takes the place of its first warp's, piece by piece. Then the warps of all blocks
    share the pieces: each is merged over the blocks.
    """

    def __init__(self, k: Builder, state: BlockState, splits: int) -> None:
        self._k, self._state, self._splits = k, state, splits
        self._marks = k.shared("split_marks", f32, (state.queries, 2))

    def leave(self) -> None:
        """Merges the block's warps. All threads must come here."""
        k = self._k
        for some in self._state.merged():
            for piece, merged in some:
                first = all_of(piece.known, piece.group == 0, k.lane_id == 0)
                self._marks.at(piece.query).store(0, (merged.m, merged.l), where=first)
                self._state.share(piece).store(0, merged.o, where=piece.known)

    def merge(self, heads: QueryHeads, sequence: Value, result: Result, warps: int) -> None:
        """Writes the results; `warps`: of a block. All threads must come here."""
        k, state = self._k, self._state
        k.cluster_barrier()
        worker, workers = k.warp_id * self._splits + k.cluster_rank, self._splits * warps
        pieces = list(Piece.of_warp(k, state.queries, state.groups, worker, workers))
        values = [self._merged(piece) for piece in pieces]
        k.cluster_barrier()  # nobody leaves while others read its share
        for piece, value in zip(pieces, values, strict=True):
            with heads.owned(piece) as head:
                result.store(sequence, head, piece.group, value)

    def _merged(self, piece: Piece) -> Value:
        """The lane's dimension of the piece."""
        k, ranks = self._k, range(self._splits)
        marks, place = self._marks.at(piece.query), self._state.share(piece)
        each = [k.peer(marks, rank).load(vector=2) for rank in ranks]
        return Merged.of(k, each, [k.peer(place, rank).load() for rank in ranks]).normalized(k)
