"""Rules of choice of decode attention."""

from __future__ import annotations

from ...devices import Target
from ...ptx import WARP
from ..family import Rule
from ..pages import PAGE_TYPES
from .merge_attention import MergeConfig
from .paged_attention import PagedAttentionConfig


def _paged_attention(
    device: Target,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: str,
) -> PagedAttentionConfig:
    """Config for contexts (or windows) of up to `capacity` tokens.

    A group is num_heads / num_kv_heads query heads. A whole group shares a block, up to eight query
    heads. A lane's load is 16 bytes; of int8 and fp8, where that is 16 values of each query, 8 for
    more than four. Warps wait for memory, so a block has as many as its lanes' registers allow: two
    blocks of eight leave each lane 128, of six 168, of four 255. Four tokens of each lane are in
    flight, two where a split has fewer tokens. A context is split to fill two blocks on each
    multiprocessor, no more, into parts of 64 tokens or more; below 256 tokens a second launch costs
    more.
    """
    size, group = PAGE_TYPES[dtype].size, num_heads // num_kv_heads
    queries = min(group, 8)
    load_bytes = 8 if size == 1 and queries > 4 else 16
    loads = -(-head_dim * size // load_bytes)
    runs = -(-loads // WARP)  # loads of a vector by a lane
    streams = WARP // min(WARP, 1 << (loads - 1).bit_length())  # tokens that a warp holds at once
    per_query = 2 * runs * load_bytes // size + 1  # values of the query, and weighted ones
    # as they are stored; scales and where
    per_token = 2 * runs * load_bytes // 4 + (4 if dtype == "int8" else 0)
    blocks = batch * num_kv_heads * -(-group // queries)
    splits = 1
    if capacity >= 256:
        splits = max(1, min(2 * device.multiprocessors // blocks, capacity // 64))
    for unroll in (4, 2):
        registers = queries * per_query + unroll * per_token  # beside some for addresses and sums
        warps = 8 if registers <= 80 else 6 if registers <= 114 else 4
        if registers <= 190 and streams * warps * unroll <= capacity // splits:
            break
    return PagedAttentionConfig(warps, queries, unroll, splits=splits, load_bytes=load_bytes)


def _merge_attention(head_dim: int, splits: int) -> MergeConfig:
    """Config for the merge of so many splits, in up to eight warps.

    All are in flight at once, up to eight of each lane's.
    """
    # splits that a warp's lanes hold, four values each
    per_warp = WARP * 4 // (1 << (head_dim - 1).bit_length()) or 1
    warps = min(8, -(-splits // per_warp))
    return MergeConfig(warps=warps, unroll=min(8, -(-splits // (warps * per_warp))))


paged_attention_rule: Rule[PagedAttentionConfig] = Rule("paged_attention", _paged_attention)
merge_attention_rule: Rule[MergeConfig] = Rule("merge_attention", _merge_attention)
