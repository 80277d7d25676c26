"""Keys and values of a prompt as sums of bf16, as its attention multiplies them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...ptx import WARP, Builder, KernelError, Pointer, Value, bf16, f32, kernel, u32
from .bf16_parts import split

RUN = 8  # elements of a thread: 16 bytes of each part


@dataclass(frozen=True)
class SplitKeysConfig:
    warps: int = 4  # per block


@kernel
def split_keys(
    k: Builder,
    *,
    batch: int,
    time: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    parts: int = 2,
    config: SplitKeysConfig = SplitKeysConfig(),
) -> None:
    """The bf16 parts of keys and values f32 (batch, time, num_kv_heads, head_dim or value_dim).

    Results: the keys' parts, then the values', of the same shapes; see `bf16_parts`.
    """
    if head_dim % RUN or value_dim % RUN or not 1 <= parts <= 3:
        raise KernelError(
            f"head_dim={head_dim} and value_dim={value_dim} must be multiples of {RUN}, "
            f"parts={parts} 1 to 3"
        )
    shapes = {
        name: (batch, time, num_kv_heads, d) for name, d in (("k", head_dim), ("v", value_dim))
    }
    sources = [k.input(name, f32, shape) for name, shape in shapes.items()]
    results = [
        [k.output(f"{name}{part}", bf16, shape) for part in range(parts)]
        for name, shape in shapes.items()
    ]
    threads = WARP * config.warps
    runs = [math.prod(shape) // RUN for shape in shapes.values()]
    blocks = [-(-count // threads) for count in runs]
    k.launch((sum(blocks),), threads)
    with k.when(k.block_id() < blocks[0]) as keys:
        _split_run(k, sources[0], results[0], k.block_id() * threads + k.thread_id, runs[0])
    with keys.otherwise():
        run = (k.block_id() - blocks[0]) * threads + k.thread_id
        _split_run(k, sources[1], results[1], run, runs[1])


def _split_run(k: Builder, source: Pointer, results: list[Pointer], run: Value, count: int) -> None:
    with k.when(run < count):
        values = source.reshape(count, RUN).at(run).load_run(0, RUN)
        pairs = [split(k, values[i : i + 2], len(results)) for i in range(0, RUN, 2)]
        for result, words in zip(results, zip(*pairs, strict=True), strict=True):
            result.reshape(count, RUN).at(run).cast(u32).store_run(0, words)
