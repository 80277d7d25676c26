"""Every row of the instruction table: ptxas accepts its spelling, and its meaning is correct.

The simulator runs each row.
"""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from support.instruction_rows import Group, differences, extended, groups, narrow

from ptx_kernels import simulator
from ptx_kernels.kernels import CASES, KERNELS
from ptx_kernels.machine_code.ptxas import TARGETS, assemble
from ptx_kernels.ptx.instructions import INSTRUCTIONS

GROUPS = list(groups())


def test_every_row_is_in_a_group() -> None:
    assert sorted(row.opcode for group in GROUPS for row in group.rows) == sorted(INSTRUCTIONS)


@pytest.mark.parametrize("arch", TARGETS)
def test_ptxas_knows_every_row(arch: str) -> None:
    for group in GROUPS:
        if int(arch.removeprefix("sm_")) >= group.rows[0].needs[1]:
            assemble(group.kernel.text, arch)


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.rows[0].opcode)
def test_the_simulator_runs_what_a_row_means(group: Group) -> None:
    (got,) = simulator.run(group.kernel, *group.operands)
    for i, row in enumerate(group.rows):
        wrong = differences(row, got[i], extended(group.expected(i), row.result))
        assert not wrong.any(), f"{row.opcode}, element {np.argmax(wrong)}"


@pytest.mark.slow("builds every kernel")
def test_our_kernels_state_every_rounding() -> None:
    """ptxas may contract `mul.f32` and `add.f32` to fma; with .rn it must not."""
    for case in CASES:
        text = KERNELS[case.family](**case.arguments).text
        assert (
            re.findall(
                r"\b(?:add|sub|mul|fma|div|sqrt|rcp)(?:\.ftz|\.sat)*\.f(?:16|32)\b[^;]*", text
            )
            == []
        )


# --- meanings against exact arithmetic ---


