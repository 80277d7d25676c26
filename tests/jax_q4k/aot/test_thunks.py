"""The parser of XLA's dump, on a sample text."""

from __future__ import annotations

import pytest

from tools.thunks import Array, parse_hlo, parse_thunks

HLO = """\
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %fusion.1 = (s32[], f32[2,2]{1,0}) fusion(%p#0, %p#1), kind=kLoop, calls=%f, \
metadata={op_name="jit(f)/while/add"}
  ROOT %copy.2 = bf16[4]{0} copy(%x)
}
ENTRY %main (a: f32[4]) -> f32[4] {
  %call.3 = f32[4]{0} custom-call(%a), custom_call_target="some_target", \
backend_config={x = 1 : i32}
}
"""
SEQUENCE = """\
000: kCommandBuffer [source | sink]
    001: kWhile [source       | next=004 (1)]
condition:
        002: kCustomKernel [source | sink] fusion_1 grid: [3, 2, 1] \
threads: [32, 4, 1]  shared_memory: 16 bytes
      body:
        003: kCopy [source | sink] kCopy
004: kCustomKernel [prev=001 (1) | sink] call grid: [1, 1, 1] \
threads: [1, 1, 1]  shared_memory: 0 bytes
"""
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n'
    f"    thunk_id: {id_}\n  }}\n"
    f'  thunk_kind: "{kind}"\n}}\n'
    for id_, name, kind in [
        (1, "while.9", "kWhile"),
        (2, "fusion.1", "kCustomKernel"),
        (3, "copy.2", "kCopy"),
        (4, "call.3", "kCustomKernel"),
    ]
)


def test_instructions():
    found = parse_hlo(HLO)
    assert found["fusion.1"].results == (Array("s32", ()), Array("f32", (2, 2)))
    assert (found["fusion.1"].opcode, found["fusion.1"].op_name) == ("fusion", "jit(f)/while/add")
    assert [str(r) for r in found["copy.2"].results] == ["bf16[4]"]
    assert found["call.3"].target == "some_target"


def test_nesting_geometry_and_instructions():
    buffer, loop, kernel, copy, call = parse_thunks(SEQUENCE, METADATA, HLO)
    assert (
        [p.kind for p in kernel.parents]
        == [p.kind for p in copy.parents]
        == ["kCommandBuffer", "kWhile"]
    )
    assert loop.parents == (buffer,) and call.parents == ()
    assert (kernel.name, kernel.grid, kernel.block, kernel.shared_bytes) == (
        "fusion_1",
        (3, 2, 1),
        (32, 4, 1),
        16,
    )
    assert [t.instruction.name for t in (kernel, copy, call)] == ["fusion.1", "copy.2", "call.3"]


@pytest.mark.parametrize("sequence", ["000: something else", "007: kCopy [source | sink] kCopy"])
def test_unreadable_thunks_are_an_error(sequence):
    with pytest.raises(ValueError, match="thunk"):
        parse_thunks(sequence, METADATA, HLO)


def test_a_copy_without_a_name_is_its_wrappers():
    """JAX 0.12 prints this for a slice that is copied during other work."""
    sequence = (
        "005: kAsyncStart [source | next=009 (1)] stream=computation_stream[0], async_id=5\n"
        "    007: kDynamicSliceFusion [source | sink] params=1, results=1\n"
        "        006: kCopy [source | sink] kCopy\n"
        "008: kAsyncDone [prev=005 (1) | sink] async_id=5\n"
    )
    metadata = (
        'thunk_metadata {\n  thunk_info {\n    profile_annotation: "fusion-start"\n'
        '    thunk_id: 5\n  }\n  thunk_kind: "kAsyncStart"\n}\n'
    )
    hlo = "  %fusion-start = ((u8[4,2]{1,0}), u8[1,2]{1,0}, u32[]) fusion-start(%p), kind=kLoop\n"
    copy = parse_thunks(sequence, metadata, hlo)[2]
    assert copy.kind == "kCopy" and copy.instruction.name == "fusion-start"
