"""Integer arithmetic, logic, comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction, Operand
from .errors import UnknownInstructionFault
from .operands import Reader, carries
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@instruction("MOV", "UMOV")
def _move(i: Instruction, m: Machine) -> Step:
    target, source = i.operands[:2]
    if "64" in i:
        wide, put_wide = m.operands.u64(source), m.operands.put_wide(target)
        return lambda mask: put_wide(wide(), mask)
    read, put = m.operands.u32(source), m.operands.put(target)
    return lambda mask: put(read(), mask)


@instruction("CS2R")
def _zeros(i: Instruction, m: Machine) -> Step:
    if i.operands[1].text != "SRZ":
        raise UnknownInstructionFault("only SRZ is known")
    words = 1 if "32" in i else 2
    puts = [m.operands.put(i.operands[0], word) for word in range(words)]
    zero = np.zeros((1, 1), np.uint32)

    def step(mask: Mask) -> None:
        for put in puts:
            put(zero, mask)

    return step


# --- sums and products


def _sum_with_carry(i: Instruction, m: Machine, terms: list[Reader], rest: list[Operand]) -> Step:
    """Adds uint64 terms of 32 bits, and carries if there are any; outs are carries of 1 and 2."""
    outs = [m.operands.put_predicate(out) for out in carries(i)[0]]
    ins = [m.operands.predicate(p) for p in rest] if "X" in i else []
    put = m.operands.put(i.operands[0])

    def step(mask: Mask) -> None:
        total = reduce(np.add, [term() for term in terms])
        for carry in ins:
            total = total + carry()
        high = total >> _32
        put(total.astype(np.uint32), mask)
        for count, out in enumerate(outs, 1):
            out(high >= count, mask)

    return step


def _wide_term(operand: Operand, m: Machine, extended: bool) -> Reader:
    """Reads a summand as uint64 so that its carry is bit 32; `-` is `~` plus 1."""
    plain = m.operands.raw(operand)
    if operand.inverted or (operand.negative and extended):
        return lambda: (~plain()).astype(np.uint64)
    if operand.negative:
        return lambda: (~plain()).astype(np.uint64) + np.uint64(1)
    return lambda: plain().astype(np.uint64)


@instruction("IADD3", "UIADD3", "IADD", "UIADD", "VIADD", "UVIADD")
def _add(i: Instruction, m: Machine) -> Step:
    outs, rest = carries(i)
    count = 2 if i.name.endswith("ADD") else 3
    if "64" in i:
        wide = [m.operands.u64(operand) for operand in rest[:count]]
        put_wide = m.operands.put_wide(i.operands[0])
        if any(out.index != 7 for out in outs) or "X" in i:
            raise UnknownInstructionFault("carries of 64-bit sums")
        return lambda mask: put_wide(reduce(np.add, [term() for term in wide]), mask)
    if outs or "X" in i:
        terms = [_wide_term(operand, m, "X" in i) for operand in rest[:count]]
        return _sum_with_carry(i, m, terms, rest[count:])
    read = [m.operands.u32(o) for o in rest[:count] if o.text not in ("RZ", "URZ")]
    put = m.operands.put(i.operands[0])
    if not read:
        read = [m.operands.u32(rest[0])]
    return lambda mask: put(reduce(np.add, [term() for term in read]), mask)


@instruction("IMAD", "UIMAD")
def _multiply_add(i: Instruction, m: Machine) -> Step:
    outs, rest = carries(i)
    a, b, c = rest[:3]
    if "WIDE" in i or "HI" in i:
        return _multiply_add_wide(i, m, outs, rest)
    x, y, z = m.operands.u32(a), m.operands.u32(b), m.operands.u32(c)
    put = m.operands.put(i.operands[0])
    if outs or "X" in i:
        if outs:
            raise UnknownInstructionFault("carry of a 32-bit product")
        carry = m.operands.predicate(rest[3])
        return lambda mask: put(x() * y() + z() + carry(), mask)
    if a.text == b.text == "RZ":
        return lambda mask: put(z(), mask)
    if c.text in ("RZ", "URZ"):
        return lambda mask: put(x() * y(), mask)
    return lambda mask: put(x() * y() + z(), mask)


def _multiply_add_wide(
    i: Instruction, m: Machine, outs: list[Operand], rest: list[Operand]
) -> Step:
    kind = np.uint64 if "U32" in i else np.int64
    reader = m.operands.u32 if "U32" in i else m.operands.s32
    x, y = reader(rest[0]), reader(rest[1])
    z = m.operands.u64(rest[2])
    ins = [m.operands.predicate(p) for p in rest[3:]] if "X" in i else []
    put = m.operands.put_wide(i.operands[0])
    put_high = m.operands.put(i.operands[0])
    out = [m.operands.put_predicate(p) for p in outs]

    def step(mask: Mask) -> None:
        product = (x().astype(kind) * y().astype(kind)).view(np.uint64)
        total = product + z()
        for carry in ins:
            total = total + carry()
        carried = total < product
        if "HI" in i:
            put_high((total >> _32).astype(np.uint32), mask)
        else:
            put(total, mask)
        for each in out:
            each(carried, mask)

    return step


@instruction("IDP")
def _dot_product(i: Instruction, m: Machine) -> Step:
    if i.modifiers[:1] != ("4A",) or len(i.modifiers) < 3:
        raise UnknownInstructionFault("only four products of bytes are known")
    kinds = [np.uint8 if name == "U8" else np.int8 for name in i.modifiers[1:3]]
    a, b, c = (m.operands.u32(operand) for operand in i.operands[1:4])
    put = m.operands.put(i.operands[0])

    def parts(word: np.ndarray, kind: type) -> np.ndarray:
        word = np.ascontiguousarray(word)
        return word.view(kind).reshape(*word.shape, 4)

    def step(mask: Mask) -> None:
        x, y = parts(a(), kinds[0]), parts(b(), kinds[1])
        total = c().view(np.int32)
        for k in range(4):
            total = total + x[..., k].astype(np.int32) * y[..., k]
        put(total.view(np.uint32), mask)

    return step


@instruction("IABS")
def _absolute(i: Instruction, m: Machine) -> Step:
    read, put = m.operands.s32(i.operands[1]), m.operands.put(i.operands[0])
    return lambda mask: put(np.abs(read()).view(np.uint32), mask)


@instruction("LEA", "ULEA")
def _scaled_add(i: Instruction, m: Machine) -> Step:
    """Adds `b` to `a`, or with HI the upper half of a pair, shifted left."""
    _, rest = carries(i)
    a, b, *more = rest
    low, term = m.operands.u32(a), _wide_term(b, m, "X" in i)
    if "HI" in i:
        if "SX32" in i:

            def high() -> np.ndarray:
                return (low().view(np.int32) >> np.int32(31)).view(np.uint32)
        else:
            high = m.operands.u32(more.pop(0))
        back = np.uint64(32 - more[0].index)

        def shifted() -> np.ndarray:
            pair = (high().astype(np.uint64) << _32) | low()
            return (pair >> back) & _LOW
    else:
        amount = np.uint32(more[0].index)

        def shifted() -> np.ndarray:
            return (low() << amount).astype(np.uint64)

    return _sum_with_carry(i, m, [shifted, term], more[1:])


# --- minimum and maximum


def _extreme(i: Instruction) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Returns f(a, b, p): the smaller where p is true, else the larger."""
    kind: type = np.uint32 if "U32" in i else np.int32
    if "U64" in i or "S64" in i:
        kind = np.uint64 if "U64" in i else np.int64

    def choose(a: np.ndarray, b: np.ndarray, smaller: np.ndarray) -> np.ndarray:
        x: np.ndarray = a.view(kind)
        y: np.ndarray = b.view(kind)
        if smaller.all():
            return np.minimum(x, y).view(a.dtype)
        return np.where(smaller, np.minimum(x, y), np.maximum(x, y)).view(a.dtype)

    return choose