def row_values(opcode: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns (operands, the table's results) for the values of the row's group."""
    for group in GROUPS:
        for i, row in enumerate(group.rows):
            if row.opcode == opcode:
                count = len(row.operands) - row.immediates
                return [
                    narrow(group.operands[j][i], row.operands[j]) for j in range(count)
                ], group.expected(i)
    raise KeyError(opcode)


def wrap(value: int, bits: int, signed: bool) -> int:
    value %= 1 << bits
    return value - (1 << bits) if signed and value >> bits - 1 else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def top_bit(a: int, bits: int) -> int:
    return (~a if a < 0 else a).bit_length() - 1


def insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    for i in range(min(length, max(0, bits - position))):
        b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


def clamped(value: int, bits: int, signed: bool) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return max(low, min(high, value))


#: name -> (operands..., bits) -> integer, wrapped to the result's type by the test
INTEGERS = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "mul.wide": lambda a, b, bits: a * b,
    "mad.lo": lambda a, b, c, bits: a * b + c,
    "mad.hi": lambda a, b, c, bits: (a * b >> bits) + c,
    "mad.wide": lambda a, b, c, bits: a * b + c,
    "div": lambda a, b, bits: truncated(a, b),
    "rem": lambda a, b, bits: a - truncated(a, b) * b,
    "sad": lambda a, b, c, bits: c + abs(a - b),
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "abs": lambda a, bits: abs(a),
    "neg": lambda a, bits: -a,
    "shr": lambda a, n, bits: a >> min(n, bits),
    "shl": lambda a, n, bits: a << min(n, bits),
    "popc": lambda a, bits: a.bit_count(),
    "clz": lambda a, bits: bits - a.bit_length(),
    "brev": lambda a, bits: int(f"{a:0{bits}b}"[::-1], 2),
    "bfind": lambda a, bits: top_bit(a, bits),
    "bfind.shiftamt": lambda a, bits: bits - 1 - top_bit(a, bits) if top_bit(a, bits) >= 0 else -1,
    "bfi": lambda a, b, p, n, bits: insert(a, b, p, n, bits),
    "shf.l.wrap": lambda a, b, n, bits: (b << 32 | a) << (n & 31) >> 32,
    "shf.l.clamp": lambda a, b, n, bits: (b << 32 | a) << min(n, 32) >> 32,
    "shf.r.wrap": lambda a, b, n, bits: (b << 32 | a) >> (n & 31),
    "shf.r.clamp": lambda a, b, n, bits: (b << 32 | a) >> min(n, 32),
    "lop3": lambda a, b, c, bits: (a & b) ^ ~c,
    "cnot": lambda a, bits: int(a == 0),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_meanings(name: str) -> None:
    opcodes = [o for o in INSTRUCTIONS if re.fullmatch(rf"{re.escape(name)}\.[usb](16|32|64)", o)]
    assert opcodes
    for opcode in opcodes:
        row = INSTRUCTIONS[opcode]
        operands, got = row_values(opcode)
        for *values, result in zip(*(o.tolist() for o in operands), got.tolist(), strict=True):
            exact = INTEGERS[name](*values, 8 * row.operands[0].size)
            want = wrap(exact, 8 * row.result.size, row.result.is_signed)
            assert result == want, f"{opcode} of {values}"


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(type_: str) -> None:
    """Follows PTX ISA 9.7.1.19 bit by bit, then extends the sign bit of the field.

    It is the operand's sign bit if the field exceeds the operand.
    """
    bits, signed = int(type_[1:]), type_[0] == "s"
    operands, got = row_values(f"bfe.{type_}")
    for a, position, length, result in zip(
        *(o.tolist() for o in operands), got.tolist(), strict=True
    ):
        sign = a >> min(position + length - 1, bits - 1) & 1 if signed and length else 0
        want = sum(
            (a >> position + i & 1 if i < length and position + i < bits else sign) << i
            for i in range(bits)
        )
        assert result == wrap(want, bits, signed), f"{a:#x}, {position}, {length}"


def test_integer_conversions() -> None:
    for opcode in INSTRUCTIONS:
        match = re.fullmatch(r"cvt\.(sat\.)?([us])(\d+)\.[us]\d+", opcode)
        if match:
            saturates, kind, bits = match.groups()
            (operand,), got = row_values(opcode)
            fit = clamped if saturates else wrap
            assert got.tolist() == [fit(v, int(bits), kind == "s") for v in operand.tolist()], (
                opcode
            )


#: float type -> (bits of the significand, exponent of the smallest ulp, largest finite value)
FORMATS = {
    "f32": (24, -149, Fraction(2) ** 128 - Fraction(2) ** 104),
    "f16": (11, -24, Fraction(65504)),
    "bf16": (8, -133, Fraction(2) ** 128 - Fraction(2) ** 120),
}
ROUND = {
    "rn": round,  # Python rounds a Fraction to even
    "rz": int,
    "rm": lambda q: q.__floor__(),
    "rp": lambda q: q.__ceil__(),
}


def rounded(exact: Fraction, type_: str, mode: str) -> float:
    """Rounds to the nearest float in the mode's direction.

    Overflow gives infinity or the largest float, as in IEEE 754.
    """
    precision, lowest, largest = FORMATS[type_]
    size = abs(exact)
    exponent = (
        size.numerator.bit_length()
        - size.denominator.bit_length()
        - (size < Fraction(2) ** (size.numerator.bit_length() - size.denominator.bit_length()))
    )
    place = Fraction(2) ** max(exponent - precision + 1, lowest)
    result = ROUND[mode](exact / place) * place
    if abs(result) > largest:
        inward = mode == "rz" or (mode == "rm") == (exact > 0) and mode in ("rm", "rp")
        return (
            float(largest) * (1 if exact > 0 else -1)
            if inward
            else float("inf") * (1 if exact > 0 else -1)
        )
    return float(result)


def as_float(values: np.ndarray, type_: str) -> list[float]:
    if type_ == "bf16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float64).tolist()


FLOATS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
}


@pytest.mark.parametrize("type_", FORMATS)
@pytest.mark.parametrize("name", FLOATS)
def test_float_meanings(name: str, type_: str) -> None:
    """Checks finite results with exact fractions, and signs of zeros whose exact value is not 0."""
    opcodes = [o for o in INSTRUCTIONS if re.fullmatch(rf"{name}\.(r[nzmp])\.{type_}", o)]
    assert opcodes or (name in ("div", "rcp") and type_ != "f32")
    for opcode in opcodes:
        operands, got = row_values(opcode)
        checked = 0
        for *values, result in zip(
            *(as_float(o, type_) for o in operands), as_float(got, type_), strict=True
        ):
            if not np.isfinite(values).all() or (name in ("div", "rcp") and values[-1] == 0):
                continue
            want = rounded(FLOATS[name](*map(Fraction, values)), type_, opcode.split(".")[1])
            assert result == want, f"{opcode} of {values}: {result!r}, not {want!r}"
            checked += 1
        assert checked > 100


def test_zeros_have_the_signs_of_ieee_754() -> None:
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    for mode, minus in {"rn": False, "rz": False, "rm": True, "rp": False}.items():
        for opcode, operands in {
            f"add.{mode}.f32": (one, -one),
            f"sub.{mode}.f32": (one, one),
            f"fma.{mode}.f32": (one, one, -one),
            f"add.{mode}.ftz.f32": (zero, -zero),
        }.items():
            assert np.signbit(INSTRUCTIONS[opcode].meaning(*operands))[0] == minus, opcode
        assert not np.signbit(INSTRUCTIONS[f"add.{mode}.f32"].meaning(zero, zero))[0]
        assert np.signbit(INSTRUCTIONS[f"add.{mode}.f32"].meaning(-zero, -zero))[0]
        assert np.signbit(INSTRUCTIONS[f"mul.{mode}.f32"].meaning(-zero, one))[0]


@pytest.mark.parametrize("type_", ["f32", "ftz.f32", "NaN.f32", "f16", "bf16"])
def test_plus_zero_is_above_minus_zero(type_: str) -> None:
    """Max and min order +0 above -0 for either operand order (PTX ISA 9.7.3.11 and 9.7.3.12)."""
    a, b = np.array(
        [[0.0, -0.0], [-0.0, 0.0], [-0.0, -3.0], [3.0, -0.0], [-0.0, -0.0]], np.float32
    ).T
    if type_ == "bf16":
        a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    elif type_ == "f16":
        a, b = a.astype(np.float16), b.astype(np.float16)
    for name, want in {
        "max": [0.0, 0.0, -0.0, 3.0, -0.0],
        "min": [-0.0, -0.0, -3.0, -0.0, -0.0],
    }.items():
        got = as_float(INSTRUCTIONS[f"{name}.{type_}"].meaning(a, b), type_)
        assert got == want and (np.signbit(got) == np.signbit(want)).all(), name


def test_conversions_of_floats() -> None:
    for opcode in INSTRUCTIONS:
        to_float = re.fullmatch(r"cvt\.(r[nzmp])\.(f32|f16|bf16)\.([us]\d+|f32)", opcode)
        to_integer = re.fullmatch(r"cvt\.(r[nzmp])i\.([us])(\d+)\.(f32|f16)", opcode)
        if to_float:
            mode, type_, _ = to_float.groups()
            (operand,), got = row_values(opcode)
            for value, result in zip(operand.tolist(), as_float(got, type_), strict=True):
                if np.isfinite(value):
                    assert result == rounded(Fraction(value), type_, mode), f"{opcode} of {value}"
        elif to_integer:
            mode, kind, bits = to_integer[1], to_integer[2], int(to_integer[3])
            (operand,), got = row_values(opcode)
            for value, result in zip(
                operand.astype(np.float64).tolist(), got.tolist(), strict=True
            ):
                if np.isnan(value):
                    want = 0 if bits < 64 else wrap(1 << 63, 64, kind == "s")
                else:
                    huge = Fraction(2) ** 70 * (1 if value > 0 else -1)
                    want = clamped(
                        ROUND[mode](Fraction(value) if np.isfinite(value) else huge),
                        bits,
                        kind == "s",
                    )
                assert result == want, f"{opcode} of {value}"


def test_flush_and_saturate() -> None:
    small = np.array([1e-40, -1e-40, 1.2e-38, np.nan, -1, 0.25, 7], np.float32)
    flushed = INSTRUCTIONS["mul.rn.ftz.f32"].meaning(small, np.ones(1, np.float32))
    np.testing.assert_array_equal(
        flushed, np.array([0, -0.0, 1.2e-38, np.nan, -1, 0.25, 7], np.float32)
    )
    assert np.signbit(flushed[1])
    underflow = INSTRUCTIONS["mul.rn.ftz.f32"].meaning(
        np.array([2e-38], np.float32), np.array([0.5], np.float32)
    )
    assert underflow[0] == 0
    saturated = INSTRUCTIONS["cvt.sat.f32.f32"].meaning(small)
    np.testing.assert_array_equal(
        saturated, np.array([1e-40, 0, 1.2e-38, 0, 0, 0.25, 1], np.float32)
    )
    np.testing.assert_array_equal(
        INSTRUCTIONS["setp.ltu.f32"].meaning(small, small), np.isnan(small)
    )
    np.testing.assert_array_equal(
        INSTRUCTIONS["setp.gt.ftz.f32"].meaning(small[:1], np.zeros(1, np.float32)), [False]
    )
