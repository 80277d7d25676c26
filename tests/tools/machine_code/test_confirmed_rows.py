"""Machine code of every row that kernels use gives the simulator's values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import pytest
from support.instruction_rows import Group, differences, groups, opcodes
from support.subjects import SUBJECTS, subject

from ptx_kernels import simulator
from ptx_kernels.ptx import KernelError
from ptx_kernels.ptx.instructions import INSTRUCTIONS
from ptx_kernels.ptx.oldest import COMMON
from tools.machine_code import load, run


def _texts(oldest: int) -> Iterator[str]:
    for label in SUBJECTS:
        with contextlib.suppress(KernelError):  # tests/ptx_kernels/test_turing.py has the list
            yield subject(label, oldest).kernel.text


@functools.cache
def _groups(oldest: int) -> list[Group]:
    used = INSTRUCTIONS.keys() & set().union(*map(opcodes, _texts(oldest)))
    return list(groups(seed=1, rows=[INSTRUCTIONS[name] for name in used]))


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_rows_that_kernels_use(target):
    """Random and special values; NaN equal NaN, and approximations are within the stated error."""
    count = 0
    for group in _groups(min(int(target[3:]), COMMON)):
        got = run(load(group.kernel, target), group.operands).arrays[0]
        (want,) = simulator.run(group.kernel, *group.operands)
        for i, row in enumerate(group.rows):
            wrong = differences(row, got[i], want[i])
            assert not wrong.any(), f"{row.opcode}, element {np.argmax(wrong)}"
            count += 1
    assert count >= 85
