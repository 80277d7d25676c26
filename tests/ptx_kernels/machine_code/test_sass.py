"""Parsing SASS: instructions, loops from control flow, the mix, loads in flight."""

from __future__ import annotations

import pytest

from ptx_kernels.machine_code.sass import (
    CATEGORIES,
    classify,
    hot_loop,
    innermost_loops,
    load_bits,
    parse,
)


def listing(text: str) -> str:
    """Makes an nvdisasm listing from one instruction or label per line."""
    lines, address = [], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(lines)


NESTED = listing("""
    MOV R1, c[0x0][0x28]
    .L_x_0:
    ISETP.GE.AND P0, PT, R2, 0x3, PT
    .L_x_1:
    LDG.E.128.CONSTANT R4, desc[UR6][R28.64]
    IDP.4A.U8.S8 R12, R4, R16, R12
    @!P0 BRA `(.L_x_1)
    .L_x_2:
    LDG.E R20, desc[UR6][R28.64]
    FFMA R20, R20, R20, R20
    FADD R20, R20, R20
    @P1 BRA `(.L_x_2)
    @P2 BRA `(.L_x_0)
    EXIT
    .L_x_3:
    BRA `(.L_x_3)
    NOP
""")

# An unlikely block after the end jumps back to the middle: a backward jump, but no loop.
OUT_OF_LINE = listing("""
    ISETP.GE.AND P0, PT, R2, 0x3, PT
    @P0 BRA `(.L_x_1)
    .L_x_0:
    STG.E desc[UR6][R2.64], R5
    EXIT
    .L_x_1:
    MOV R5, RZ
    BRA `(.L_x_0)
""")


def test_parses_guard_opcode_operands_and_target():
    code = parse(NESTED)
    assert (
        code[4].predicate == "@!P0"
        and code[4].opcode == "BRA"
        and code[4].target == code[2].address == 0x20
    )
    assert code[2].opcode == "LDG.E.128.CONSTANT" and code[2].operands == "R4, desc[UR6][R28.64]"
    assert code[0].target is None


def test_finds_innermost_loops_only():
    loops = innermost_loops(parse(NESTED))
    assert [[i.name for i in loop.instructions] for loop in loops] == [
        ["LDG", "IDP", "BRA"],
        ["LDG", "FFMA", "FADD", "BRA"],
    ]


def test_hot_loop_is_the_one_with_the_dot_products():
    loop = hot_loop(parse(NESTED))
    assert loop is not None
    assert loop.mix() == {"load global 128": 1, "dp4a": 1, "control": 1}
    assert loop.issued() == 3


def test_a_backward_jump_alone_is_no_loop():
    assert innermost_loops(parse(OUT_OF_LINE)) == []
    assert hot_loop(parse(OUT_OF_LINE)) is None
    assert hot_loop(()) is None


def test_uniform_branch_falls_through():
    code = parse(
        listing("""
        .L_x_0:
        IADD3 R0, R0, 0x1, RZ
        BRA.U !UP0, `(.L_x_0)
        STG.E desc[UR6][R2.64], R0
        EXIT
    """)
    )
    assert [len(loop) for loop in innermost_loops(code)] == [2]


