"""Machine code of every row that kernels use gives the simulator's values."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.instruction_rows import Group, differences, groups, opcodes
from support.subjects import SUBJECTS, subject

from ptx_kernels import simulator
from ptx_kernels.ptx.instructions import INSTRUCTIONS
from tools.machine_code import load, run


@functools.cache
def _groups() -> list[Group]:
    used = set().union(*(opcodes(subject(label).kernel.text) for label in SUBJECTS))
    return list(groups(seed=1, rows=[INSTRUCTIONS[name] for name in INSTRUCTIONS.keys() & used]))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_rows_that_kernels_use(target):
    """Random and special values; NaN equal NaN, and approximations are within the stated error."""
    count = 0
    for group in _groups():
        got = run(load(group.kernel, target), group.operands).arrays[0]
        (want,) = simulator.run(group.kernel, *group.operands)
        for i, row in enumerate(group.rows):
            wrong = differences(row, got[i], want[i])
            assert not wrong.any(), f"{row.opcode}, element {np.argmax(wrong)}"
            count += 1
    assert count >= 90