@instruction("IMNMX", "UIMNMX", "VIMNMX", "UVIMNMX", "VIMNMX3", "UVIMNMX3", "VIADDMNMX")
def _minimum_maximum(i: Instruction, m: Machine) -> Step:
    choose, wide = _extreme(i), "U64" in i or "S64" in i
    operands = [o for o in i.operands if not o.is_predicate]
    smaller = m.operands.predicate([o for o in i.operands if o.is_predicate][2 if wide else 0])
    reader = m.operands.u64 if wide else m.operands.u32
    put = m.operands.put_wide(operands[0]) if wide else m.operands.put(operands[0])
    values = [reader(operand) for operand in operands[1:]]

    def step(mask: Mask) -> None:
        first, *rest = (value() for value in values)
        if i.name == "VIADDMNMX":
            first = first + rest.pop(0)
        for each in rest:
            first = choose(first, each, smaller())
        put(first, mask)

    return step


# --- shifts and bits


@instruction("SHF", "USHF")
def _funnel_shift(i: Instruction, m: Machine) -> Step:
    low, amount, high = (m.operands.u32(operand) for operand in i.operands[1:4])
    put = m.operands.put(i.operands[0])
    width = 64 if "U64" in i or "S64" in i else 32
    signed = "S32" in i or "S64" in i
    upper, right, wraps = "HI" in i, i.modifiers[0] == "R", "W" in i

    def step(mask: Mask) -> None:
        places = amount().astype(np.uint64)
        places = places & np.uint64(width - 1) if wraps else np.minimum(places, np.uint64(width))
        pair = (high().astype(np.uint64) << _32) | low()
        beyond, safe = places > 63, np.minimum(places, np.uint64(63))
        if right and signed:
            moved = (pair.view(np.int64) >> safe.view(np.int64)).view(np.uint64)
        else:
            moved = np.where(beyond, np.uint64(0), pair >> safe if right else pair << safe)
        put((moved >> _32 if upper else moved).astype(np.uint32), mask)

    if (right and upper or not right and not upper) and width == 32 and not wraps and not signed:
        value = high if right else low

        def simple(mask: Mask) -> None:
            places = amount()
            fits = np.minimum(places, np.uint32(31))
            moved = value() >> fits if right else value() << fits
            if (places > 31).any():
                moved = np.where(places > 31, np.uint32(0), moved)
            put(moved, mask)

        return simple
    return step


