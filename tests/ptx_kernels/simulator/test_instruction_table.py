"""Instructions whose meaning is easily mistaken: PTX text against independent definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from ptx_kernels.ptx.instructions import INSTRUCTIONS

from .ptx_text import apply

rng = np.random.default_rng(7)


def integers(count: int = 1024) -> np.ndarray:
    edge = np.array(
        [
            0,
            1,
            2,
            0x7F,
            0x80,
            0xFF,
            0x7FFF,
            0x8000,
            0x7FFFFFFF,
            0x80000000,
            0xFFFFFFFF,
            31,
            32,
            33,
            64,
            255,
        ],
        np.uint32,
    )
    return np.concatenate([edge, rng.integers(0, 2**32, count - edge.size, np.uint32)])


def round_to_f32(exact: Fraction) -> float:
    """Rounds to the nearest float32, ties to even, by the definition."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    units = magnitude / unit
    whole = math.floor(units)
    rest = units - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    value = whole * unit
    return math.copysign(math.inf if value >= Fraction(2) ** 128 else float(value), exact)


def fma_cases() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random values, near ties, results below the normal range, cancellation.

    Double rounding fails near ties.
    """

    def floats(low: int, high: int, count: int) -> np.ndarray:
        mantissa = rng.integers(0, 2**23, count)
        sign = rng.choice([-1.0, 1.0], count)
        return (sign * (1 + mantissa / 2**23) * 2.0 ** rng.integers(low, high, count)).astype(
            np.float32
        )

    groups = [
        (floats(-4, 4, 320), floats(-4, 4, 320), floats(-8, 8, 320)),
        (floats(-75, -60, 320), floats(-75, -60, 320), floats(-149, -120, 320)),
        (floats(60, 66, 160), floats(60, 64, 160), floats(100, 128, 160)),
    ]
    # a * b = 2^24 + 1 + tiny part of c: exactly one bit beyond a tie
    a = np.float32(2**12 + 1) * 2.0 ** rng.integers(-3, 3, 320)
    b = np.full(320, 2**12 - 1 + 2, np.float32)
    c = rng.choice([1.0, -1.0], 320) * 2.0 ** rng.integers(-60, -20, 320)
    groups.append((a.astype(np.float32), b, c.astype(np.float32)))
    x, y = floats(-3, 3, 160), floats(-3, 3, 160)
    groups.append((x, y, -(x * y)))
    columns = [np.concatenate(column) for column in zip(*groups, strict=True)]
    return tuple(columns)  # type: ignore[return-value]


def test_fma_rounds_once() -> None:
    a, b, c = fma_cases()
    got = apply("fma.rn.f32", "f f f f", a, b, c)
    want = [
        round_to_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    with np.errstate(over="ignore"):
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != got).any(), "the cases must hold some that double rounding gets wrong"


def test_fma_rounds_once_below_the_normal_range() -> None:
    """The product is 2^-196 below half an ulp, which float64 loses next to c."""
    a, b, c = (
        np.full(32, x, np.float32)
        for x in (2.0**-75 * (1 + 2**-23), 2.0**-75 * (1 - 2**-23), 2.0**-127 + 2.0**-149)
    )
    np.testing.assert_array_equal(apply("fma.rn.f32", "f f f f", a, b, c), c)


def test_fma_specials() -> None:
    inf, nan = np.inf, np.nan
    cases = [
        (inf, 1, 1, inf),
        (inf, 0, 1, nan),
        (inf, 1, -inf, nan),
        (nan, 1, 1, nan),
        (1, 1, -inf, -inf),
        (3e38, 3e38, -inf, -inf),
        (3e38, 3e38, 0, inf),
        (0, -1, 0, 0),
    ] * 4
    a, b, c, want = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    np.testing.assert_array_equal(apply("fma.rn.f32", "f f f f", a, b, c), want)


@pytest.mark.parametrize("signs", ["u32.u32", "u32.s32", "s32.u32", "s32.s32"])
def test_dp4a_signs(signs: str) -> None:
    a, b, c = integers(), rng.permutation(integers()), rng.permutation(integers())
    got = apply(f"dp4a.{signs}", "r r r r", a, b, c)
    a_type, b_type = (np.int8 if s[0] == "s" else np.uint8 for s in signs.split("."))
    want = [
        (int(z) + sum(int(p) * int(q) for p, q in zip(x, y, strict=True))) % 2**32
        for x, y, z in zip(
            a.view(a_type).reshape(-1, 4), b.view(b_type).reshape(-1, 4), c, strict=True
        )
    ]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


def reference_bfe(value: int, position: int, length: int, signed: bool) -> int:
    """The pseudocode of PTX ISA 9.7.1.20."""
    pos, count = position & 0xFF, length & 0xFF
    sign_at = min(pos + count - 1, 31)
    sign = (value >> sign_at) & 1 if signed and count else 0
    bits = [(value >> (i + pos)) & 1 if i < count and pos + i <= 31 else sign for i in range(32)]
    return sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize("type", ["u32", "s32"])
def test_bfe(type: str) -> None:
    a = integers()
    position = rng.choice(np.array([0, 1, 4, 17, 31, 32, 40, 255, 256 + 5], np.uint32), a.size)
    length = rng.choice(np.array([0, 1, 6, 8, 31, 32, 33, 255, 256 + 3], np.uint32), a.size)
    want = [
        reference_bfe(int(x), int(p), int(n), type == "s32")
        for x, p, n in zip(a, position, length, strict=True)
    ]
    np.testing.assert_array_equal(
        apply(f"bfe.{type}", "r r r r", a, position, length), np.array(want, np.uint32)
    )


def test_prmt() -> None:
    a, b, selector = integers(), rng.permutation(integers()), rng.permutation(integers())
    want = []
    for x, y, s in zip(a.tolist(), b.tolist(), selector.tolist(), strict=True):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        nibbles = [s >> 4 * i & 15 for i in range(4)]
        picked = [source[n & 7] if not n & 8 else 255 * (source[n & 7] >> 7) for n in nibbles]
        want.append(int.from_bytes(bytes(picked), "little"))
    np.testing.assert_array_equal(
        apply("prmt.b32", "r r r r", a, b, selector), np.array(want, np.uint32)
    )


@pytest.mark.parametrize("selector", [0x3210, 0x7044, 0x4541, 0xFB73, 0x12349DC8])
def test_prmt_by_one_selector(selector: int) -> None:
    """A scalar selector gives the results of a selector per lane, also with scalar words."""
    meaning, one = INSTRUCTIONS["prmt.b32"].meaning, np.array([selector], np.uint32)
    words, single = integers(), np.array([0x80FF017F], np.uint32)
    for a, b in ((words, rng.permutation(words)), (words, single), (single, words)):
        np.testing.assert_array_equal(meaning(a, b, one), meaning(a, b, one.repeat(words.size)))
    alone = meaning(single, single, one)
    np.testing.assert_array_equal(alone, meaning(single, single, one.repeat(2))[:1])
    assert alone.dtype == np.uint32 and alone.shape == (1,)


@pytest.mark.parametrize("opcode", ["shl.b32", "shr.u32", "shr.s32"])
def test_shifts_clamp(opcode: str) -> None:
    a = integers()
    amount = rng.choice(
        np.array([0, 1, 5, 31, 32, 33, 63, 64, 2**31, 2**32 - 1], np.uint32), a.size
    )

    def want(x: int, n: int) -> int:
        if opcode == "shl.b32":
            return (x << n) % 2**32 if n < 32 else 0
        if opcode == "shr.s32":
            return ((x - 2**32 if x >> 31 else x) >> min(n, 31)) % 2**32
        return x >> n if n < 32 else 0

    np.testing.assert_array_equal(
        apply(opcode, "r r r", a, amount),
        np.array([want(int(x), int(n)) for x, n in zip(a, amount, strict=True)], np.uint32),
    )


@pytest.mark.parametrize("opcode", ["shl.b64", "shr.u64", "shr.s64"])
def test_wide_shifts_clamp(opcode: str) -> None:
    a = rng.integers(0, 2**64, 256, np.uint64)
    amount = rng.choice(np.array([0, 1, 31, 32, 63, 64, 65, 2**32 - 1], np.uint32), a.size)

    def want(x: int, n: int) -> int:
        if opcode == "shl.b64":
            return (x << n) % 2**64 if n < 64 else 0
        signed = x - 2**64 if opcode == "shr.s64" and x >> 63 else x
        return (signed >> min(n, 64)) % 2**64

    np.testing.assert_array_equal(
        apply(opcode, "rd rd r", a, amount),
        np.array([want(int(x), int(n)) for x, n in zip(a, amount, strict=True)], np.uint64),
    )


def test_float_to_integer_rounds_to_even_and_saturates() -> None:
    x = np.array(
        [
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            3e9,
            -3e9,
            np.inf,
            -np.inf,
            np.nan,
            2147483520.0,
            2147483648.0,
            -2147483648.0,
            126.5,
            127.5,
            -0.0,
        ],
        np.float32,
    ).repeat(2)
    want = (
        np.array(
            [
                0,
                2,
                2,
                0,
                -2,
                2**31 - 1,
                -(2**31),
                2**31 - 1,
                -(2**31),
                0,
                2147483520,
                2**31 - 1,
                -(2**31),
                126,
                128,
                0,
            ],
            np.int64,
        )
        .repeat(2)
        .astype(np.int32)
    )
    np.testing.assert_array_equal(apply("cvt.rni.s32.f32", "r f", x).view(np.int32), want)


def test_f16_conversions_keep_subnormals() -> None:
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    wide = apply("cvt.f32.f16", "f h", every)
    np.testing.assert_array_equal(wide, every.view(np.float16).astype(np.float32))
    back = apply("cvt.rn.f16.f32", "h f", wide)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number], every[number])
    halfway = np.array(
        [
            2.0**-25,
            1.5 * 2.0**-24,
            65519.0,
            65520.0,
            1 + 2.0**-11,
            1 + 3 * 2.0**-11,
            -(2.0**-25),
            2.0**-25 * 1.001,
        ],
        np.float32,
    ).repeat(4)
    want = np.array([0, 2, 0x7BFF, 0x7C00, 0x3C00, 0x3C02, 0x8000, 1], np.uint16).repeat(4)
    np.testing.assert_array_equal(apply("cvt.rn.f16.f32", "h f", halfway), want)


def test_bf16_of_nan() -> None:
    bits = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001] * 8, np.uint32)
    np.testing.assert_array_equal(
        apply("cvt.rn.bf16.f32", "h f", bits.view(np.float32)), np.full(32, 0x7FFF)
    )


def test_bf16_rounds_to_even() -> None:
    bits = integers()
    bits = bits[(bits & 0x7F800000) != 0x7F800000][:992]
    got = apply("cvt.rn.bf16.f32", "h f", bits.view(np.float32))
    want = []
    for b in bits.tolist():
        low, high = b & 0xFFFF, b >> 16
        want.append(high + (low > 0x8000 or (low == 0x8000 and high & 1 == 1)))
    np.testing.assert_array_equal(got, np.array(want, np.uint16))


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str) -> None:
    a = integers()
    b = np.where(rng.random(a.size) < 0.3, a, rng.permutation(a))
    np.testing.assert_array_equal(apply(f"setp.{name}.u32", "p r r", a, b), COMPARISONS[name](a, b))
    np.testing.assert_array_equal(
        apply(f"setp.{name}.s32", "p r r", a, b),
        COMPARISONS[name](a.view(np.int32), b.view(np.int32)),
    )
    x = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float32), 256)
    y = rng.permutation(x)
    ordered = ~(np.isnan(x) | np.isnan(y))
    np.testing.assert_array_equal(
        apply(f"setp.{name}.f32", "p f f", x, y), COMPARISONS[name](x, y) & ordered
    )


def test_float_maximum_drops_nan() -> None:
    a = np.array([np.nan, 1, np.nan, -np.inf] * 8, np.float32)
    b = np.array([2, np.nan, np.nan, 3] * 8, np.float32)
    np.testing.assert_array_equal(
        apply("max.f32", "f f f", a, b), np.array([2, 1, np.nan, 3] * 8, np.float32)
    )
    np.testing.assert_array_equal(
        apply("min.f32", "f f f", a, b), np.array([2, 1, np.nan, -np.inf] * 8, np.float32)
    )
    np.testing.assert_array_equal(
        apply("max.NaN.f32", "f f f", a, b), np.array([np.nan, np.nan, np.nan, 3] * 8, np.float32)
    )


def test_wide_products() -> None:
    a, b = integers(), rng.permutation(integers())
    np.testing.assert_array_equal(apply("mul.wide.u32", "rd r r", a, b), a.astype(np.uint64) * b)
    signed = a.view(np.int32).astype(np.int64) * b.view(np.int32)
    np.testing.assert_array_equal(apply("mul.wide.s32", "rd r r", a, b).view(np.int64), signed)
    np.testing.assert_array_equal(apply("mul.lo.s32", "r r r", a, b), signed.astype(np.uint32))


def test_narrow_conversions_extend() -> None:
    h = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    low = h.astype(np.uint8)
    np.testing.assert_array_equal(apply("cvt.u32.u8", "r h", h), low.astype(np.uint32))
    np.testing.assert_array_equal(
        apply("cvt.s32.s8", "r h", h).view(np.int32), low.view(np.int8).astype(np.int32)
    )
    np.testing.assert_array_equal(
        apply("cvt.s32.s16", "r h", h).view(np.int32), h.view(np.int16).astype(np.int32)
    )
    np.testing.assert_array_equal(apply("cvt.u32.u16", "r h", h), h.astype(np.uint32))


def test_base_2_exponential() -> None:
    x = np.array([-np.inf, np.inf, np.nan, 0, -0.0, 1, -126, -140] * 4, np.float32)
    want = np.array([0, np.inf, np.nan, 1, 1, 2, 2.0**-126, 2.0**-140] * 4, np.float32)
    np.testing.assert_array_equal(apply("ex2.approx.f32", "f f", x), want)
