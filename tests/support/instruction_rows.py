"""Kernels that run every row of the instruction table on random and special values.

One kernel runs a group of rows. Thread t of its block runs each row on element t of that row's
operands. Operands and results are stored in slots of 8 bytes, whose low bytes hold the register.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ptx_kernels.ptx import Buffer, Kernel, u64
from ptx_kernels.ptx.instructions import INSTRUCTIONS, Instruction
from ptx_kernels.ptx.types import REGISTER_DTYPES, Type

THREADS = 256
MOST_ROWS = 48
_PREFIXES = {"pred": "p", "b16": "h", "b32": "r", "b64": "d", "f32": "f"}
#: Truth table of lop3: (a & b) ^ ~c, which is not symmetric in any two operands.
_IMMEDIATE = 0x95


@dataclass(frozen=True)
class Group:
    """Rows with the same requirements.

    operands: one array (rows, THREADS) of u64 slots per position.
    """

    kernel: Kernel
    rows: tuple[Instruction, ...]
    operands: tuple[np.ndarray, ...]

    def expected(self, i: int) -> np.ndarray:
        """Computes row i's meaning (THREADS,), in the dtype of its result."""
        row = self.rows[i]
        count = len(row.operands) - row.immediates
        values = [narrow(self.operands[j][i], row.operands[j]) for j in range(count)]
        values += [np.array([_IMMEDIATE], t.dtype) for t in row.operands[count:]]
        with np.errstate(all="ignore"):
            return np.broadcast_to(row.meaning(*values), THREADS)


def narrow(slots: np.ndarray, type_: Type) -> np.ndarray:
    """Converts the low bytes of u64 slots to values of a type."""
    if type_.name == "pred":
        return slots.astype(np.uint32) != 0
    return slots.astype(np.dtype(f"u{type_.dtype.itemsize}")).view(type_.dtype)


def extended(values: np.ndarray, type_: Type) -> np.ndarray:
    """Converts values to u64 slots: as in a register, zero-extended."""
    if type_.name == "pred":
        return values.astype(np.uint64)
    held = REGISTER_DTYPES[type_.register]
    if values.dtype.itemsize < held.itemsize:
        values = values.astype(np.dtype(f"{values.dtype.kind}{held.itemsize}"))
    return values.view(np.dtype(f"u{held.itemsize}")).astype(np.uint64)


def opcodes(text: str) -> set[str]:
    """Returns the opcodes of a kernel's text, of rows and of other instructions."""
    return set(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)", text, re.MULTILINE))


def groups(
    seed: int = 0, rows: Iterable[Instruction] = tuple(INSTRUCTIONS.values())
) -> Iterator[Group]:
    """Yields the groups of all rows, or of some, by what they need."""

    def needs(row: Instruction) -> tuple:
        return row.needs

    for _, same in groupby(sorted(rows, key=needs), needs):
        alike = list(same)
        for start in range(0, len(alike), MOST_ROWS):
            yield group_of(alike[start : start + MOST_ROWS], np.random.default_rng((seed, start)))


def group_of(rows: list[Instruction], rng: np.random.Generator) -> Group:
    """Makes the kernel of rows with the same needs, and operands."""
    positions = max(len(r.operands) - r.immediates for r in rows)
    operands = tuple(np.zeros((len(rows), THREADS), np.uint64) for _ in range(positions))
    for i, row in enumerate(rows):
        for slots, values in zip(operands, values_for(row, rng), strict=False):
            slots[i] = values
    buffers = [Buffer(f"x{j}", u64, (len(rows), THREADS), "in") for j in range(positions)]
    kernel = Kernel(
        "rows",
        _text(rows, positions),
        (*buffers, Buffer("y", u64, (len(rows), THREADS), "out")),
        (1, 1, 1),
        (THREADS, 1, 1),
    )
    return Group(kernel, tuple(rows), operands)


