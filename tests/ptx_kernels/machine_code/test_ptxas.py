"""ptxas on every kernel for every architecture: its report, and the resulting occupancy."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterable

import pytest
from support.assembled import assemble_each

from ptx_kernels.devices import DEVICES
from ptx_kernels.kernels import CASES, KERNELS, Case
from ptx_kernels.machine_code import ptxas
from ptx_kernels.machine_code.ptxas import (
    MULTIPROCESSORS,
    TARGETS,
    Assembly,
    AssemblyError,
    ToolNotFoundError,
    assemble,
    assemble_together,
    find_tool,
    occupancy,
    shared_split,
    tool_version,
)
from ptx_kernels.machine_code.report import Code, code, codes
from ptx_kernels.ptx import Kernel

HEADER = ".version 7.0\n.target sm_61\n.address_size 64\n"
ADD_ONE = (
    HEADER
    + """.visible .entry add_one(.param .u64 p0)
{
  .reg .b32 %r<3>;
  .reg .b64 %rd<3>;
  .shared .align 16 .b8 kept[256];
  ld.param.u64 %rd0, [p0];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd1, %r0, 4;
  add.u64 %rd2, %rd0, %rd1;
  ld.global.u32 %r1, [%rd2];
  mov.u32 %r2, kept;
  st.shared.u32 [%r2], %r1;
  add.u32 %r1, %r1, 1;
  st.global.u32 [%rd2], %r1;
  ret;
}
"""
)


def test_reports_what_ptxas_says():
    assembly = assemble(ADD_ONE, "sm_90")
    assert assembly.arch == "sm_90"
    assert 4 <= assembly.registers <= 16
    assert assembly.shared_bytes == 256
    assert (assembly.spill_store_bytes, assembly.spill_load_bytes, assembly.stack_bytes) == (
        0,
        0,
        0,
    )
    assert assembly.cubin.startswith(b"\x7fELF")


def test_reports_spills():
    count = 64
    loads = "".join(f"  ld.volatile.global.u32 %r{i}, [%rd0+{4 * i}];\n" for i in range(count))
    stores = "".join(
        f"  st.volatile.global.u32 [%rd0+{4 * i}], %r{count - 1 - i};\n" for i in range(count)
    )
    text = (
        HEADER + ".visible .entry many(.param .u64 p0)\n.maxnreg 32\n{\n"
        f"  .reg .b32 %r<{count}>;\n  .reg .b64 %rd<1>;\n  ld.param.u64 %rd0, [p0];\n"
        f"{loads}{stores}  ret;\n}}\n"
    )
    assembly = assemble(text, "sm_90")
    assert assembly.registers <= 32
    assert (
        assembly.spill_store_bytes > 0
        and assembly.spill_load_bytes > 0
        and assembly.stack_bytes > 0
    )


def test_refusal_names_the_line():
    with pytest.raises(
        AssemblyError,
        match=r"ptxas -arch=sm_80 refused(.|\n)*Unexpected instruction types(.|\n)*"
        r"line 16: add\.x32 %r1, %r1, 1;",
    ):
        assemble(ADD_ONE.replace("add.u32 %r1", "add.x32 %r1"), "sm_80")


def test_two_entries_are_refused():
    second = ADD_ONE.replace(HEADER, "").replace("add_one", "again")
    with pytest.raises(AssemblyError, match="expected one entry, found 2"):
        assemble(ADD_ONE + second, "sm_90")


def listing(machine: Code) -> list[tuple[str, str, int | None]]:
    """The hot loop without labels and names, which are numbered within a cubin."""
    return [
        (i.opcode, re.sub(r"`\(.*?\)", "", i.operands), i.target) for i in machine.body.instructions
    ]


def test_several_kernels_in_one_go_are_the_same_as_one_by_one():
    """Kernels with the same name and different targets, with and without dynamic shared memory."""
    chosen = [
        case for case in CASES if case.label in ("gemm-Q8_0-4864x896-m64", "rms_norm-f32-4096")
    ]
    kernels = [KERNELS[case.family](**case.arguments) for case in (*chosen, chosen[0])]
    assert len({kernel.text.splitlines()[1] for kernel in kernels}) == 2
    for kernel, found in zip(kernels, codes(kernels, "sm_90"), strict=True):
        alone = code(kernel, "sm_90")
        assert dataclasses.replace(found.assembly, cubin=alone.assembly.cubin) == alone.assembly
        assert found.looped == alone.looped
        opcodes = [[i.opcode for i in each.stretches.once] for each in (found, alone)]
        assert opcodes[0] == opcodes[1]
        assert listing(found) == listing(alone)
    assert codes([], "sm_90") == []


def test_tests_assemble_many_at_once_as_one_by_one():
    """Each text is assembled alone, and together with others of the same target."""
    texts = [KERNELS[case.family](**case.arguments).text for case in CASES[::40]]
    together = assemble_each(texts)
    assert list(together) and {arch for _, arch in together} == set(TARGETS)
    for text in texts:
        alone = assemble(text, "sm_90")  # as new as each text
        assert dataclasses.replace(together[text, "sm_90"], cubin=alone.cubin) == alone


def test_texts_that_hold_no_single_entry_are_not_joined():
    with pytest.raises(AssemblyError, match="expected one '.visible .entry ' in each text"):
        assemble_together([ADD_ONE, HEADER], "sm_90")
    with pytest.raises(AssemblyError, match=r"line \d: bogus"):
        assemble_together([HEADER + ".visible .entry k()\n{\n  bogus;\n}\n"], "sm_90")


def test_missing_tool_says_what_to_install(monkeypatch):
    find_tool.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ptxas.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(
        ToolNotFoundError, match="ptxas was not found.*pip install 'nvidia-cuda-nvcc"
    ):
        find_tool("ptxas")
    find_tool.cache_clear()


def test_tool_version():
    assert int(tool_version("ptxas").split(".")[0]) >= 12


def _assembly(registers: int = 32, shared_bytes: int = 0, arch: str = "sm_90") -> Assembly:
    return Assembly(arch, registers, 0, 0, 0, shared_bytes, b"")


@pytest.mark.parametrize(
    "registers, threads, shared, blocks, limit",
    [
        (32, 128, 0, 16, "warps"),
        (80, 128, 0, 6, "registers"),  # 65536 / 2560 = 25 warps, 24 in fours
        (255, 256, 0, 1, "registers"),
        (32, 32, 0, 32, "blocks"),
        (16, 128, 40 << 10, 5, "shared memory"),  # 228 KB / (40 + 1) KB
        (65, 1024, 0, 0, "registers"),
    ],
)
def test_occupancy(registers, threads, shared, blocks, limit):
    got = occupancy(_assembly(registers), threads, shared)
    assert (got.blocks, got.limit) == (blocks, limit)
    assert got.warps == blocks * threads // 32
    assert got.fraction == got.warps / 64


@pytest.mark.parametrize(
    "registers, threads, shared, arch, size",
    [
        (255, 256, 0, "sm_90", 8),  # a block, with the kilobyte that every block occupies
        (128, 512, 7 << 10, "sm_90", 8),
        (128, 512, (7 << 10) + 1, "sm_90", 16),
        (32, 128, 0, "sm_90", 16),  # sixteen blocks
        (32, 128, 8 << 10, "sm_90", 164),  # sixteen blocks of 9 KB
        (32, 128, 60 << 10, "sm_80", 132),  # two blocks of 61 KB
        (32, 128, 60 << 10, "sm_120", 64),
    ],
)
def test_shared_memory_is_the_least_size_that_holds_all_blocks(
    registers, threads, shared, arch, size
):
    assert shared_split(_assembly(registers, shared, arch), threads) == size << 10


@pytest.mark.parametrize("arch, size", [("sm_80", 164), ("sm_90", 228), ("sm_120", 100)])
def test_shared_memory_is_the_largest_with_a_dynamic_part(arch, size):
    """XLA asks the driver for it."""
    assert shared_split(_assembly(arch=arch), 128, 16) == size << 10


@pytest.mark.parametrize("arch, blocks", [("sm_80", 32), ("sm_86", 16), ("sm_89", 24)])
def test_blocks_of_one_warp(arch, blocks):
    assert occupancy(_assembly(arch=arch), 32).blocks == blocks


def test_the_multiprocessor_of_every_known_device():
    assert {device.arch for device in DEVICES.values()} == {*MULTIPROCESSORS}


def test_occupancy_refuses_what_cannot_be():
    with pytest.raises(ValueError, match=r"threads=2048 must be in 1 to 1024"):
        occupancy(_assembly(), 2048)
    with pytest.raises(ValueError, match=r"arch='sm_70' must be one of sm_75, sm_80"):
        occupancy(_assembly(arch="sm_70"), 128)


@functools.cache
def every_kernel() -> dict[str, Kernel]:
    """Maps a case's label to its kernel."""
    return {case.label: KERNELS[case.family](**case.arguments) for case in CASES}


