"""Machine code of Llama 3.1 8B's kernels at full size gives the simulator's bits."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels.devices import DEVICES
from ptx_kernels.kernels.operands import random_operands
from tools import aot
from tools.machine_code import load
from tools.machine_code.__main__ import main
from tools.machine_code.confirm import disagreement
from tools.machine_code.machine import Shape
from tools.program_kernels import Asked, chosen_kernels, program_kernels

needs_compiler = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
MOST_BYTES = 300 << 20  # of operands: the head is left out
CLUSTERS = 2


@needs_compiler
@pytest.mark.slow("executes and simulates whole matrices")
def test_batch_1_at_full_size():
    """Every block of every kernel but the head's and its like."""
    kernels = [k for k in program_kernels(Asked("llama-3.1-8b")).kernels if _size(k) < MOST_BYTES]
    assert len(kernels) >= 10
    for kernel in kernels:
        assert not disagreement(load(kernel), random_operands(kernel, 0)), kernel.name


@needs_compiler
@pytest.mark.slow("executes and simulates blocks of whole matrices")
@pytest.mark.parametrize("asked", [{"batch": 8}, {"batch": 32}, {"prompt": 512}], ids=str)
def test_some_clusters_of_large_programs(asked):
    rng = np.random.default_rng(0)
    for kernel in program_kernels(Asked("llama-3.1-8b", **asked)).kernels:
        if _size(kernel) < MOST_BYTES:
            total = len(Shape.of(kernel).clusters())
            clusters = sorted(rng.choice(total, min(total, CLUSTERS), replace=False).tolist())
            found = disagreement(load(kernel), random_operands(kernel, 0), clusters=clusters)
            assert not found, kernel.name


@pytest.mark.slow("executes and simulates blocks of whole matrices")
@pytest.mark.parametrize(("device", "target"), [("T4", 75), ("A100", 80), ("RTX 5090", 120)])
def test_kernels_for_other_devices(device, target):
    """The last thread block of each kernel of a decode step and of a prompt, as machine code."""
    kernels = chosen_kernels(Asked("llama-3.1-8b"), DEVICES[device])
    kernels += chosen_kernels(Asked("llama-3.1-8b", prompt=64), DEVICES[device])
    for kernel in dict.fromkeys(kernels):
        if _size(kernel) < MOST_BYTES:
            program, last = load(kernel, f"sm_{target}"), len(Shape.of(kernel).clusters()) - 1
            found = disagreement(program, random_operands(kernel, 0), clusters=[last])
            assert not found, kernel.name


def _size(kernel):
    return sum(buffer.nbytes for buffer in kernel.operands)


def test_command(capsys):
    """Subjects by pattern; a target that ptxas does not know is named."""
    assert main(["--subjects", "quantize-f*", "--targets", "sm_90", "sm_10"]) == 0
    printed = capsys.readouterr().out
    assert "does not know sm_10" in printed
    assert "2 of 2 launches give the simulator's bits" in printed
    assert main(["--subjects", "none"]) == 1
