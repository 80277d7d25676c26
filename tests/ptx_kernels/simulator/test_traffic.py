"""Wavefronts and sectors of access patterns that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.simulator.traffic import Count, total, worst

from .ptx_text import module

WARPS = 2


def counted(body: str, nbytes: int = 8192) -> simulator.Traffic:
    """Traffic of the only load, by two warps.

    Each lane first fills its 128 bytes of shared memory.
    """
    fill = "".join(f"st.shared.v4.u32 [%r3+{16 * i}], {{%r2, %r2, %r2, %r2}};" for i in range(8))
    start = (
        f".shared .align 16 .b8 t[{nbytes}]; mov.u32 %r4, t; mad.lo.u32 %r3, %r2, 128, %r4; "
        f"{fill} bar.sync 0;\n"
    )
    traffic = simulator.Traffic()
    text = module(f"{start}{body} ret;", "y")
    y = simulator.DeviceBuffer("y", np.zeros(nbytes, np.uint8), "in")
    simulator.launch(text, [y], (1,), (32 * WARPS,), traffic=traffic)
    return traffic


@pytest.mark.parametrize(
    ("stride", "opcode", "wavefronts", "least"),  # of a warp
    [
        (0, "u32 %r6", 1, 1),  # one word for all
        (4, "u32 %r6", 1, 1),
        (1, "u8 %r6", 1, 1),
        (8, "u32 %r6", 2, 1),
        (128, "u32 %r6", 32, 1),
        (12, "u32 %r6", 1, 1),  # odd strides use every bank
        (8, "v2.u32 {%r6, %r7}", 2, 2),
        (16, "v4.u32 {%r6, %r7, %r8, %r9}", 4, 4),
        (32, "v4.u32 {%r6, %r7, %r8, %r9}", 8, 4),
        (0, "v4.u32 {%r6, %r7, %r8, %r9}", 4, 4),
    ],
)
def test_bank_conflicts(stride: int, opcode: str, wavefronts: int, least: int) -> None:
    found = counted(f"mad.lo.u32 %r5, %r2, {stride}, %r4;\nld.shared.{opcode}, [%r5];")
    load = found.shared[max(found.shared)]
    assert (load.moved, load.least) == (WARPS * wavefronts, WARPS * least)
    # eight 16-byte stores on one line, lanes 128 bytes apart
    filling = found.shared[min(found.shared)]
    assert (filling.moved, filling.least) == (WARPS * 8 * 32, WARPS * 8 * 4)
    assert not found.global_


@pytest.mark.parametrize(
    ("stride", "offset", "opcode", "sectors", "least"),  # of a warp
    [
        (0, 0, "u32 %r6", 1, 1),
        (4, 0, "u32 %r6", 4, 4),
        (4, 4, "u32 %r6", 5, 4),
        (8, 0, "u32 %r6", 8, 4),
        (64, 0, "u32 %r6", 32, 4),
        (1, 0, "u8 %r6", 1, 1),
        (16, 0, "v4.u32 {%r6, %r7, %r8, %r9}", 16, 16),
        (32, 16, "v4.u32 {%r6, %r7, %r8, %r9}", 32, 16),
    ],
)
def test_sectors(stride: int, offset: int, opcode: str, sectors: int, least: int) -> None:
    found = counted(
        f"mul.wide.u32 %rd4, %r2, {stride}; add.u64 %rd5, %rd0, %rd4;\n"
        f"ld.global.{opcode}, [%rd5+{offset}];"
    )
    (load,) = found.global_.values()
    assert (load.moved, load.least) == (WARPS * sectors, WARPS * least)


def test_some_lanes_of_a_warp() -> None:
    found = counted(
        "setp.lt.u32 %p0, %r2, 3; mad.lo.u32 %r5, %r2, 128, %r4;\n@%p0 ld.shared.u32 %r6, [%r5];"
    )
    assert found.shared[max(found.shared)] == Count(3, 1)


def test_a_copy_is_written_once() -> None:
    """The simulated `cp.async` writes at its start and at its completion; hardware writes once."""
    found = counted(
        "mad.lo.u32 %r5, %r2, 16, %r4; mul.wide.u32 %rd4, %r2, 16; add.u64 %rd5, %rd0, %rd4;\n"
        "cp.async.cg.shared.global [%r5], [%rd5], 16; cp.async.wait_all; bar.sync 0;"
    )
    copy = found.shared[max(found.shared)]
    assert (copy.moved, copy.least) == (WARPS * 4, WARPS * 4)


def test_some_blocks_alone() -> None:
    text = module(
        "mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd4, %r2, 4; add.u64 %rd5, %rd0, %rd4;"
        " st.global.u32 [%rd5], 1; ret;",
        "y",
    )
    y = np.zeros(8, np.int32)
    simulator.launch(text, [y], (8,), (1,), only=[2, 5])
    assert y.tolist() == [0, 0, 1, 0, 0, 1, 0, 0]


def test_summaries() -> None:
    counts = {3: Count(8, 8), 4: Count(9, 3), 7: Count(30, 20)}
    assert total(counts) == Count(47, 31)
    assert worst(counts) == (7, Count(30, 20))
    assert worst({3: Count(8, 8)}) is None
    assert Count(9, 3).excess == 3.0 and Count().excess == 1.0
