"""Budgets of the kernels that Llama 3.1 8B's programs launch, which `program_budgets` holds."""

from __future__ import annotations

import functools

import pytest
from program_budgets import BUDGETS, Limits

from ptx_kernels.machine_code.accesses import accesses
from ptx_kernels.machine_code.report import Code, code
from ptx_kernels.machine_code.sass import disassemble, load_bits
from ptx_kernels.machine_code.work import packed_weights, work
from ptx_kernels.ptx import Kernel
from tools import aot
from tools.program_kernels import Asked, program_kernels

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

assembled = functools.cache(functools.partial(code, arch="sm_90"))


def label(kernel: Kernel) -> str:
    """`gemm_q4_k_m32 14336x4096`; the name alone of what is no product."""
    packed = packed_weights(kernel)
    if packed is None:
        return kernel.name
    columns = kernel.arguments["columns"]
    rows = kernel.arguments.get("n") or packed.count // columns
    return f"{kernel.name} {rows}x{columns}"


def found(kernel: Kernel, machine: Code) -> Limits:
    """Today's figures; of what is no product, conflicts alone."""
    conflicts = accesses(kernel).shared_excess
    if packed_weights(kernel) is None:
        return Limits(None, None, conflicts)
    quant_bytes = work(kernel, machine.body, whole=not machine.looped).quant_bytes
    assert quant_bytes
    loads = [
        load_bits(i.opcode)
        for i in machine.body.instructions
        if i.category.startswith("load global") and ".CONSTANT" in i.opcode
    ]
    return Limits(machine.body.issued() / quant_bytes, max(loads, default=None), conflicts)


@pytest.mark.parametrize("program", BUDGETS, ids=str)
def test_no_kernel_costs_more(program: Asked):
    """And each has its limits: a kernel that is new in a program gets a row."""
    budgets, seen = BUDGETS[program], set()
    for kernel in program_kernels(program).kernels:
        name, machine = label(kernel), assembled(kernel)
        now, most = found(kernel, machine), budgets.get(name)
        seen.add(name)
        assert machine.assembly.spill_store_bytes == machine.assembly.stack_bytes == 0, name
        if most is None:  # neither a product nor in shared memory
            assert now == Limits(None, None, 1.0), (name, now)
            continue
        assert now.conflicts <= most.conflicts, (name, now)
        assert (now.instructions is None) == (most.instructions is None), (name, now)
        if now.instructions is not None and most.instructions is not None:
            assert now.instructions <= most.instructions, (name, now)
        assert (now.load_bits is None) == (most.load_bits is None), (name, now)
        if now.load_bits is not None and most.load_bits is not None:
            assert now.load_bits >= most.load_bits, (name, now)
    assert seen >= set(budgets), "budgets of kernels that the program launches no more"


@pytest.mark.parametrize("batch", [1, 8])
def test_launches_of_a_step_ask_for_the_next_weights(batch):
    """Projections, attention, its output, gate and up, down: of a layer all that read weights.

    They ask for 5 MB at least, by an instruction for each plane of each matrix.
    """
    asking = [
        k for k in program_kernels(Asked("llama-3.1-8b", batch=batch)).kernels if k.ahead_bytes
    ]
    of_layers = {"paged_attention", "q4_k", "qkv", "gated"}
    assert all(any(part in kernel.name for kernel in asking) for part in of_layers)
    for kernel in asking:
        assert kernel.ahead_bytes >= 5e6, kernel.name
        machine = assembled(kernel).assembly
        found = [i for i in disassemble(machine.cubin) if i.name.startswith("UBLKPF")]
        planes = sum(len(each.planes) for each in kernel.arguments["prefetch"])
        assert len(found) == planes, kernel.name


def test_no_budget_is_looser_than_the_code_that_it_bounds():
    """Every row is of a target's kind, and none asks for less than a clock allows."""
    for budgets in BUDGETS.values():
        for name, budget in budgets.items():
            assert (budget.instructions is None) == (budget.target.instructions is None), name
            assert budget.conflicts >= 1.0
