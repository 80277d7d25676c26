"""Decode attention's parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedAttentionConfig:
    """Tiling of decode attention.

    Attributes:
      warps: per block; they share one sequence and group of query heads, and split its tokens.
      queries: query heads of a group that one block holds in registers; K and V are read once for
        all of them.
      unroll: tokens of each lane in a round; as many are in flight for the next one.
      resident_blocks: blocks that a multiprocessor's registers must have room for.
      splits: blocks that share a sequence's tokens (flash decoding, Dao et al. 2023). More than
        one leave partial results, which `merge_attention` puts together.
      cluster: these blocks are a cluster and put their results together themselves (sm_90, at most
        8 splits).
      load_bytes: width of a lane's loads of K and V, 16 or 8; with 8 a lane holds half as many
        values of each query.
      teams: of the block's warps, each with `queries` query heads of its own. Every team reads K
        and V; the first-level cache has them for all but the first.
      tensor_cores: a warp takes 16 tokens by mma for up to 16 query heads, as `tensor_cores` says;
        `unroll` and `load_bytes` have no meaning then, and there are no teams.
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
        """Query heads that all blocks of a group have; 1 where the last one has fewer."""
        heads = min(self.queries, group) * self.teams
        return 1 if group % heads else heads
