"""Compares int8, f16 and bf16 on tensor cores by instruction counts; writes JSON.

Run `python -m benchmarks.tensor_cores [FILE]`.

For prompts' products with each format's Configs, it counts the instructions of a complete step (a
super-block: copies, unpacking, mma, scales) per 16 x 8 x 32 product, by `ptxas -arch=sm_90`. It
derives their bounds on each device, in clocks of a quarter of a multiprocessor, which issues one
instruction per clock:

    issue    instructions of the step
    tensor   its mma's at the device's rate through mma.sync (`ptx_kernels.devices`)
    L2       bytes of its tiles at L2_BYTES, measured by others on an H100: 5.5 TB/s

bf16 weights are d * scale * quant - dmin * min rounded to bf16, in a kernel only for this
comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_kernels import formats, simulator
from ptx_kernels.devices import DEVICES
from ptx_kernels.formats.unpack import k_scales, packed_tile
from ptx_kernels.formats.unpack.packed_tile import Pair
from ptx_kernels.formats.unpack.packed_words import f16_of
from ptx_kernels.kernels.gemm import GemmConfig, gemm
from ptx_kernels.kernels.gemm.fragments import (
    Accumulators,
    accumulator_index,
    accumulators,
    f16_activations,
)
from ptx_kernels.kernels.gemm.pipeline import Pipeline, Rows, TileCopy
from ptx_kernels.kernels.operands import random_planes
from ptx_kernels.kernels.quantize_f16 import SUPER_BLOCK, quantize_f16
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.machine_code.ptxas import ToolNotFoundError, assemble, tool_version
from ptx_kernels.machine_code.report import plain_table
from ptx_kernels.machine_code.sass import disassemble, enclosing_loop, hot_loop
from ptx_kernels.ptx import WARP, Builder, Kernel, Pointer, Value, bf16, f32, kernel, u8, u32
from ptx_kernels.ptx.instructions import f32_to_bf16
from ptx_kernels.ptx.types import bf16x2
from tools.results import write_results

from .common import results_file

N, COLUMNS, M = 14336, 4096, 512  # Llama-3.1-8B's gate, a prompt of 512 tokens
_PRODUCTS = 16 * 8 * 32
L2_BYTES = 5.5e12 / (132 * 1.755e9)  # per clock and multiprocessor

CONFIGS: dict[tuple[str, str], GemmConfig] = {
    ("Q4_K", "int8"): GemmConfig(4, 1, 2, 64, 2),
    ("Q4_K", "f16"): GemmConfig(8, 1, 2, 64, 2, "f16"),
    ("Q4_K", "bf16"): GemmConfig(8, 1, 2, 64, 2),
    ("Q5_K", "int8"): GemmConfig(4, 1, 2, 64, 2),
    ("Q5_K", "f16"): GemmConfig(8, 1, 2, 48, 2, "f16"),
    ("Q6_K", "int8"): GemmConfig(4, 1, 1, 64, 2),
    ("Q6_K", "f16"): GemmConfig(8, 1, 2, 64, 2, "f16"),
    ("Q8_0", "int8"): GemmConfig(4, 1, 1, 64, 2),
}


# --- bf16 ---


def _bf16_pairs(k: Builder, word: Value, scale: Value, offset: Value) -> list[Value]:
    """Converts four bytes below 128 to scale * byte + offset, two words of bf16 pairs.

    128 + byte is exact, and so is subtracting 128.
    """
    anchor, one, less = k.const(u32, 0x43434343), k.const(u32, 0x3F803F80), k.const(u32, 0xC300C300)
    found = []
    for which in (0x4140, 0x4342):
        biased = k.permute(word, anchor, which).bits(bf16x2)
        quants = k.fma(biased, one.bits(bf16x2), less.bits(bf16x2))
        found.append(k.fma(quants, scale, offset).bits(u32))
    return found


def _twice(k: Builder, value: Value) -> Value:
    return k.instruction("cvt.rn.bf16x2.f32", value, value)


@kernel
def bf16_products(k: Builder, *, n: int, columns: int, m: int, config: GemmConfig) -> None:
    """y[j, r] = bf16(dequantize(w[r])) . x[j] for Q4_K; n and m are multiples of a block's rows.

    x is bf16; of every 16 columns the pairs at even positions come first.
    """
    steps, threads = columns // SUPER_BLOCK, WARP * config.row_warps
    plane = k.input("block", u8, (n, steps, 144), constant=True)
    x = k.input("x", bf16, (m, columns))
    y = k.output("y", f32, (m, n))
    k.launch((m // config.m_tile, n // config.rows), threads, resident_blocks=1)
    first_m, first_n = k.block_id("x") * config.m_tile, k.block_id("y") * config.rows
    copies = [
        TileCopy(
            k, Rows(plane.reshape(n, steps * 144), first_n, config.rows), 144, threads, part=144
        ),
        TileCopy(k, Rows(x.cast(u8), first_m, config.m_tile), 512, threads, part=512),
    ]
    totals = accumulators(k, config.tiles, config.m_tile)
    first_rows = [(k.warp_id * config.tiles + t) * 16 for t in range(config.tiles)]
    for step, (weights, values) in Pipeline(k, config.stages, copies).steps(steps):
        tiles = [copies[0].tile(weights, row, step, 0) for row in first_rows]
        with k.loop(0, packed_tile.UNITS) as unit:
            _add_unit(k, tiles, unit, values, totals)
    for row, tile in zip(first_rows, totals, strict=True):
        for i, of_columns in enumerate(tile):
            for j, total in enumerate(of_columns):
                n_, m_ = accumulator_index(k, first_n + row, first_m + 8 * i, j)
                y.at(m_, n_).store(0, total)


def _add_unit(
    k: Builder,
    tiles: Sequence[packed_tile.TilePlane],
    unit: Value,
    values: Pointer,
    totals: Accumulators,
) -> None:
    """Adds the 64 columns of a unit."""
    weights = [(tile.matrix(unit * 32 + 16), *_headers(k, tile, unit)) for tile in tiles]
    for group in range(2):
        operands = [
            _operands(k, words, scales[group], offsets[group], group)
            for words, scales, offsets in weights
        ]
        lanes = f16_activations(k, values, unit * 2 + group)
        for i in range(len(totals[0])):
            b = k.ldmatrix(lanes.at(i * 8 * values.shape[1]))
            for step in range(2):  # of 16 columns
                for total, a in zip(totals, operands, strict=True):
                    products = k.mma(a[step], b[2 * step : 2 * step + 2], total[i], bf16)
                    for sum_, product in zip(total[i], products, strict=True):
                        sum_.set(product)


def _headers(
    k: Builder, plane: packed_tile.TilePlane, unit: Value
) -> tuple[list[Pair], list[Pair]]:
    """Returns (d * scale, -dmin * min) of a unit's two sub-blocks, for the lane's rows."""
    reader = k_scales.PairReader(k, unit)
    scales, offsets = [], []
    for row in plane.rows():
        header = row.cast(u32).load(vector=4)
        d, dmin = f16_of(header[0]), -f16_of(header[0], 1)
        both, minimums = reader.read(header[1:])
        scales.append([d * (both & 0xFF).to(f32), d * (both >> 8).to(f32)])
        offsets.append([dmin * m.to(f32) for m in minimums])
    return list(zip(*scales, strict=True)), list(zip(*offsets, strict=True))


def _operands(
    k: Builder, words: Sequence[Value], scales: Pair, offsets: Pair, group: int
) -> list[list[Value]]:
    """Returns operand A of m16n8k16 for a group's first 16 columns and for its last."""
    factors = [(_twice(k, scales[r]), _twice(k, offsets[r])) for r in range(2)]
    quants = [(w >> 4 if group else w) & 0x0F0F0F0F for w in words]
    pairs = [_bf16_pairs(k, word, *factors[i % 2]) for i, word in enumerate(quants)]
    return [[pairs[2 * i + r][p] for p in range(2) for r in range(2)] for i in range(2)]


