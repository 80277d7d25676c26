"""Selection rules: choose the Configs of the attention kernels."""

from __future__ import annotations

from dataclasses import replace

from ...devices import Target
from ...limits import PIECE_KEY_PARTS, PIECE_PARTS, causal_attention_takes
from ...ptx import MAX_CLUSTER, WARP, bf16
from ..family import Rule
from ..gemm.fragments import TILE_ROWS
from ..pages import PAGE_TYPES
from .causal_attention import CausalAttentionConfig
from .cluster_rule import clustered, divided
from .config import PagedAttentionConfig
from .merge_attention import MergeConfig
from .step_rows import COLUMNS, STEP
from .tensor_cores import MOST_QUERIES, tensor_cores_take

_VALUES = 148  # values of queries, and weighted ones, that fit in a lane's registers
_WARPS = 8  # per multiprocessor, with 255 registers per lane
_LEAST_SPLIT = 256  # tokens of a context that is split


def _per_lane(
    head_dim: int, value_dim: int | None, size: int, load_bytes: int
) -> tuple[int, int, int]:
    """Returns (tokens of a warp at once, a lane's registers per query, and per stored token)."""
    if value_dim is not None:
        per_query = (head_dim + value_dim) // WARP + 1
        return 1, per_query, -(-head_dim * size // (4 * WARP))
    loads = -(-head_dim * size // load_bytes)
    runs = -(-loads // WARP)  # loads of a vector per lane
    streams = WARP // min(WARP, 1 << (loads - 1).bit_length())
    per_query = 2 * runs * load_bytes // size + 1  # values of the query, and weighted ones
    return streams, per_query, 2 * runs * load_bytes // 4


def round_tokens(
    config: PagedAttentionConfig, head_dim: int, value_dim: int | None, dtype: str
) -> int:
    """Returns the tokens that a thread block's lanes process in a round."""
    streams, *_ = _per_lane(head_dim, value_dim, PAGE_TYPES[dtype].size, config.load_bytes)
    return streams * (config.warps // config.teams) * config.unroll


def _paged_attention(
    device: Target,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: str,
    value_dim: int | None = None,
    page_size: int = STEP,
) -> PagedAttentionConfig:
    """Returns the decode attention Config for contexts (or windows) of up to `capacity` tokens.

    `value_dim`: of latent pages. A group is num_heads / num_kv_heads query heads. Groups of two or
    more, or of three or more over byte types, use tensor cores if these support the pages: they
    take less than half of the instructions per token, for any group. Smaller groups gain nothing:
    lanes are as fast as the memory. Turing's tensor cores do not multiply bf16.

    Otherwise lanes share a token. A full group shares a thread block, up to eight query heads. A
    lane's load is 16 bytes. For int8 and fp8 that is 16 values of each query, so it is 8 bytes for
    more than four queries. Warps wait for memory, so a thread block has as many as its lanes'
    registers allow: two thread blocks of eight warps leave each lane 128 registers, of six 168, of
    four 255. Each lane has four tokens in flight, or two if a split has fewer tokens. A context is
    split to fill two thread blocks per multiprocessor, not more, into parts of at least 64 tokens.
    Below 256 tokens (`_LEAST_SPLIT`) a second launch costs more.

    For heads wider than 256, and for latent pages, a lane has registers for fewer query heads (four
    of 512 dimensions), and for two tokens or one in flight. A thread block's warps are then teams
    with their own query heads: up to four teams with two thread blocks per multiprocessor, up to
    eight with one. Such a thread block takes few tokens at a time, so its split may be shorter: 32
    tokens for wide heads, 16 for latent pages.

    Splits form a cluster if that is not slower: see `clustered`. Where few contexts leave
    multiprocessors idle, more thread blocks have fewer query heads each: see `divided`.
    """
    size, group = PAGE_TYPES[dtype].size, num_heads // num_kv_heads
    taken = tensor_cores_take(dtype, head_dim, page_size, value_dim is not None)
    if group > (2 if size == 1 else 1) and taken and not (device.turing and dtype == "bf16"):
        contexts = batch * num_kv_heads
        return _by_tensor_cores(device, contexts, group, head_dim, size, capacity)
    queries, teams, latent = min(group, 8), 1, value_dim is not None
    load_bytes = 8 if size == 1 and queries > 4 and not latent else 16
    streams, per_query, per_token = _per_lane(head_dim, value_dim, size, load_bytes)
    per_token += 4 if dtype == "int8" else 0  # scales and predicates
    wide = head_dim > 256 or latent
    if wide and group > (most := min(8, 1 << (_VALUES // per_query).bit_length() - 1)):
        teams = -(-min(group, _WARPS * most) // most)
        queries = -(-group // (teams * -(-group // (teams * most))))
    contexts = batch * num_kv_heads
    blocks = contexts * -(-group // (teams * queries))
    resident = 1 if teams > _WARPS // 2 else 2
    splits = 1
    if capacity >= _LEAST_SPLIT:
        least = 16 if latent else 32 if wide else 64  # tokens
        splits = max(1, min(resident * device.multiprocessors // blocks, capacity // least))

    def registers(queries: int, unroll: int) -> int:
        # in addition to some for addresses and sums; latent values stay floats from scores to sums
        return queries * per_query + unroll * per_token + latent * head_dim // WARP

    for unroll in (2, 1) if wide else (4, 2):
        needed = registers(queries, unroll)
        warps = 8 if needed <= 80 else 6 if needed <= 114 else 4
        if teams > 1:
            warps = max(1, 4 // teams) * teams
        if needed <= 190 and streams * warps // teams * unroll <= capacity // splits:
            break
    nbytes = contexts * capacity * (head_dim if latent else 2 * head_dim) * size
    config = clustered(
        device,
        PagedAttentionConfig(warps, queries, unroll, resident, splits, load_bytes, teams),
        blocks=blocks,
        capacity=capacity,
        step=streams * (warps // teams) * unroll,
        nbytes=nbytes,
    )
    if capacity < _LEAST_SPLIT:
        return config
    few = [
        PagedAttentionConfig(_WARPS, count, unroll, 1, MAX_CLUSTER, load_bytes, cluster=True)
        for count in (2, 4)
        if count < queries * teams
        for unroll in ((2, 1) if wide else (4, 2))
        if registers(count, unroll) <= 190
    ]
    return divided(
        device,
        config,
        few,
        contexts=contexts,
        group=group,
        capacity=capacity,
        streams=streams,
        nbytes=nbytes,
    )


def _by_tensor_cores(
    device: Target, contexts: int, group: int, head_dim: int, size: int, capacity: int
) -> PagedAttentionConfig:
    """Returns the decode attention Config for tensor cores.

    `contexts`: sequences times KV heads; `size`: bytes per element. A group above 16 query heads is
    divided equally over several thread blocks. Two thread blocks per multiprocessor have as many
    warps as their registers allow: sums, queries, and a step of keys and values in flight. A
    context is split as for lanes.
    """
    blocks = -(-group // MOST_QUERIES)
    queries = -(-group // blocks)
    splits = 1
    if capacity >= _LEAST_SPLIT:
        resident = 2 * device.multiprocessors // (contexts * blocks)
        splits = max(1, min(resident, capacity // (4 * STEP)))
    parts = 1 if queries <= COLUMNS else 2  # low parts have their own registers
    # sums, high and low parts of queries, keys and values; in addition to some for addresses and
    # scores
    registers = head_dim // 2 + head_dim // 4 * parts + head_dim * size // 4
    warps = 8 if registers <= 60 else 6 if registers <= 100 else 4
    warps = min(warps, max(1, -(-capacity // (splits * STEP))))
    config = PagedAttentionConfig(warps, queries, unroll=1, splits=splits, tensor_cores=True)
    return clustered(
        device,
        config,
        blocks=contexts * blocks,
        capacity=capacity,
        step=STEP * warps,
        nbytes=contexts * capacity * 2 * head_dim * size,
    )


def _merge_attention(head_dim: int, splits: int) -> MergeConfig:
    """Returns the merge kernel's Config for this many splits, in up to eight warps.

    All splits are in flight at once, up to eight per lane.
    """
    # splits that a warp's lanes hold, four values each
    per_warp = WARP * 4 // (1 << (head_dim - 1).bit_length()) or 1
    warps = min(8, -(-splits // per_warp))
    return MergeConfig(warps=warps, unroll=min(8, -(-splits // (warps * per_warp))))


#: Accumulators of values and scores that fit in a lane's registers in addition to the parts'
#: operands.
_SUMS = {1: 136, 2: 136, 3: 104}


def _causal_attention(
    device: Target,
    groups: int,
    rows: int,
    head_dim: int,
    value_dim: int,
    parts: int,
    key_parts: int,
    dtype: str | None = None,
    capacity: int = 0,
) -> CausalAttentionConfig:
    """Returns the prompt attention Config: `groups` KV heads in all prompts, `rows` queries each.

    `dtype`: of the pages that prompt chunks attend to, up to `capacity` tokens; None means full
    prompts without pages.

    Thread blocks of many rows read keys and values less often, but there must be two per
    multiprocessor. A step has as many tokens as a lane's accumulators and the thread block's shared
    memory allow. Two thread blocks of up to four warps must fit on a multiprocessor, so that their
    waits overlap. If the shared memory of a device is unknown, it is assumed to be 99 KB, which
    every device has.
    """
    most = device.block_shared_bytes

    def fits(config: CausalAttentionConfig, room: int) -> bool:
        sums = (value_dim + config.tokens) // 2
        if sums > _SUMS[max(parts, key_parts)]:
            return False
        return config.shared_bytes(head_dim, value_dim, parts, key_parts, dtype) <= room

    def blocks(warps: int) -> int:
        return groups * -(-rows // (TILE_ROWS * warps))

    many = [warps for warps in (8, 4) if blocks(warps) >= 2 * device.multiprocessors]
    most_warps = many[0] if many else min(4, 1 << (-(-rows // TILE_ROWS) - 1).bit_length())
    choices = [
        (CausalAttentionConfig(warps, tokens, resident_blocks=1 if warps > 4 else 2), room)
        for warps in (8, 4, 2, 1)
        if warps <= most_warps
        for room in ((most,) if warps > 4 else (most // 2, most))
        for tokens in (64, 32, 16)
    ]
    chosen = next(config for config, room in choices if fits(config, room))
    if dtype is None:
        return chosen
    resident = chosen.resident_blocks * device.multiprocessors // blocks(chosen.warps)
    splits = max(1, min(resident, capacity // (4 * chosen.tokens)))
    return replace(chosen, splits=splits)


_MOST_READ_AGAIN, _MOST_MADE = 64 << 20, 1 << 30  # bytes


def _prompt_attention(device: Target, head_dim: int, value_dim: int, parts: int) -> bool:
    """Returns whether a prompt's attention runs in `causal_attention`, else in plain JAX.

    The kernel multiplies `parts` bf16 per float, which Turing's tensor cores do not take.
    """
    return causal_attention_takes(head_dim, value_dim, parts) and not device.turing


def _piece_attention(
    device: Target,
    batch: int,
    time: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: str,
    value_dim: int | None = None,
    room: int = 0,
) -> bool:
    """Returns whether prompt chunks of `time` tokens use `causal_attention` over the pages.

    `capacity`: tokens that a sequence's pages, or a window, hold. `value_dim`: of latent pages. If
    false, `paged_attention` treats every token as a sequence and reads its context once per token.
    `paged_attention` is chosen for single tokens, latent pages, heads wider than `causal_attention`
    takes, and chunks for which it reads less than 64 MB: predicted for an H200, one launch whose
    splits form a cluster is then faster than two. Pages that are neither bf16 nor f16 are converted
    to bf16 if the result has at most 1 GB, for `room` tokens per sequence. On Turing, whose tensor
    cores do not multiply bf16, only f16 pages use `causal_attention`.
    """
    takes = causal_attention_takes(head_dim, head_dim, PIECE_PARTS)
    if time < 2 or value_dim is not None or not takes or (device.turing and dtype != "f16"):
        return False
    token = 2 * num_kv_heads * head_dim  # elements
    made = PIECE_KEY_PARTS.get(dtype, 0) * batch * room * token * bf16.size
    read = batch * time * capacity * token * PAGE_TYPES[dtype].size
    return read >= _MOST_READ_AGAIN and made <= _MOST_MADE


prompt_attention_rule: Rule[bool] = Rule("prompt_attention", _prompt_attention)
piece_attention_rule: Rule[bool] = Rule("piece_attention", _piece_attention)
causal_attention_rule: Rule[CausalAttentionConfig] = Rule("causal_attention", _causal_attention)
paged_attention_rule: Rule[PagedAttentionConfig] = Rule("paged_attention", _paged_attention)
merge_attention_rule: Rule[MergeConfig] = Rule("merge_attention", _merge_attention)