@instruction("SGXT", "USGXT")
def _sign_extend(i: Instruction, m: Machine) -> Step:
    """Extends the lowest bits; a width of zero gives zero."""
    read, width = m.operands.u32(i.operands[1]), m.operands.u32(i.operands[2])
    put = m.operands.put(i.operands[0])
    kind = np.uint64 if "U32" in i else np.int64

    def step(mask: Mask) -> None:
        unused = 64 - np.minimum(width(), np.uint32(32)).astype(np.int64)
        away = np.minimum(unused, 63).astype(kind)
        kept = (read().astype(np.uint64).view(kind) << away) >> away
        put(np.where(unused == 64, 0, kept).astype(np.uint32), mask)

    return step


def _by_truth_table(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Evaluates bit (4a + 2b + c) of a table, bit by bit."""
    terms = [
        (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        for k in range(8)
        if table >> k & 1
    ]
    return reduce(np.bitwise_or, terms) if terms else a & ~a


_COMMON = {
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
    0xC8: lambda a, b, c: (a | c) & b,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0x33: lambda a, b, c: ~b,
    0x0F: lambda a, b, c: ~a,
}


@instruction("LOP3", "ULOP3", "LOP", "ULOP")
def _logic(i: Instruction, m: Machine) -> Step:
    operands = list(i.operands)
    out = m.operands.put_predicate(operands.pop(0)) if operands[0].is_predicate else None
    put = m.operands.put(operands[0])
    a, b, c = (m.operands.u32(operand) for operand in operands[1:4])
    table = operands[4].index
    also = m.operands.predicate(operands[5]) if len(operands) > 5 else None
    common = _COMMON.get(table)

    def step(mask: Mask) -> None:
        x, y, z = a(), b(), c()
        value = common(x, y, z) if common else _by_truth_table(table, x, y, z)
        put(value, mask)
        if out:
            some = value != 0
            out(some | also() if also else some, mask)

    return step


@instruction("PLOP3", "UPLOP3")
def _predicate_logic(i: Instruction, m: Machine) -> Step:
    outs = [m.operands.put_predicate(operand) for operand in i.operands[:2]]
    a, b, c = (m.operands.predicate(operand) for operand in i.operands[2:5])
    tables = [operand.index for operand in i.operands[5:7]]

    def step(mask: Mask) -> None:
        values = [_by_truth_table(table, a(), b(), c()) for table in tables]
        for out, value in zip(outs, values, strict=True):
            out(value, mask)

    return step


@instruction("PRMT", "UPRMT")
def _permute(i: Instruction, m: Machine) -> Step:
    """Selects four of eight bytes; bit 3 of a selector replicates the byte's sign."""
    if i.modifiers:
        raise UnknownInstructionFault("modes of PRMT")
    a, selector, b = (m.operands.u32(operand) for operand in i.operands[1:4])
    put = m.operands.put(i.operands[0])

    def byte(pair: np.ndarray, select: np.ndarray) -> np.ndarray:
        value = (pair >> ((select & np.uint32(7)) << np.uint32(3)).astype(np.uint64)).astype(
            np.uint32
        ) & np.uint32(255)
        if not (select & np.uint32(8)).any():
            return value
        sign = np.where(value & np.uint32(128), np.uint32(255), np.uint32(0))
        return np.where(select & np.uint32(8), sign, value)

    def step(mask: Mask) -> None:
        pair = (b().astype(np.uint64) << _32) | a()
        chosen = selector()
        parts = [
            byte(pair, chosen >> np.uint32(4 * k) & np.uint32(15)) << np.uint32(8 * k)
            for k in range(4)
        ]
        put(reduce(np.bitwise_or, parts), mask)

    return step


@instruction("POPC", "UPOPC")
def _count_bits(i: Instruction, m: Machine) -> Step:
    read, put = m.operands.u32(i.operands[1]), m.operands.put(i.operands[0])
    return lambda mask: put(np.bitwise_count(read()).astype(np.uint32), mask)


@instruction("FLO", "UFLO")
def _leading_one(i: Instruction, m: Machine) -> Step:
    """Finds the position of the highest one, or all ones for zero; SH counts from the top."""
    if "U32" not in i:
        raise UnknownInstructionFault("only unsigned numbers are known")
    read, put = m.operands.u32(i.operands[1]), m.operands.put(i.operands[0])

    def step(mask: Mask) -> None:
        value = read()
        _, exponent = np.frexp(value.astype(np.float64))
        place = 32 - exponent if "SH" in i else exponent - 1
        put(np.where(value == 0, np.uint32(0xFFFFFFFF), place.astype(np.uint32)), mask)

    return step


@instruction("BREV", "UBREV")
def _reverse(i: Instruction, m: Machine) -> Step:
    read, put = m.operands.u32(i.operands[1]), m.operands.put(i.operands[0])

    def step(mask: Mask) -> None:
        value = read()
        turned = [((value >> np.uint32(k)) & np.uint32(1)) << np.uint32(31 - k) for k in range(32)]
        put(reduce(np.bitwise_or, turned), mask)

    return step


@instruction("BMSK", "UBMSK")
def _bit_mask(i: Instruction, m: Machine) -> Step:
    """Makes ones at `width` bits from a position; both are clamped to 32 or, with W, wrapped."""
    start, width = m.operands.u32(i.operands[1]), m.operands.u32(i.operands[2])
    put = m.operands.put(i.operands[0])

    def step(mask: Mask) -> None:
        at, count = start().astype(np.uint64), width().astype(np.uint64)
        if "W" in i:
            at, count = at & np.uint64(31), count & np.uint64(31)
        at, count = np.minimum(at, _32), np.minimum(count, _32)
        ones = (np.uint64(1) << count) - np.uint64(1)
        put((ones << at).astype(np.uint32), mask)

    return step


# --- comparisons

COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}
COMBINATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
}


