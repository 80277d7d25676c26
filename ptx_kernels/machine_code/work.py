"""Computes a launch's work: memory traffic, trips through the hot loop, weights per trip.

Trips are counted from the work of the loop's machine code, not from the kernel's own loop, because
ptxas unrolls loops.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ..formats import get as block_format
from ..formats import names as format_names
from ..kernels import FAMILIES
from ..kernels.family import Family, PackedWeights, rows_together
from ..kernels.matvec import MatvecConfig, matvec
from ..ptx import WARP, Kernel
from .model import mma_products
from .sass import Loop, load_bits

#: Bits per weight of the planes that hold quants; scales and headers do not count.
QUANT_BITS = {name: block_format(name).quant_bits for name in format_names()}

_DOT = 4  # products per dp4a


@dataclass(frozen=True)
class Work:
    """Memory traffic and loop trips of one launch.

    Attributes:
      nbytes: bytes of memory traffic, each byte once.
      trips: trips of all warps through the hot loop (or the full kernel if it has none); None if
        unknown.
      quant_bytes: bytes of packed quants, without scales, per trip and lane; None if the loop
        multiplies no packed weights.
    """

    nbytes: int
    trips: float | None
    quant_bytes: float | None


#: For any other kernel: it touches all of its buffers, is not a product, and its trips are unknown.
_UNKNOWN = Family(Kernel, ())


def _family(kernel: Kernel) -> Family:
    return FAMILIES.get(kernel.family, _UNKNOWN)


def packed_weights(kernel: Kernel) -> PackedWeights | None:
    """Returns the packed matrices that the kernel multiplies by; None for other kernels."""
    weights = _family(kernel).weights
    return weights(kernel.arguments) if weights else None


def traffic(kernel: Kernel) -> int:
    """Returns the bytes that a launch must move between its buffers and the multiprocessors.

    For pages and looked-up rows, only the part that the launch touches counts. Buffers that it
    reads and writes again count twice, all others once. Bytes that it prefetches count for the next
    launch.
    """
    family, own = _family(kernel), [b for b in kernel.buffers if not b.ahead]
    shares = (
        min(1, family.touched(b, kernel.arguments)) * (1 + (b.name in family.rewritten))
        for b in own
    )
    return round(sum(share * b.nbytes for share, b in zip(shares, own, strict=True)))


def weights_per_load(packed: tuple[str, ...], config: MatvecConfig) -> float:
    """Returns the weights that a lane gets per load instruction, loads of scales included.

    Counts the loads in the PTX of a mat-vec so small that each warp's loop runs once.
    """
    one_step = replace(config, activations="f32", stage="none", unroll=1)
    weights, loads = 0.0, 0
    for format in packed:
        block = block_format(format).block_size
        columns = config.streams(format) * block
        text = matvec(
            format=format, n=config.rows_per_warp, columns=columns, m=1, config=one_step
        ).text
        loads += len(re.findall(r"\bld\.global\S*\.nc\S*\.[bus](?:8|16|32|64)\b", text))
        weights += config.rows_per_warp * block / config.lanes_per_block(format)
    return weights / loads


def weights_per_trip(kernel: Kernel, packed: PackedWeights, loop: Loop) -> float:
    """Returns the weights that a lane multiplies per trip through the hot loop."""
    config = kernel.arguments["config"]
    # next to integer products, those of floats are for minimums
    products_of = "IMMA" if any(i.name == "IMMA" for i in loop.instructions) else ""
    mmas = [i.opcode for i in loop.instructions if i.category == "mma"]
    if products := sum(mma_products(o) for o in mmas if o.startswith(products_of)):
        return products / config.m_tile / WARP
    if dots := loop.count("dp4a"):
        together = rows_together(kernel.arguments)
        tunings = [block_format(format).tuning for format in packed.formats]
        parts = sum(
            1 + (together <= t.gemv_two_parts) + t.gemv_sum_dots / config.rows_per_warp
            for t in tunings
        )
        return dots * _DOT * len(tunings) / parts / together
    loads = sum(".CONSTANT" in i.opcode for i in loop.instructions)
    return loads * weights_per_load(packed.formats, config)


def work(kernel: Kernel, loop: Loop, *, whole: bool = False, format: str | None = None) -> Work:
    """Returns the `Work` of a launch of `kernel`, whose hot loop is `loop`.

    `whole`: there is no hot loop, and `loop` is all of the code. `format`: format of the loop's
    matrix; None means that the loop stands for all matrices.
    """
    nbytes, packed = traffic(kernel), packed_weights(kernel)
    if packed and format is not None:
        packed = PackedWeights((format,), packed.count)
    passes = _family(kernel).passes
    weights = quant_bytes = 0.0
    if packed:
        weights = weights_per_trip(kernel, packed, loop)
        bits = sum(QUANT_BITS[format] for format in packed.formats) / len(packed.formats)
        quant_bytes = weights * bits / 8
    if whole:
        warps = math.prod(kernel.grid) * math.ceil(math.prod(kernel.block) / WARP)
        return Work(nbytes, warps, quant_bytes or None)
    given = _family(kernel).trips
    if given is not None and (counted := given(kernel.arguments)) is not None:
        return Work(nbytes, counted, None)
    if (stores := _family(kernel).stores) is not None:
        return Work(nbytes, stores(kernel.arguments) / loop.count("store global"), None)
    if passes is None:
        return Work(nbytes, None, quant_bytes or None)
    again = passes(kernel.arguments)
    if packed:
        trips = packed.count * again / (weights * WARP) if weights else None
        return Work(nbytes, trips, quant_bytes or None)
    loads = [
        load_bits(i.opcode) // 8 for i in loop.instructions if i.category.startswith("load global")
    ]
    if not loads:
        return Work(nbytes, None, None)
    wide = sum(size for size in loads if size == max(loads))  # narrower loads are ids and scales
    return Work(nbytes, nbytes * again / (wide * WARP), None)


def outer_turns(kernel: Kernel) -> float:
    """Returns the trips of the loop around the hot loop.

    For a mat-vec these are the row groups that a thread block processes, for a tensor-core matmul
    the steps of its pipeline.
    """
    packed, config = packed_weights(kernel), kernel.arguments.get("config")
    if packed is None or config is None:
        return 1.0
    columns = kernel.arguments["columns"]
    if not isinstance(config, MatvecConfig):
        return float(config.steps(columns))
    joined = "rows" in kernel.arguments  # joined matrices in sequence; a pair's rows together
    rows = packed.count / columns / (1 if joined else len(packed.formats))
    return max(1.0, rows / config.block_rows / math.prod(kernel.grid))


def staged_bytes(kernel: Kernel) -> int:
    """Returns the bytes of float activations that each thread block stages in shared memory.

    Only mat-vecs stage activations; it is 0 for others.
    """
    arguments, config = kernel.arguments, kernel.arguments.get("config")
    if not isinstance(config, MatvecConfig):
        return 0
    if config.activations != "inline_q8" and config.stage != "whole":
        return 0
    x = next(b for b in kernel.buffers if b.name == "x")
    return rows_together(arguments) * arguments["columns"] * x.type.size
