"""The merge of a cluster: its blocks' shares of the same query heads become results."""

from __future__ import annotations

from ...ptx import Builder, Value, all_of, f32
from ..vectors import load_floats, store_floats
from .context import QueryHeads
from .head_output import Result
from .online_softmax import BlockState, Merged, Piece


class ClusterState:
    """The softmax of every block of a cluster, each in its own shared memory.

    A block's o takes the place of its first warp's, piece by piece. Then the warps of all blocks
    share the pieces: each is merged over the blocks.
    """

    def __init__(self, k: Builder, state: BlockState, splits: int, run: int) -> None:
        """`run`: dimensions of a lane in a piece."""
        self._k, self._state, self._splits, self._run = k, state, splits, run
        self._marks = k.shared("split_marks", f32, (state.queries, 2))

    def leave(self) -> None:
        """Merges the block's warps. All threads must come here."""
        for some in self._state.merged(self._run):
            for piece, merged in some:
                first = all_of(piece.known, piece.group == 0, piece.first == 0)
                self._marks.at(piece.query).store(0, (merged.m, merged.l), where=first)
                store_floats(self._state.share(piece), merged.o, where=piece.known)

    def merge(self, heads: QueryHeads, sequence: Value, result: Result, warps: int) -> None:
        """Writes the results; `warps`: of a block. All threads must come here."""
        k, state = self._k, self._state
        k.cluster_barrier()
        worker, workers = k.warp_id * self._splits + k.cluster_rank, self._splits * warps
        shape = state.queries, state.groups
        pieces = list(Piece.of_warp(k, *shape, worker, workers, self._run))
        values = [self._merged(piece) for piece in pieces]
        k.cluster_barrier()  # nobody leaves while others read its share
        for piece, value in zip(pieces, values, strict=True):
            with heads.owned(piece) as head:
                result.store(sequence, head, piece, value)

    def _merged(self, piece: Piece) -> list[Value]:
        """The lane's dimensions of the piece."""
        k, ranks = self._k, range(self._splits)
        marks, place = self._marks.at(piece.query), self._state.share(piece)
        each = [k.peer(marks, rank).load(vector=2) for rank in ranks]
        shares = [load_floats(k.peer(place, rank), piece.run) for rank in ranks]
        return Merged.of(k, each, shares).normalized(k)
