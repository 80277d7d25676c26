"""Launches that prefetch for the next one: results stay the same, and prefetches stay in bounds."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.kernels import CASES, KERNELS
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.machine_code.sass import disassemble
from ptx_kernels.machine_code.work import traffic
from ptx_kernels.ptx import Kernel, KernelError, Prefetch
from ptx_kernels.simulator import launch
from ptx_kernels.simulator.errors import Misaligned, OutOfBounds
from ptx_kernels.simulator.memory.buffers import DeviceBuffer

PLANES = (2, 128), (2, 16)
ALONE = Prefetch(PLANES, rows=256, first=64, last=192)
STACK = Prefetch(((2, 210),), rows=64, first=0, last=64, layers=3)

SMALL = {
    "matvec": dict(format="Q4_K", n=32, columns=512, m=1),
    "rms_norm": dict(rows=2, columns=256, eps=1e-5),
    "quantize_q8_1": dict(rows=2, columns=256),
}


def small(family: str, **more) -> Kernel:
    arguments = dict(SMALL[family])
    if family == "matvec":
        arguments["config"] = next(c for c in CASES if c.family == family).arguments["config"]
    return KERNELS[family](**arguments, **more)


@pytest.mark.parametrize("family", SMALL)
def test_results_stay(family):
    plain, asking = small(family), small(family, prefetch=(ALONE, STACK))
    operands = random_operands(asking)
    own = [b for b in asking.operands if not b.ahead]
    assert own == list(plain.operands) and asking.results == plain.results
    assert [b.name for b in asking.operands[len(own) :]] == [
        "ahead0_0",
        "ahead0_1",
        "ahead1_0",
        "ahead1_index",
    ]
    index = np.array(7, np.int32)  # beyond the end: clamped to the last matrix, which is in bounds
    found = simulator.run(asking, *operands[:-1], index)
    for a, b in zip(found, simulator.run(plain, *operands[: len(own)]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_block_asks_for_its_share():
    """Shares are contiguous chunks of a multiple of 16 bytes; a remainder is skipped."""
    row = 2 * 128
    assert ALONE.shares(1) == [(64 * row, 128 * row), (64 * 32, 128 * 32)]
    assert ALONE.shares(100) == [(64 * row, 320), (64 * 32, 32)]
    assert ALONE.shares(10_000) == [(64 * row, 0), (64 * 32, 0)]
    kernel = small("matvec", prefetch=(ALONE,))
    blocks = kernel.grid[0]
    assert kernel.ahead_bytes == blocks * sum(size for _, size in ALONE.shares(blocks))
    assert "cp.async.bulk.prefetch.L2.global" in kernel.text and ".target sm_90" in kernel.text


def test_a_block_asks_for_a_megabyte_at_most():
    """ptxas accepts no larger size."""
    large = Prefetch(((16, 128),), rows=4096, first=0, last=4096)
    ((_, size),) = large.shares(1)
    assert size == (1 << 20) - 16


def test_matrices_of_a_stack_that_lie_askew_are_left_out():
    askew = Prefetch(((1, 2),), rows=3, first=0, last=3, layers=4)
    assert askew.shares(1) == [(0, 0)]


def test_rows_lie_inside():
    with pytest.raises(KernelError, match="prefetch of rows 3 to 9: the matrix has 8"):
        Prefetch(PLANES, rows=8, first=3, last=9)


def run(kernel: Kernel) -> None:
    """Simulates the kernel on zero operands and results."""
    buffers = [
        DeviceBuffer(b.name, np.zeros(b.shape, b.type.dtype), b.role)
        for b in (*kernel.operands, *kernel.results)
    ]
    launch(kernel.text, buffers, kernel.grid, kernel.block, kernel.dynamic_shared_bytes)


def altered(kernel: Kernel, old: str, new: str) -> Kernel:
    assert kernel.text.count(old) == 1
    return Kernel(
        kernel.name,
        kernel.text.replace(old, new),
        kernel.buffers,
        kernel.grid,
        kernel.block,
        kernel.dynamic_shared_bytes,
    )


def test_the_simulator_refuses_bytes_outside():
    kernel = small("quantize_q8_1", prefetch=(Prefetch(((1, 16),), rows=8, first=0, last=8),))
    (_, size) = kernel.arguments["prefetch"][0].shares(kernel.grid[0])[0]
    run(kernel)
    with pytest.raises(OutOfBounds, match="ahead0_0, which has 128 bytes"):
        run(altered(kernel, f"], {size};", f"], {size + 16};"))
    with pytest.raises(Misaligned, match="no multiple of 16"):
        run(altered(kernel, f"], {size};", f"], {size + 8};"))


def test_bytes_asked_for_are_not_the_launchs_own():
    assert traffic(small("matvec", prefetch=(ALONE,))) == traffic(small("matvec"))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_machine_code(arch):
    """One instruction per plane, and no spills."""
    made = assemble(small("matvec", prefetch=(ALONE, STACK)).text, arch)
    found = [i.name for i in disassemble(made.cubin) if i.name.startswith("UBLKPF")]
    assert len(found) == 3 and made.spill_store_bytes == 0