def test_loop_of_several_blocks():
    code = parse(
        listing("""
        .L_x_0:
        @P1 BRA `(.L_x_1)
        FADD R0, R0, R0
        .L_x_1:
        IADD3 R1, R1, 0x1, RZ
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    )
    assert [len(loop) for loop in innermost_loops(code)] == [4]


def test_counts_loads_in_flight_across_turns():
    code = parse(
        listing("""
        .L_x_0:
        IDP.4A.U8.S8 R0, R4, R5, R0
        LDG.E.128.CONSTANT R4, desc[UR6][R28.64]
        IDP.4A.U8.S8 R0, R8, R9, R0
        LDG.E.128.CONSTANT R8, desc[UR6][R28.64+0x10]
        LDG.E R20, desc[UR6][R28.64+0x20]
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    )
    loop = hot_loop(code)
    assert loop is not None and loop.loads_in_flight() == 2


def test_distance_from_a_load_to_its_use():
    """Six instructions, across the loop's end; R20 is never used, and no load fills R32."""
    code = parse(
        listing("""
        .L_x_0:
        IDP.4A.U8.S8 R0, R14, R5, R0
        IDP.4A.U8.S8 R0, R4, R8, R0
        LDG.E.128.CONSTANT R12, desc[UR6][R28.64]
        LDG.E R20, desc[UR6][R28.64+0x20]
        LDG.E.64.CONSTANT R4, desc[UR6][R28.64+0x10]
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    )
    loop = hot_loop(code)
    assert loop is not None

    def of(register: str) -> float | None:
        return loop.load_to_use(lambda i: i.operands.startswith(f"{register},"))

    assert of("R12") == 3 / 6 and of("R4") == 1 / 6 and of("R20") == 1 and of("R32") is None
    assert loop.load_to_use() == 1 / 6


@pytest.mark.parametrize(
    "opcode, operands, category",
    [
        ("LDG.E.128.CONSTANT", "R4, desc[UR6][R2.64]", "load global 128"),
        ("LDG.E.64", "R4, [R2.64]", "load global 64"),
        ("LDG.E", "R4, [R2.64]", "load global 32"),
        ("LDG.E.U8.CONSTANT", "R4, [R2.64]", "load global narrow"),
        ("STG.E.128", "[R2.64], R4", "store global"),
        ("LDS.128", "R4, [R0]", "shared"),
        ("LDGSTS.E.BYPASS.128", "[R0], [R2.64]", "async copy"),
        ("STL.64", "[R1], R4", "local"),
        ("IDP.4A.U8.S8", "R0, R1, R2, R3", "dp4a"),
        ("IMMA.16832.S8.S8", "R0, R1, R2, R3", "mma"),
        ("HGMMA.64x64x16.F32.BF16", "R0, R1", "mma"),
        ("SHFL.BFLY", "PT, R0, R1, 0x1, 0x1f", "shuffle"),
        ("I2FP.F32.S32", "R0, R1", "conversion"),
        ("HADD2.F32", "R0, -RZ, R1.H0_H0", "conversion"),
        ("HFMA2.MMA", "R4, -RZ, RZ, 0, 0", "other"),
        ("HFMA2", "R4, R5, R6, R7", "float"),
        ("FFMA", "R0, R1, R2, R3", "float"),
        ("MUFU.RCP", "R0, R1", "float"),
        ("FSETP.NEU.AND", "P0, PT, R0, R1, PT", "float"),
        ("IMAD.WIDE.U32", "R0, R1, 0x4, R2", "integer"),
        ("IMAD.MOV.U32", "R0, RZ, RZ, R1", "other"),
        ("IADD3", "R0, R1, R2, RZ", "integer"),
        ("IADD.64", "R0, R2, 0x10", "integer"),
        ("VIADD", "R0, R1, 0x1", "integer"),
        ("LOP3.LUT", "R0, R1, 0xf, RZ, 0xc0, !PT", "integer"),
        ("SHF.R.U32.HI", "R0, RZ, 0x4, R1", "integer"),
        ("PRMT", "R0, R1, 0x7770, RZ", "integer"),
        ("ISETP.GE.U32.AND", "P0, PT, R0, 0x3, PT", "integer"),
        ("UIADD3", "UR4, UR4, 0x1, URZ", "integer"),
        ("BAR.SYNC.DEFER_BLOCKING", "0x0", "control"),
        ("BSYNC", "B0", "control"),
        ("MOV", "R0, R1", "other"),
        ("S2R", "R0, SR_TID.X", "other"),
    ],
)
def test_classifies(opcode, operands, category):
    assert classify(opcode, operands) == category
    assert category in CATEGORIES


def test_load_bits():
    assert [
        load_bits(o) for o in ("LDG.E.128", "LDG.E", "LDG.E.U16", "LDG.E.S8", "LDG.E.64.STRONG.GPU")
    ] == [
        128,
        32,
        16,
        8,
        64,
    ]
