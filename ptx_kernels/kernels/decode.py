"""Kernel that dequantizes packed weights: full matrices, or embedding rows by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import formats
from ..formats.base import BlockFormat
from ..limits import MAX_F16_ROW
from ..ptx import (
    WARP,
    Buffer,
    Builder,
    KernelError,
    Pointer,
    bf16,
    f32,
    half_of_warps,
    kernel,
    s32,
    u8,
    u32,
)
from .family import Arguments, Case, Family, ids_of_rows, once, one_layer
from .planes import input_planes
from .quantize_f16 import MOST, block_f16_scale
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
    below: int = 0,
    config: DecodeConfig = DecodeConfig(),
) -> None:
    """Kernel: y[r] = dequantize(w[r]), or y[t] = dequantize(w[ids[t]]) for `lookups` ids.

    Each thread decodes a part of a quantization block: it loads 16 bytes of quants and stores runs
    of 16 floats. An id outside the n rows gives NaN, like the fill mode of `jax.numpy.take`.

    With `below`, y[r] = dequantize(w[r]) / scale[r]. The scale is the power of two that `f16_scale`
    derives from `below` and the row's largest magnitude. A thread block then decodes a full row, of
    at most MAX_F16_ROW values.

    Operands: the planes, or with `layers` the planes of a stack and an index (see `input_planes`);
    ids s32 (lookups,). Results: y of `dtype` (n or lookups, columns); with `below`, scale bf16
    (n,).
    """
    layout = formats.get(format)
    parts = layout.dequantize_threads
    k.name = f"{'embedding' if lookups else 'decode'}_{format.lower()}"
    columns = blocks * layout.block_size
    planes = input_planes(k, format, n, columns, layers=layers).of_matrix()
    ids = k.input("ids", s32, (lookups,)) if lookups else None
    count = lookups or n
    y = k.output("y", float_type(dtype), (count, columns))
    if below:
        if lookups or columns > MAX_F16_ROW:
            raise KernelError(
                f"columns={columns} and lookups={lookups} must be at most {MAX_F16_ROW} and 0 for"
                " scaled rows"
            )
        _scaled_rows(k, layout, planes, y, below)
        return
    threads = 32 * config.warps
    units = -(-blocks * parts // threads)  # thread blocks per row
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


def _scaled_rows(
    k: Builder, layout: BlockFormat, planes: Sequence[Pointer], y: Pointer, below: int
) -> None:
    """Emits the decoding of one row per thread block, which finds its largest magnitude first."""
    n, columns = y.shape
    parts = columns // layout.block_size * layout.dequantize_threads
    warps = min(-(-parts // WARP), 32)
    threads = WARP * warps
    scales = k.output("scale", bf16, (n,))  # exact: powers of two
    # threads with more weights need more registers than half of the warps leave
    few = layout.block_size // layout.dequantize_threads <= 32
    resident = half_of_warps(warps) if warps > 8 and few else None
    k.launch((n,), threads, resident_blocks=resident)
    row = k.block_id()
    largest = k.shared("largest", f32, (warps,))
    runs = []
    for base in range(0, parts, threads):
        unit = k.thread_id + base
        inside = None if base + threads <= parts else unit < parts
        # threads without a part decode the last one again
        unit = unit if inside is None else k.minimum(unit, parts - 1)
        block, part = unit // layout.dequantize_threads, unit % layout.dequantize_threads
        for run in layout.dequantize(k, [plane.at(row, block) for plane in planes], part):
            runs.append((block * layout.block_size + run.first, run.values, inside))
    every = [value for _, values, _ in runs for value in values]
    inverse, scale = block_f16_scale(k, largest, every, below, warps=warps)
    for first, values, inside in runs:
        store_floats(y.at(row, first), [value * inverse for value in values], where=inside)
    scales.at(row).store(0, scale.to(bf16), where=k.thread_id == 0)


def _case(format: str, dtype: str, lookups: int, below: int = 0) -> Case:
    blocks = 4096 // formats.get(format).block_size
    scaled = "-scaled" if below else ""
    label = f"{'embedding' if lookups else 'decode'}-{format}-{dtype}{scaled}"
    arguments = dict(format=format, n=4096, blocks=blocks, dtype=dtype, lookups=lookups)
    return Case(label, "decode", arguments | ({"below": below} if below else {}))


def _touched(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that is read: rows looked up, one matrix of a stack."""
    looked_up = buffer.type is u8 and arguments["lookups"]
    rows = arguments["lookups"] / arguments["n"] if looked_up else 1
    return min(1, rows) * one_layer(buffer, arguments)


DECODE = Family(
    decode,
    tuple(
        _case(format, dtype, lookups)
        for format in sorted(formats.names())
        for dtype in ("f32", "bf16", "f16")
        for lookups in (0, 8)
        # one case for each format that few tensors of a file use
        if formats.get(format).int8_tile or (dtype, lookups) == ("bf16", 0)
    )
    + tuple(
        _case(format, "f16", 0, MOST)
        for format in sorted(formats.names())
        if formats.get(format).int8_tile
    ),
    touched=_touched,
    passes=once,
    operands={"ids": ids_of_rows},
)
