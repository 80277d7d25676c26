"""Shared memory that kernels declare for a common split of a multiprocessor's memory."""

from __future__ import annotations

import re

import pytest

from ptx_kernels.machine_code.ptxas import Assembly, assemble, occupancy, shared_split
from ptx_kernels.ptx import Builder, Kernel, half_of_warps, kernel, u32
from ptx_kernels.ptx.oldest import built_for
from ptx_kernels.ptx.split import SPLIT, split_bytes


@kernel
def small(k: Builder, *, threads: int, own: int = 0, dynamic: bool = False) -> None:
    k.launch((1,), threads, resident_blocks=2)
    if own:
        k.shared("own", u32, (own // 4,), dynamic=dynamic).store(0, k.lane_id)


def declared(built: Kernel) -> dict[str, int]:
    found = re.findall(r"\.shared \.align 16 \.b8 (\w+)\[(\d+)\]", built.text)
    return {name: int(size) for name, size in found}


def split(registers: int, warps: int, shared: int) -> int:
    return shared_split(Assembly("sm_90", registers, 0, 0, 0, shared, b""), 32 * warps)


@pytest.mark.parametrize("warps", [1, 2, 4, 5, 8, 14, 16, 32])
def test_any_number_of_blocks_above_half_of_the_warps_needs_the_same_split(warps):
    shared, most = split_bytes(warps, None), min(64 // warps, 32)
    for registers in range(16, 57, 8):
        blocks = occupancy(Assembly("sm_90", registers, 0, 0, 0, shared, b""), 32 * warps).blocks
        if 2 * blocks > most:
            assert split(registers, warps, shared) == SPLIT, registers


@pytest.mark.parametrize("warps, blocks", [(4, 2), (4, 3), (4, 4), (4, 5), (8, 2), (16, 1)])
def test_the_stated_number_of_blocks_and_half_more_need_the_same_split(warps, blocks):
    for resident in (blocks, blocks + blocks // 2):
        registers = 65536 // (32 * warps * resident) // 8 * 8
        assert split(registers, warps, split_bytes(warps, blocks)) == SPLIT


@pytest.mark.parametrize("warps, blocks", [(1, 32), (8, 4), (14, 2), (16, 2), (32, 1)])
def test_half_of_the_warps(warps, blocks):
    assert half_of_warps(warps) == blocks
    assert split(64, warps, split_bytes(warps, blocks)) == SPLIT


def test_the_array_fills_up_what_the_kernel_declares():
    (unused,) = declared(small(threads=256)).values()
    assert unused == split_bytes(8, 2)
    assert declared(small(threads=256, own=1024)) == {"own": 1024, "unused_shared": unused - 1024}
    assert declared(small(threads=256, own=unused + 16)) == {"own": unused + 16}


def test_assemblers_keep_the_array():
    assert assemble(small(threads=256).text, "sm_90").shared_bytes == split_bytes(8, 2)


def test_none_beside_dynamic_memory_and_before_sm_80():
    """XLA then prefers the largest split; sm_75 has 96 KB for both."""
    built = small(threads=256, own=1024, dynamic=True)
    assert built.dynamic_shared_bytes == 1024 and "unused_shared" not in built.text
    with built_for(75):
        assert "unused_shared" not in small(threads=256).text