def _text(rows: list[Instruction], positions: int) -> str:
    (major, minor), sm = rows[0].needs
    names = [*(f"x{j}" for j in range(positions)), "y"]
    lines = [
        f".version {major}.{minor}",
        f".target sm_{sm}",
        ".address_size 64",
        f".visible .entry rows({', '.join(f'.param .u64 {name}' for name in names)})",
        "{",
        "  .reg .pred %p<5>; .reg .b16 %h<5>; .reg .b32 %r<6>; .reg .b64 %d<5>; .reg .f32 %f<5>;",
        f"  .reg .b64 %a<{positions + 1}>;",
        "  mov.u32 %r5, %tid.x;",
    ]
    for j, name in enumerate(names):
        lines += [f"  ld.param.u64 %a{j}, [{name}];", f"  mad.wide.u32 %a{j}, %r5, 8, %a{j};"]
    for i, row in enumerate(rows):
        registers = []
        for j, type_ in enumerate(row.operands[: len(row.operands) - row.immediates]):
            registers.append(f"%{_PREFIXES[type_.register]}{j}")
            place = f"[%a{j}+{8 * THREADS * i}]"
            if type_.name == "pred":
                lines += [f"  ld.global.u32 %r4, {place};", f"  setp.ne.u32 %p{j}, %r4, 0;"]
            else:
                lines.append(f"  ld.global.{type_.register} {registers[-1]}, {place};")
        registers += [str(_IMMEDIATE)] * row.immediates
        result = f"%{_PREFIXES[row.result.register]}4"
        lines.append(f"  {row.template(result, tuple(registers))}")
        place = f"[%a{positions}+{8 * THREADS * i}]"
        lines.append(f"  st.global.u64 {place}, 0;")
        if row.result.name == "pred":
            lines += ["  selp.b32 %r4, 1, 0, %p4;", f"  st.global.u32 {place}, %r4;"]
        else:
            lines.append(f"  st.global.{row.result.register} {place}, {result};")
    return "\n".join([*lines, "  ret;", "}", ""])


# --- operands ---

_F32 = np.array(
    [
        0,
        -0.0,
        1,
        -1,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1.1754942e-38,
        1.1754944e-38,
        -1.1754944e-38,
        3.4028235e38,
    ]
    + [
        0.5,
        1.5,
        2.5,
        -0.5,
        -2.5,
        8388609.5,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        65519,
        65520,
    ]
    + [
        2.0**-25,
        3 * 2.0**-25,
        2.0**-24,
        127.5,
        128,
        -128.5,
        -129,
        255.5,
        32767.5,
        65535.5,
        2147483648.0,
        2147483520.0,
    ]
    + [
        -2147483648.0,
        4294967296.0,
        4294967040.0,
        9223372036854775808.0,
        -9223372036854775808.0,
        1.8446744e19,
        1e30,
    ],
    np.float32,
)
_F16 = np.array(
    [
        0,
        -0.0,
        1,
        -1,
        np.inf,
        -np.inf,
        np.nan,
        6e-8,
        -6e-8,
        6.1e-5,
        6.104e-5,
        65504,
        -65504,
        0.5,
        1.5,
        2.5,
        -2.5,
        1.001,
    ]
    + [1024.5, 2047, 127.5, 255.5, 3.0, 0.3333],
    np.float16,
)