def _viewed(wide: Reader, signed: str) -> Reader:
    return (lambda: wide().view(np.int64)) if signed else wide


@instruction("ISETP", "UISETP")
def _compare(i: Instruction, m: Machine) -> Step:
    """Compares; with EX the upper halves, where equal ones leave it to the lower halves' result."""
    outs = [m.operands.put_predicate(operand) for operand in i.operands[:2]]
    if "U64" in i or "S64" in i:
        a, b = (_viewed(m.operands.u64(o), i.one_of("S64")) for o in i.operands[2:4])
    else:
        reader = m.operands.u32 if "U32" in i else m.operands.s32
        a, b = reader(i.operands[2]), reader(i.operands[3])
    with_ = m.operands.predicate(i.operands[4])
    always = i.operands[4].text in ("PT", "UPT") and "AND" in i
    lower = m.operands.predicate(i.operands[5]) if "EX" in i else None
    how = i.modifiers[0]
    compare = COMPARISONS.get(how)
    if compare is None:
        raise UnknownInstructionFault(f"comparison {how}")
    combine = COMBINATIONS[i.one_of(*COMBINATIONS)]

    def step(mask: Mask) -> None:
        x, y = a(), b()
        result = compare(x, y)
        if lower is not None:
            if how == "NE":
                result = result | lower()
            else:
                result = np.where(x == y, lower(), result & (how != "EQ"))
        if always:
            outs[0](result, mask)
            outs[1](~result, mask)
        else:
            other = with_()
            values = combine(result, other), combine(~result, other)
            outs[0](values[0], mask)
            outs[1](values[1], mask)

    return step


