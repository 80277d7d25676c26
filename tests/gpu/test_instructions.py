"""Each row of the instruction table gives the same bits on a device and in the simulator.

Values are random and special.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.instruction_rows import Group, differences, groups

from ptx_kernels import driver, simulator

pytestmark = pytest.mark.gpu

GROUPS = list(groups(seed=1))


@pytest.fixture(scope="module")
def gpu():
    with driver.Device() as device:
        yield device


def label(group: Group) -> str:
    (major, minor), sm = group.rows[0].needs
    return f"{major}.{minor}-sm_{sm}-{group.rows[0].opcode}"


@pytest.mark.parametrize("group", GROUPS, ids=label)
def test_device_and_simulator_agree(group: Group, gpu) -> None:
    if int(gpu.facts.arch.removeprefix("sm_").rstrip("af")) < group.rows[0].needs[1]:
        pytest.skip(f"{gpu.facts.arch} lacks what needs sm_{group.rows[0].needs[1]}")
    (got,) = gpu.run(group.kernel, *group.operands)
    (want,) = simulator.run(group.kernel, *group.operands)
    wrong = []
    for i, row in enumerate(group.rows):
        for at in np.flatnonzero(differences(row, got[i], want[i]))[:3]:
            operands = ", ".join(f"{int(x[i, at]):#x}" for x in group.operands[: len(row.operands)])
            wrong.append(
                f"{row.opcode} {operands}: device {int(got[i, at]):#x}, "
                f"simulator {int(want[i, at]):#x}"
            )
    assert not wrong, "\n".join(wrong)
