"""How much work a launch is: bytes through memory, weights behind each trip through the hot loop,
trips.

Trips are counted from what the loop's machine code does, and not from the kernel's own loop: ptxas
unrolls as it likes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ..formats import get as block_format
from ..kernels.matvec import MatvecConfig, matvec
from ..ptx import WARP, Kernel
from .model import mma_products
from .sass import Loop, load_bits

#: Bits per weight of the planes that hold quants; scales and headers don't count.
QUANT_BITS = {"Q4_0": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}

_DOT = 4  # products of a dp4a
#: Families whose hot loop reads their inputs: bytes of the inputs tell how many trips it takes.
_STREAMING = (
    "quantize_q8_1",
    "quantize_f16",
    "rms_norm",
    "decode",
    "append_kv",
    "rope_append",
    "paged_attention",
    "merge_attention",
)


@dataclass(frozen=True)
class Work:
    """What one launch does.

    Attributes:
      nbytes: that must pass through memory, each byte once.
      trips: through the hot loop (or the whole kernel, where it has none), of all warps together;
        None: unknown.
      quant_bytes: bytes of packed quants, without scales, behind one trip of one lane; None where a
        kernel multiplies no packed weights there.
    """

    nbytes: int
    trips: float | None
    quant_bytes: float | None


def formats(kernel: Kernel) -> tuple[str, ...]:
    """Formats of the packed matrices that a product multiplies by; empty for what is no product."""
    arguments = kernel.arguments
    if not {"columns", "m"} <= arguments.keys():
        return ()
    return (arguments["format"],) if "format" in arguments else tuple(arguments.get("formats", ()))


def packed_weights(kernel: Kernel) -> int:
    """Weights of all matrices of a product."""
    arguments = kernel.arguments
    rows = arguments["n"] * len(formats(kernel)) if "n" in arguments else sum(arguments["rows"])
    return rows * arguments["columns"]


def traffic(kernel: Kernel) -> int:
    """Bytes that a launch must move: its buffers, of pages and looked-up rows only what it touches.

    Attention over pages reads every page that its tables have room for, or the window's part of it.
    """
    arguments = kernel.arguments

    def share(name: str, type_name: str, rows: int) -> float:
        if "num_pages" in arguments and name in ("k_pages", "v_pages", "k_scales", "v_scales"):
            if "tokens" in arguments:
                return arguments["tokens"] / (arguments["num_pages"] * arguments["page_size"])
            held = (
                1
                if arguments.get("contiguous")
                else arguments["batch"] * arguments["pages_per_sequence"] / rows
            )
            tokens = arguments["pages_per_sequence"] * arguments["page_size"]
            return held * min(1, (arguments.get("window") or tokens) / tokens)
        return arguments["lookups"] / rows if type_name == "u8" and arguments.get("lookups") else 1

    return round(
        sum(min(1, share(b.name, b.type.name, b.shape[0])) * b.nbytes for b in kernel.buffers)
    )


def weights_per_load(packed: tuple[str, ...], config: MatvecConfig) -> float:
    """Weights of one lane behind each load of packed weights (headers are loads too) of mat-vecs.

    Counted in the text of mat-vecs so small that each of their warps takes a single step.
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


def _weights_per_trip(kernel: Kernel, loop: Loop) -> float:
    """Weights of one lane that a trip through the hot loop of a product multiplies."""
    config = kernel.arguments["config"]
    if products := sum(mma_products(i.opcode) for i in loop.instructions if i.category == "mma"):
        return products / config.m_tile / WARP
    if dots := loop.count("dp4a"):
        return dots * _DOT / kernel.arguments["m"]
    return sum(".CONSTANT" in i.opcode for i in loop.instructions) * weights_per_load(
        formats(kernel), config
    )


def work(kernel: Kernel, loop: Loop, *, whole: bool = False) -> Work:
    """Work of `kernel`, whose machine code's hot loop is `loop`; `whole`: it has none, `loop` is
    all of it.
    """
    nbytes, arguments = traffic(kernel), kernel.arguments
    packed = formats(kernel)
    weights = _weights_per_trip(kernel, loop) if packed else 0
    bits = sum(QUANT_BITS[format] for format in packed) / max(len(packed), 1)
    if whole:
        warps = math.prod(kernel.grid) * math.ceil(math.prod(kernel.block) / WARP)
        return Work(nbytes, warps, weights * bits / 8 or None)
    if packed:
        again = math.ceil(arguments["m"] / arguments["config"].m_tile) if loop.count("mma") else 1
        trips = packed_weights(kernel) * again / (weights * WARP) if weights else None
        return Work(nbytes, trips, weights * bits / 8 or None)
    loads = [
        load_bits(i.opcode) // 8 for i in loop.instructions if i.category.startswith("load global")
    ]
    if kernel.family not in _STREAMING or not loads:
        return Work(nbytes, None, None)
    wide = sum(size for size in loads if size == max(loads))  # narrower ones are ids and scales
    again = 1
    if (
        kernel.family == "paged_attention"
    ):  # a block that has some of a group's queries reads all of K and V
        again = math.ceil(
            arguments["num_heads"] / arguments["num_kv_heads"] / arguments["config"].queries
        )
    return Work(nbytes, nbytes * again / (wide * WARP), None)
