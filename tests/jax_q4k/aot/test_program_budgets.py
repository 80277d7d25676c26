"""Checks the kernels of Llama 3.1 8B's programs against the budgets in `program_budgets`."""

from __future__ import annotations

import functools

import pytest
from support.program_budgets import BUDGETS, KILOBYTES_AHEAD, LOAD_TO_USE, Limits

from ptx_kernels.devices import REFERENCE
from ptx_kernels.machine_code.accesses import accesses
from ptx_kernels.machine_code.model import predict
from ptx_kernels.machine_code.ptxas import shared_split
from ptx_kernels.machine_code.report import Code, code, launch, work_of_loops
from ptx_kernels.machine_code.sass import SassInstruction, disassemble, load_bits
from ptx_kernels.machine_code.work import packed_weights
from ptx_kernels.ptx import Kernel
from ptx_kernels.ptx.split import SPLIT
from tools import aot
from tools.program_kernels import SHAPES, Asked, label, program_kernels

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

assembled = functools.cache(functools.partial(code, arch="sm_90"))


def found(kernel: Kernel, machine: Code) -> Limits:
    """Measures the current figures; only conflicts if the kernel is no product."""
    conflicts = accesses(kernel).shared_excess
    if packed_weights(kernel) is None:
        return Limits(None, None, conflicts)
    loops = machine.stretches.peers or (machine.body,)
    most = 0.0
    for loop, done in zip(loops, work_of_loops(kernel, machine), strict=True):
        assert done.quant_bytes
        most = max(most, loop.issued() / done.quant_bytes)
    loads = [load_bits(i.opcode) for i in machine.body.instructions if of_weights(i)]
    return Limits(most, max(loads, default=None), conflicts)


def of_weights(i: SassInstruction) -> bool:
    """Whether an instruction in a product loop loads packed weights."""
    return i.category.startswith("load global") and ".CONSTANT" in i.opcode


@pytest.mark.slow("assembles and simulates every kernel of a program")
@pytest.mark.parametrize("program", BUDGETS, ids=str)
def test_no_kernel_costs_more(program: Asked):
    """Each kernel needs limits: a kernel that is new in a program gets a row."""
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


@pytest.mark.slow("compiles programs for a GPU", quick=["batch=1"])
@pytest.mark.parametrize("batch", [1, 8])
def test_launches_of_a_step_ask_for_the_next_weights(batch):
    """All kernels of a layer that read weights or run attention prefetch the next weights.

    These are projections, attention, its output, gate and up, and down. Each prefetches at least 5
    MB, with one instruction for each plane of each matrix.
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


@pytest.mark.slow("compiles and assembles programs", quick=["llama-3.1-8b, batch 1-1"])
@pytest.mark.parametrize(
    "program, most",
    [
        *((Asked(shape, batch=1), 1) for shape in SHAPES),
        *((Asked(shape, batch=batch), 2) for shape in SHAPES for batch in (8, 32)),
        *((Asked(shape, prompt=512), 2) for shape in SHAPES),
    ],
    ids=str,
)
def test_kernels_of_a_program_split_the_memory_of_a_multiprocessor_alike(program, most):
    """Kernels without dynamic shared memory leave 192 KB of an H200's 256 to L1."""
    splits: dict[int, set[str]] = {}
    for kernel in program_kernels(program).kernels:
        assembly = assembled(kernel).assembly
        size = shared_split(assembly, kernel.block[0], kernel.dynamic_shared_bytes)
        splits.setdefault(size, set()).add(label(kernel))
    assert len(splits) <= most and splits.keys() <= {SPLIT, 228 << 10}, splits


def test_weights_are_under_way_while_warps_compute():
    """Loops over rows never wait for other warps, in a step of one sequence."""
    kilobytes = {}
    for kernel in program_kernels(Asked("llama-3.1-8b", batch=1)).kernels:
        if packed_weights(kernel) is None:
            continue
        name, machine = label(kernel), assembled(kernel)
        asked, parts = launch(kernel, machine), machine.stretches
        around = (*parts.outer, *parts.behind)
        assert machine.looped and asked is not None, name
        kilobytes[name] = predict(asked, REFERENCE).bytes_in_flight / 1024
        for loop in parts.peers:
            distance = loop.load_to_use(of_weights)
            assert distance is not None and distance >= LOAD_TO_USE, (name, distance)
            assert not any(i.name == "BAR" for i in (*loop.instructions, *around)), name
    assert kilobytes.keys() == KILOBYTES_AHEAD.keys()
    for name, least in KILOBYTES_AHEAD.items():
        assert kilobytes[name] >= least, (name, kilobytes[name])


def test_weights_are_asked_for_before_warps_wait():
    """Loads precede the first barrier and the norm of activations, in a step of one sequence.

    A kernel without staging has no barrier.
    """
    staged = 0
    for kernel in program_kernels(Asked("llama-3.1-8b", batch=1)).kernels:
        if packed_weights(kernel) is None:
            continue
        code = disassemble(assembled(kernel).assembly.cubin)
        first = next(at for at, i in enumerate(code) if of_weights(i))
        waits = [at for at, i in enumerate(code) if i.name == "BAR" or i.opcode == "MUFU.RSQ"]
        assert all(first < at for at in waits), label(kernel)
        staged += bool(waits)
    assert staged >= 5  # Q, K and V of two types, attention's output, gate and up, the head


def test_no_budget_is_looser_than_the_code_that_it_bounds():
    """Each row has a target of the same kind, and no conflict limit is below 1."""
    for budgets in BUDGETS.values():
        for name, budget in budgets.items():
            assert (budget.instructions is None) == (budget.target.instructions is None), name
            assert budget.conflicts >= 1.0
