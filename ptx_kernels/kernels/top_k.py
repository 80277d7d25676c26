"""Top-k kernel: the largest values of each row in order, for sampling."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx import WARP, Builder, KernelError, Pointer, kernel, u32, u64
from .argmax import SEARCH_OPERANDS, Search, equal_parts, order_key, search_examples
from .family import Family, Rule

MAX_PART = 4096  # values that a block sorts: 8 bytes of shared memory each
#: Largest `count` of several parts: a launch then leaves at most half of a row as candidates.
MOST_OF_PARTS = MAX_PART // 2


@dataclass(frozen=True)
class TopKConfig:
    warps: int = 16  # per block


@kernel
def top_k(
    k: Builder,
    *,
    rows: int,
    columns: int,
    count: int,
    splits: int = 1,
    from_candidates: bool = False,
    config: TopKConfig = TopKConfig(),
) -> None:
    """Kernel: the `count` largest of each of `splits` parts of x[r], descending; NaN is largest.

    Ties are in order of index. A thread block sorts its part in shared memory by a bitonic network
    (Batcher 1968) over u64 keys: the value's order above the complement of its position. Results
    (rows, splits * count): f32 values and s32 indices. The last part may have fewer values than
    `count`; it is then padded with -inf at index `columns`, which the next launch sorts last. A
    vocabulary takes two launches or more, each further one `from_candidates` over the results of
    the one before, whose `indices` (rows, columns) are the original positions.
    """
    threads = WARP * config.warps
    search = Search(k, rows, columns, splits, count, from_candidates, threads)
    if search.part > MAX_PART or not 1 <= count <= search.part:
        raise KernelError(
            f"count={count} must be 1 to {search.part}, the values of a part,"
            f" and these at most {MAX_PART}"
        )
    size = 1 << max(search.part - 1, 1).bit_length()
    keys = k.shared("keys", u64, (size,))
    with k.loop(k.thread_id, size, threads) as i:
        position = search.first + i
        inside = position < search.stop
        key = order_key(k, search.load(position, inside)).to(u64) << 32 | (~position).to(u64)
        keys.at(i).store(0, k.select(inside, key, 0))  # below every value's key
    k.barrier()
    _sort(k, keys, threads)
    with k.loop(k.thread_id, count, threads) as i:
        key = keys.at(i).load()
        search.store(i, ~key.to(u32), key > 0)


def _sort(k: Builder, keys: Pointer, threads: int) -> None:
    """Emits a descending sort of `keys`, a power of two of u64 in shared memory.

    All threads of the thread block must reach it.
    """
    (size,) = keys.shape
    levels = (size - 1).bit_length()
    with k.loop(0, levels) as level, k.loop(0, level + 1) as step:
        shift = level - step  # partners are 1 << shift apart, within runs of 2 << level
        with k.loop(k.thread_id, size // 2, threads) as pair:
            low = ((pair >> shift) << (shift + 1)) | (pair & ((k.const(u32, 1) << shift) - 1))
            high = low + (k.const(u32, 1) << shift)
            a, b = keys.at(low).load(), keys.at(high).load()
            larger, smaller = k.maximum(a, b), k.minimum(a, b)
            ascending = ((low >> (level + 1)) & 1) == 1
            keys.at(low).store(0, k.select(ascending, smaller, larger))
            keys.at(high).store(0, k.select(ascending, larger, smaller))
        k.barrier()


def _splits_rule(columns: int, count: int) -> int:
    """Returns the number of thread blocks that sort parts of a row.

    The parts are the smallest whose candidates one thread block can then sort, or as large as
    possible if there are none. 1 means no further launch. Raises ValueError for a `count` of which
    parts leave too many candidates.
    """
    if columns <= MAX_PART:
        return 1
    if count > MOST_OF_PARTS:
        raise ValueError(f"count={count} of {columns} values: must be at most {MOST_OF_PARTS}")
    part = max(1024, count, -(-columns // (MAX_PART // count)))
    return equal_parts(columns, min(part, MAX_PART))


top_k_splits_rule: Rule[int] = Rule("top_k_splits", _splits_rule)

TOP_K = Family(
    top_k,
    search_examples(top_k, 262144, 64, count=64),
    rules=(top_k_splits_rule,),
    operands=SEARCH_OPERANDS,
)