@instruction("SEL", "USEL")
def _select(i: Instruction, m: Machine) -> Step:
    reader = m.operands.u64 if "64" in i else m.operands.u32
    put = m.operands.put_wide(i.operands[0]) if "64" in i else m.operands.put(i.operands[0])
    a, b = reader(i.operands[1]), reader(i.operands[2])
    which = m.operands.predicate(i.operands[3])
    return lambda mask: put(np.where(which(), a(), b()), mask)


# --- predicates as a word


@instruction("P2R")
def _from_predicates(i: Instruction, m: Machine) -> Step:
    base, kept = m.operands.u32(i.operands[2]), i.operands[3].index
    put, predicates = m.operands.put(i.operands[0]), m.state.predicates

    def step(mask: Mask) -> None:
        value = base() & np.uint32(~kept & 0xFFFFFFFF)
        for k in range(7):
            if kept >> k & 1:
                value = value | (predicates[k].astype(np.uint32) << np.uint32(k))
        put(value, mask)

    return step


@instruction("R2P")
def _to_predicates(i: Instruction, m: Machine) -> Step:
    value, kept = m.operands.u32(i.operands[1]), i.operands[2].index
    outs = {
        k: m.operands.put_predicate(Operand(f"P{k}", "predicate", k))
        for k in range(7)
        if kept >> k & 1
    }

    def step(mask: Mask) -> None:
        for k, out in outs.items():
            out((value() >> np.uint32(k) & np.uint32(1)) != 0, mask)

    return step


@instruction("R2UR")
def _to_uniform(i: Instruction, m: Machine) -> Step:
    read, put = m.operands.u32(i.operands[-1]), m.operands.put(i.operands[0])
    return lambda mask: put(read(), mask)


# --- special registers


@instruction("S2R", "S2UR")
def _special(i: Instruction, m: Machine) -> Step:
    value = m.special(i.operands[1].text)
    put = m.operands.put(i.operands[0])
    return lambda mask: put(value(), mask)
