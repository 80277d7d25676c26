"""Tiling parameters of the decode attention kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedAttentionConfig:
    """Tiling of decode attention over thread blocks, warps and lanes.

    Attributes:
      warps: per thread block; they share one sequence and group of query heads, and divide its
        tokens.
      queries: query heads of a group that one thread block (or team) holds in registers; K and V
        are read once for all of them.
      unroll: tokens per lane in a round; as many are prefetched for the next round.
      resident_blocks: thread blocks per multiprocessor that the registers must suffice for.
      splits: thread blocks that share a sequence's tokens (flash decoding, Dao et al. 2023). With
        more than one, `merge_attention` merges their partial results.
      cluster: whether these thread blocks form a cluster that merges its results without a second
        launch (sm_90, at most 8 splits).
      load_bytes: width of a lane's loads of K and V, 16 or 8; with 8 a lane holds half as many
        values of each query.
      teams: teams of the thread block's warps, each with its own `queries` query heads. Every team
        reads K and V; the L1 cache serves all but the first.
      tensor_cores: whether a warp processes 16 tokens by mma for up to 16 query heads (see
        `tensor_cores`). `unroll` and `load_bytes` are then ignored, and there are no teams.
    """

    warps: int = 4
    queries: int = 8
    unroll: int = 2
    resident_blocks: int = 2
    splits: int = 1
    load_bytes: int = 16
    teams: int = 1
    tensor_cores: bool = False
    cluster: bool = False

    def whole_heads(self, group: int) -> int:
        """Returns the query heads of every thread block of a group; 1 if the last has fewer."""
        heads = min(self.queries, group) * self.teams
        return 1 if group % heads else heads