def values_for(row: Instruction, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns a row's operands as u64 slots (THREADS,): half are special values, half random.

    They avoid values for which PTX leaves the result undefined.
    """
    types = row.operands[: len(row.operands) - row.immediates]
    values = [_values(type_, rng) for type_ in types]
    name = row.opcode.split(".")[0]
    if name in ("div", "rem") and types[1].is_integer:
        divisor = narrow(values[1], types[1])
        dividend = narrow(values[0], types[0])
        lowest = np.iinfo(types[0].dtype).min
        bad = (divisor == 0) | (
            (divisor.view(np.dtype(f"i{divisor.itemsize}")) == -1) & (dividend == lowest)
        )
        values[1] = np.where(bad, np.uint64(3), values[1])
    # positions and amounts: within the width and slightly beyond
    if name in (
        "bfe",
        "bfi",
        "shl",
        "shr",
        "shf",
    ):
        first = {"bfe": 1, "bfi": 2, "shl": 1, "shr": 1, "shf": 2}[name]
        for j in range(first, len(values)):
            values[j] = np.where(rng.random(THREADS) < 0.9, values[j] % np.uint64(70), values[j])
        if name.startswith("bf"):
            values[first:] = [v & np.uint64(255) for v in values[first:]]
    if row.error is not None:
        magnitude = np.abs(narrow(values[-1], types[-1]))
        low, high = row.error.domain
        inside = (
            (magnitude >= low) & (magnitude <= high)
            if (low, high) != (0.0, np.inf)
            else np.full(THREADS, True)
        )
        values[-1] = np.where(
            inside, values[-1], np.array([1.25], np.float32).view(np.uint32).astype(np.uint64)
        )
    return values


def _values(type_: Type, rng: np.random.Generator) -> np.ndarray:
    if type_.name == "f32":
        scaled = rng.standard_normal(THREADS) * 2.0 ** rng.integers(-30, 40, THREADS)
        floats = np.where(
            rng.random(THREADS) < 0.5, rng.choice(_F32, THREADS), scaled.astype(np.float32)
        )
        return floats.astype(np.float32).view(np.uint32).astype(np.uint64)
    if type_.name in ("f16", "bf16"):
        return _halves(type_.name, rng).astype(np.uint64)
    if type_.name in ("f16x2", "bf16x2"):
        low, high = (_halves(type_.name[:-2], rng).astype(np.uint64) for _ in range(2))
        return high << np.uint64(16) | low
    bits = 8 * max(type_.size, 1)
    limits = [
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        63,
        64,
        (1 << bits - 1) - 1,
        1 << bits - 1,
        (1 << bits) - 1,
        (1 << bits) - 2,
        0xAA,
    ]
    special = rng.choice(np.array(limits, np.uint64), THREADS)
    anything = rng.integers(0, 1 << 64, THREADS, np.uint64, endpoint=False) >> rng.integers(
        0, bits, THREADS
    ).astype(np.uint64)
    mask = np.uint64((1 << bits) - 1)
    return np.where(rng.random(THREADS) < 0.5, special, anything) & mask


def _halves(name: str, rng: np.random.Generator) -> np.ndarray:
    """Returns bits of f16 or bf16 values."""
    random = rng.integers(0, 1 << 16, THREADS).astype(np.uint16)
    special = rng.choice(_F16.view(np.uint16), THREADS)
    if name == "bf16":
        special = (rng.choice(_F32, THREADS).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(rng.random(THREADS) < 0.5, special, random)


# --- comparison ---


def differences(row: Instruction, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Finds slots where the results of two machines differ.

    NaN equals NaN with any payload. `.approx` may have the documented error.
    """
    exact = got == want
    a, b = _floats(got, row.result), _floats(want, row.result)
    if a is None or b is None:
        return ~exact
    halves_exact = _parts(got, row.result) == _parts(want, row.result)
    same = halves_exact | (np.isnan(a) & np.isnan(b))
    if row.error is not None:
        exact_value = b.astype(np.float64)
        ulp = np.spacing(np.abs(b)).astype(np.float64)
        with np.errstate(all="ignore"):
            bound = np.fmax(row.error.relative * np.abs(exact_value), row.error.absolute)
            bound = np.fmax(row.error.ulps * ulp, bound)
            same |= np.abs(a.astype(np.float64) - exact_value) <= bound
    return ~same.all(axis=1)


def _parts(slots: np.ndarray, type_: Type) -> np.ndarray:
    """Splits registers of packed pairs into halves: bits (THREADS, parts)."""
    if type_.name.endswith("x2"):
        return np.stack([slots & np.uint64(0xFFFF), slots >> np.uint64(16)], axis=1).astype(
            np.uint16
        )
    return slots.reshape(-1, 1)


def _floats(slots: np.ndarray, type_: Type) -> np.ndarray | None:
    """Float values (THREADS, parts), or None for integers."""
    kind = type_.name.removesuffix("x2")
    if kind == "f32":
        return slots.astype(np.uint32).view(np.float32).reshape(-1, 1)
    if kind == "f16":
        return _parts(slots, type_).astype(np.uint16).view(np.float16)
    if kind == "bf16":
        return (_parts(slots, type_).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return None