# --- figures ---


def build(format: str, products: str, n: int, columns: int, m: int, config: GemmConfig) -> Kernel:
    if products == "bf16":
        return bf16_products(n=n, columns=columns, m=m, config=config)
    return gemm(format=format, n=n, columns=columns, m=m, config=config)


def error(format: str, products: str) -> float:
    """Returns the simulated NMSE against the float64 product of the unrounded activations.

    The product has 32 rows and 16 activations.
    """
    config = GemmConfig(1, 1, 2, 16, 2, "f16" if products == "f16" else "int8")
    rng, columns = np.random.default_rng(0), 1024
    planes = random_planes(format, 32, columns // formats.get(format).block_size, rng=rng)
    x = rng.standard_normal((16, columns), np.float32)
    operands: Sequence[np.ndarray]
    if products == "bf16":
        operands = [f32_to_bf16(x).reshape(16, -1, 4, 2, 2).swapaxes(-3, -2).reshape(x.shape)]
    else:
        operands = simulator.run(
            (quantize_f16 if products == "f16" else quantize_q8_1)(rows=16, columns=columns), x
        )
    (y,) = simulator.run(build(format, products, 32, columns, 16, config), *planes, *operands)
    want = x.astype(np.float64) @ formats.get(format).decode(planes).astype(np.float64).T
    return float(np.sum((y - want) ** 2) / np.sum(want**2))


@dataclass(frozen=True)
class Row:
    """Clocks and instructions per 16 x 8 x 32 product; `clocks`: device -> {bound: clocks}."""

    format: str
    products: str
    config: GemmConfig
    registers: int
    spill_bytes: int
    shared_bytes: int
    hot_loop: float
    step: float
    mix: dict[str, float]
    nmse: float
    clocks: dict[str, dict[str, float]]

    def bound(self, device: str) -> tuple[str, float]:
        return max(self.clocks[device].items(), key=lambda item: item[1])


def measure(format: str, products: str, config: GemmConfig) -> Row:
    built = build(format, products, N, COLUMNS, M, config)
    machine = assemble(built.text, "sm_90")
    code = disassemble(machine.cubin)
    inner = hot_loop(code)
    outer = inner and enclosing_loop(code, inner)
    if inner is None or outer is None:
        raise ValueError(f"{format} {products}: ptxas left no loop over units in one over steps")
    done = SUPER_BLOCK // 32 * config.tiles * config.m_tile // 8  # per warp and step
    units = packed_tile.UNITS // config.column_warps
    step = outer.issued() + (units - 1) * inner.issued()
    mix = {name: count + (units - 1) * inner.count(name) for name, count in outer.mix().items()}
    width = formats.get(format).block_bytes * SUPER_BLOCK // formats.get(format).block_size
    activation = {"int8": 256 + 64, "f16": 512 + 36, "bf16": 512}[products]
    nbytes = (config.rows * width + config.m_tile * activation) / (config.row_warps * done)
    clocks = {}
    for name, device in DEVICES.items():
        rate = device.mma_int8_ops if products == "int8" else device.mma_float_ops
        clocks[name] = {"issue": step / done, "tensor": 4 * 2 * _PRODUCTS / rate}
        if device.arch == "sm_90":
            clocks[name]["L2"] = 4 * nbytes / L2_BYTES
    return Row(
        format,
        products,
        config,
        machine.registers,
        machine.spill_store_bytes,
        built.dynamic_shared_bytes,
        inner.issued() * units / done,
        step / done,
        {name: count / done for name, count in mix.items()},
        error(format, products),
        clocks,
    )


def rows() -> list[Row]:
    return [measure(*names, config) for names, config in CONFIGS.items()]


def table(measured: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = (
        "format",
        "products",
        "rows x m",
        "registers",
        "spills",
        "hot loop",
        "step",
        "NMSE",
        *DEVICES,
    )
    return header, [
        (
            *(
                r.format,
                r.products,
                f"{r.config.rows} x {r.config.m_tile}",
                str(r.registers),
                str(r.spill_bytes),
            ),
            *(f"{r.hot_loop:.1f}", f"{r.step:.1f}", f"{r.nmse:.1e}"),
            *("{1:.1f} {0}".format(*r.bound(device)) for device in DEVICES),
        )
        for r in measured
    ]


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "tensor_cores", __doc__)
    try:
        measured = rows()
    except ToolNotFoundError as error:
        print(f"benchmarks.tensor_cores needs ptxas and nvdisasm: {error}", file=sys.stderr)
        return 3
    print(plain_table(*table(measured)))
    results: dict[str, Any] = {
        "ptxas": tool_version("ptxas"),
        "shape": {"n": N, "columns": COLUMNS, "m": M},
        "l2_bytes_per_clock": L2_BYTES,
        "rows": [vars(r) | {"config": vars(r.config)} for r in measured],
    }
    print(write_results(file, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