def spilling(cases: Iterable[Case], archs: Iterable[str]) -> list[str]:
    """Labels and targets of kernels that spill, or were not assembled although they could be."""
    kernels = {case.label: every_kernel()[case.label] for case in cases}
    made = assemble_each((kernel.text for kernel in kernels.values()), archs)
    wrong = []
    for label, kernel in kernels.items():
        for arch in archs:
            found = made.get((kernel.text, arch))
            if max(kernel.cluster) > 1 and arch == "sm_80":
                fits = found is None  # it has no clusters
            else:
                fits = found is not None and not (
                    found.spill_store_bytes or found.spill_load_bytes or found.stack_bytes
                )
            if not fits:
                wrong.append(f"{label} {arch}: {found}")
    return wrong


@pytest.mark.slow("assembles hundreds of kernels", quick=["sm_90"])
@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_assembles_without_spills(arch):
    assert spilling(CASES, [arch]) == []


def test_a_kernel_of_every_family_assembles_for_every_target():
    one_each = {case.family: case for case in CASES}
    assert spilling(one_each.values(), TARGETS) == []


def test_spills_are_found(monkeypatch):
    few = dataclasses.replace(assemble(ADD_ONE, "sm_90"), spill_load_bytes=4)
    made = {(KERNELS[case.family](**case.arguments).text, "sm_90"): few for case in CASES[:2]}
    monkeypatch.setitem(spilling.__globals__, "assemble_each", lambda *_: made)
    assert len(spilling(CASES[:2], ["sm_90"])) == 2
    monkeypatch.setitem(spilling.__globals__, "assemble_each", lambda *_: {})
    assert len(spilling(CASES[:2], ["sm_90"])) == 2


def test_every_family_has_a_case():
    assert {case.family for case in CASES} == set(KERNELS)
    assert len({case.label for case in CASES}) == len(CASES)
