"""Packed weights to floats: whole matrices, or the rows of an embedding that are looked up."""

from __future__ import annotations

from dataclasses import dataclass

from .. import formats
from ..ptx import Buffer, Builder, f32, kernel, s32, u8, u32
from .family import Arguments, Case, Family, ids_of_rows, once, one_layer
from .planes import input_planes
from .vectors import float_type, store_floats


@dataclass(frozen=True)
class DecodeConfig:
    warps: int = 4  # per block


@kernel
def decode(
    k: Builder,
    *,
    format: str,
    n: int,
    blocks: int,
    layers: int = 0,
    dtype: str = "f32",
    lookups: int = 0,
    config: DecodeConfig = DecodeConfig(),
) -> None:
    """y[r] = dequantize(w[r]); with `lookups`, y[t] = dequantize(w[ids[t]]) for as many ids.

    One thread per part of a block: it loads 16 bytes of quants and stores runs of 16 floats. An id
    outside the n rows gives NaN, as `jax.numpy.take` fills.

    Operands: the planes, with `layers` a stack's and an index (see `input_planes`); ids s32
    (lookups,). Result: y of `dtype` (n or lookups, columns).
    """
    layout = formats.get(format)
    parts = layout.dequantize_threads
    k.name = f"{'embedding' if lookups else 'decode'}_{format.lower()}"
    columns = blocks * layout.block_size
    planes = input_planes(k, format, n, columns, layers=layers).of_matrix()
    ids = k.input("ids", s32, (lookups,)) if lookups else None
    count = lookups or n
    y = k.output("y", float_type(dtype), (count, columns))
    threads = 32 * config.warps
    units = -(-blocks * parts // threads)  # blocks of threads that one row takes
    k.launch((count * units,), threads)

    out = k.block_id() // units
    unit = (k.block_id() % units) * threads + k.thread_id
    block, part = unit // parts, unit % parts
    with k.when(block < blocks):
        row = out if ids is None else ids.at(out).load().bits(u32)
        with k.when(row < n) as known:  # a negative id is a huge u32
            for run in layout.dequantize(k, [plane.at(row, block) for plane in planes], part):
                store_floats(y.at(out, block * layout.block_size + run.first), run.values)
        if ids is not None:
            weights = layout.block_size // parts
            with known.otherwise():
                nan = k.const(f32, float("nan"))
                store_floats(y.at(out, block * layout.block_size + part * weights), [nan] * weights)


def _case(format: str, dtype: str, lookups: int) -> Case:
    blocks = 4096 // formats.get(format).block_size
    label = f"{'embedding' if lookups else 'decode'}-{format}-{dtype}"
    arguments = dict(format=format, n=4096, blocks=blocks, dtype=dtype, lookups=lookups)
    return Case(label, "decode", arguments)


def _touched(buffer: Buffer, arguments: Arguments) -> float:
    """The rows that are looked up, of the weights, and of a stack one matrix."""
    looked_up = buffer.type is u8 and arguments["lookups"]
    rows = arguments["lookups"] / arguments["n"] if looked_up else 1
    return min(1, rows) * one_layer(buffer, arguments)


DECODE = Family(
    "decode",
    decode,
    tuple(
        _case(format, dtype, lookups)
        for format in sorted(formats.names())
        for dtype in ("f32", "bf16", "f16")
        for lookups in (0, 8)
        # formats of which files have few tensors: one case each
        if formats.get(format).int8_tile or (dtype, lookups) == ("bf16", 0)
    ),
    touched=_touched,
    passes=once,
    operands={"ids": ids_of_rows},
)
