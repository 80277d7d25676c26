"""Blocks' accesses to shared memory, L1 and L2, counted by hand."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest

from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.machine_code.accesses import _run, accesses
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.machine_code.sass import disassemble
from ptx_kernels.machine_code.stretches import stretches


def matvec(m: int = 1, **changes):
    sizes = dict(format="Q4_K", n=64, columns=4096, m=m, config=PRESETS["quarter_warp_dp4a"])
    return KERNELS["matvec"](**(sizes | changes))


def test_weights_come_once_and_headers_to_eight_lanes():
    """Eight lanes share a super-block of 144 bytes; each loads the same 16 bytes of header."""
    kernel = matvec()
    found, blocks = accesses(kernel), math.prod(kernel.grid)
    assert blocks * found.memory_bytes == 64 * 16 * 144
    assert found.distinct == pytest.approx(144 / 256)
    # each block reads all activations and writes its rows
    activations = 4096 + 128 * 8
    assert blocks * found.l2_bytes == 64 * 16 * 144 + blocks * activations + 64 * 4


@pytest.mark.parametrize(
    "preset, columns, requests",
    [
        ("batched", 4096, 2 * 4.5),  # lanes read 16 of 32 bytes twice, and headers one at a time
        ("quarter_warp_dp4a", 4096, 4 + 1.5),  # two loads for the header of every other super-block
    ],
)
def test_sectors_that_a_warp_requests_in_parts(preset, columns, requests):
    """A super-block of Q4_K has 144 bytes: 4.5 sectors."""
    kernel = matvec(columns=columns, config=PRESETS[preset])
    found, blocks = accesses(kernel), math.prod(kernel.grid)
    assert blocks * found.warp_sectors == 64 * columns // 256 * 4.5
    assert blocks * found.sector_requests == 64 * columns // 256 * requests
    assert found.sector_excess == requests / 4.5


def test_a_long_loop_is_told_by_two_short_ones():
    config = GemmConfig(row_warps=1, column_warps=4, tiles=1, m_tile=16, stages=3)
    sizes = dict(format="Q4_K", n=64, columns=4096, m=16, config=config)
    kernel = KERNELS["gemm"](**sizes)
    assert astuple(accesses(kernel)) == pytest.approx(astuple(_run(kernel)), rel=1e-9)


def test_a_fixed_grid_is_told_by_two_rounds_of_rows():
    config = PRESETS["inline_q8"]
    rows = config.block_rows
    kernel = matvec(n=8 * rows, columns=1024, config=replace(config, persistent=2))
    assert astuple(accesses(kernel)) == pytest.approx(astuple(_run(kernel)), rel=1e-9)


def test_stretches_of_a_product_behind_a_norm():
    """The norm precedes the loop over rows, whose hot loop multiplies.

    Each instruction is in exactly one part.
    """
    config = PRESETS["inline_q8"]
    kernel = matvec(m=4, norm=True, eps=1e-5, columns=8192, config=config)
    code = disassemble(assemble(kernel.text, "sm_90").cubin)
    found = stretches(code)
    parts = (found.before, found.outer, found.behind, found.once, found.body.instructions)
    loops = [i for loop in found.before_loops for i in loop.instructions]
    assert sorted(i.address for part in (*parts, loops) for i in part) == [i.address for i in code]
    assert found.looped and found.body.count("dp4a")
    assert any(i.name == "MUFU" for i in (*found.before, *loops))  # 1 / sqrt of the mean
    assert not any(i.category == "dp4a" for part in parts[:4] for i in part)
