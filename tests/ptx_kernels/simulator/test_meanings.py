"""Rows of instructions that need the machine, and the simulator's meanings for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ptx_kernels import simulator  # noqa: F401  (registers all meanings)
from ptx_kernels.ptx import Builder, KernelError, kernel, u32
from ptx_kernels.ptx.instructions import INSTRUCTIONS, machine_row
from ptx_kernels.ptx.instructions.machine_row import machine_names
from ptx_kernels.ptx.issue import issue
from ptx_kernels.simulator.steps.meaning import meaning_names


def test_every_row_has_a_meaning_and_every_meaning_a_row() -> None:
    assert machine_names() == meaning_names()


def test_no_opcode_has_two_rows() -> None:
    assert not [opcode for opcode in INSTRUCTIONS if machine_row(opcode)]


def test_the_core_does_without_hopper() -> None:
    """Importing everything except the package's `__init__` does not load sm_90's instructions."""
    program = """
import sys, types, pathlib, ptx_kernels
package = types.ModuleType("ptx_kernels.simulator")
package.__path__ = [str(pathlib.Path(ptx_kernels.__file__).parent / "simulator")]
sys.modules["ptx_kernels.simulator"] = package
import ptx_kernels.simulator.launch
print([name for name in sys.modules if "simulator.hopper" in name])
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "opcode, operands, message",
    [
        ("ld.global.v3.u32", (), "ld.global.v3.u32 is not in the instruction table"),
        ("cp.async.wait_group", (), "cp.async.wait_group takes 1 operands, got 0"),
        ("cp.async.ca.shared.global", ("4",) * 5, "takes 3 or 4 operands, got 5"),
        ("ld.shared.u32", ("%r0", "global"), "ld.shared.u32 needs an address in shared memory"),
    ],
)
def test_the_builder_refuses_what_no_row_spells(
    opcode: str, operands: tuple[str, ...], message: str
) -> None:
    @kernel
    def wrong(k: Builder) -> None:
        x = k.input("x", u32, (4,))
        issue(k, opcode, *(x if text == "global" else text for text in operands))

    with pytest.raises(KernelError, match=message):
        wrong()
