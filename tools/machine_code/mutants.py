"""Plants misread instructions in the table and the simulator alike, and counts those found.

python -m tools.machine_code.mutants [--mutants 100] [--seed 0]

A mutant changes the meaning of a row of the instruction table, which the simulator takes from
there, or of an instruction outside of the table, by changing the text that only the simulator gets.
Kernels, table and simulator then agree with each other. Executed machine code must disagree on the
row's values or on a subject that uses it. A mutant that changes none of the simulator's results, on
those values or subjects, is no mutant and is not counted. Exits with 1 below 95 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.ptx import Kernel
from ptx_kernels.ptx.instructions import INSTRUCTIONS, Instruction

from ..mutation import labels, load_subject
from .launch import load, run

BAR = 0.95
SUBJECTS_OF_ONE = 3  # that a mutant is looked for on, cheapest first
Meaning = Callable[..., np.ndarray]
_fresh = itertools.count()


# --- misreadings of rows: each takes a meaning and returns another


def _bits(value: np.ndarray) -> np.ndarray:
    return value.view(f"u{value.dtype.itemsize}")


def _swapped(meaning: Meaning) -> Meaning:
    return lambda a, b, *rest: meaning(b, a, *rest)


def _last_two_swapped(meaning: Meaning) -> Meaning:
    return lambda *values: meaning(*values[:-2], values[-1], values[-2])


def _lowest_bit(meaning: Meaning) -> Meaning:
    def changed(*values: np.ndarray) -> np.ndarray:
        result = np.array(meaning(*values))
        return result ^ True if result.dtype == bool else (_bits(result) ^ 1).view(result.dtype)

    return changed


def _toward_zero(meaning: Meaning) -> Meaning:
    """Drops the last bit of a float, or half of an integer's odd values."""

    def changed(*values: np.ndarray) -> np.ndarray:
        result = np.array(meaning(*values))
        return (_bits(result) & ~_bits(result).dtype.type(1)).view(result.dtype)

    return changed


def _no_subnormals(meaning: Meaning) -> Meaning:
    def changed(*values: np.ndarray) -> np.ndarray:
        result = np.array(meaning(*values))
        small = np.abs(result) < np.finfo(result.dtype).tiny
        return np.where(small, np.copysign(result.dtype.type(0), result), result)

    return changed


def _positive_zero(meaning: Meaning) -> Meaning:
    def changed(*values: np.ndarray) -> np.ndarray:
        result = np.array(meaning(*values))
        return np.where(result == 0, result.dtype.type(0), result)

    return changed


def _nan_is_zero(meaning: Meaning) -> Meaning:
    def changed(*values: np.ndarray) -> np.ndarray:
        result = np.array(meaning(*values))
        return np.where(np.isnan(result), result.dtype.type(0), result)

    return changed


def _first_changes_sign(meaning: Meaning) -> Meaning:
    return lambda first, *rest: meaning(np.negative(first), *rest)


def _opposite_sign(meaning: Meaning) -> Meaning:
    """Reads the first operand with the other signedness; the result keeps its type."""

    def changed(first: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        kind = {"u": "i", "i": "u"}[first.dtype.kind] + str(first.dtype.itemsize)
        result = np.array(meaning(first.view(kind), *rest))
        want = np.array(meaning(first, *rest)).dtype
        return result.astype(want)

    return changed


def _top_bit(meaning: Meaning) -> Meaning:
    """Flips the top bit where the first operand's is set."""

    def changed(*values: np.ndarray) -> np.ndarray:
        result = np.array(meaning(*values))
        first = _bits(np.asarray(values[0]))
        set_ = first >> (8 * first.dtype.itemsize - 1) != 0
        if result.dtype == bool:
            return result ^ set_
        top = _bits(result).dtype.type(1) << (8 * result.dtype.itemsize - 1)
        return np.where(set_, _bits(result) ^ top, _bits(result)).view(result.dtype)

    return changed


MISREADINGS: dict[str, Callable[[Meaning], Meaning]] = {
    "first two operands swapped": _swapped,
    "last two operands swapped": _last_two_swapped,
    "lowest bit inverted": _lowest_bit,
    "lowest bit lost": _toward_zero,
    "subnormal results flushed": _no_subnormals,
    "zeros without sign": _positive_zero,
    "NaN becomes zero": _nan_is_zero,
    "first operand negated": _first_changes_sign,
    "first operand of the other signedness": _opposite_sign,
    "top bit inverted where the first operand has it": _top_bit,
}

#: Misreadings of other instructions: (pattern of a line, what the simulator reads).
TEXTS: dict[str, tuple[str, str]] = {
    "signed bytes unsigned": (r"(ld\.global\.nc)\.s8 ", r"\1.u8 "),
    "unsigned bytes signed": (r"(ld\.global(?:\.nc)?)\.u8 ", r"\1.s8 "),
    "halves signed": (r"(ld\.global(?:\.nc)?)\.u16 ", r"\1.s16 "),
    "pairs reversed": (r"(ld\.global\S*\.v2\.\S+) \{(\S+), (\S+)\}", r"\1 {\3, \2}"),
    "four words rotated": (
        r"(ld\.global\S*\.v4\.\S+) \{(\S+), (\S+), (\S+), (\S+)\}",
        r"\1 {\3, \4, \5, \2}",
    ),
    "stored pairs reversed": (r"(st\.global\S*\.v2\.\S+ \S+) \{(\S+), (\S+)\}", r"\1 {\3, \2}"),
    "stored words swapped": (
        r"(st\.global\S*\.v4\.\S+ \S+) \{(\S+), (\S+), (\S+), (\S+)\}",
        r"\1 {\2, \4, \3, \5}",
    ),
    "shared pairs reversed": (r"(ld\.shared\S*\.v2\.\S+) \{(\S+), (\S+)\}", r"\1 {\3, \2}"),
    "shared words swapped": (
        r"(ld\.shared\S*\.v4\.\S+) \{(\S+), (\S+), (\S+), (\S+)\}",
        r"\1 {\3, \2, \4, \5}",
    ),
    "bytes of u8 products signed": (r"(mma\S*\.s32)\.u8\.s8\.s32", r"\1.s8.s8.s32"),
    "bytes of s8 products unsigned": (r"(mma\S*m16n8k32\S*\.s32)\.s8\.s8\.s32", r"\1.u8.s8.s32"),
    "halves of products bf16": (r"(mma\S*\.f32)\.f16\.f16\.f32", r"\1.bf16.bf16.f32"),
    "bf16 of products halves": (r"(mma\S*\.f32)\.bf16\.bf16\.f32", r"\1.f16.f16.f32"),
    "rows of the first matrix swapped": (
        r"(mma\S* \{[^}]*\}, )\{(\S+), (\S+), (\S+), (\S+)\}",
        r"\1{\3, \2, \5, \4}",
    ),
    "depth of the first matrix swapped": (
        r"(mma\S* \{[^}]*\}, )\{(\S+), (\S+), (\S+), (\S+)\}",
        r"\1{\4, \5, \2, \3}",
    ),
    "matrices not transposed": (r"(ldmatrix\S*)\.trans", r"\1"),
    "matrices transposed": (r"(ldmatrix\S*x4)\.shared", r"\1.trans.shared"),
    "loaded matrices swapped": (
        r"(ldmatrix\S*x4\S*) \{(\S+), (\S+), (\S+), (\S+)\}",
        r"\1 {\2, \4, \3, \5}",
    ),
    "butterfly reads by index": (r"shfl\.sync\.bfly", "shfl.sync.idx"),
    "index reads by butterfly": (r"shfl\.sync\.idx", "shfl.sync.bfly"),
    "reduction of signed numbers": (r"(redux\.sync\.m\w+)\.u32", r"\1.s32"),
    "maximum is minimum": (r"redux\.sync\.max", "redux.sync.min"),
    "any is all": (r"vote\.sync\.any", "vote.sync.all"),
    "missing bytes copied": (r"(cp\.async\.c\w\.\S+ \S+ \S+ \d+), \S+;", r"\1;"),
    "peers are oneself": (r"mapa\S* (\S+), (\S+), \S+;", r"mov.u32 \1, \2;"),
    "atomic sum is maximum": (r"(atom\S*)\.add\.u32", r"\1.max.u32"),
}


@dataclasses.dataclass(frozen=True)
class Misread:
    """A misread instruction: an opcode of the table, or a pattern of TEXTS, and how."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: {self.how}"


# --- candidates


@functools.cache
def _support(name: str) -> Any:
    labels()  # makes tests/support importable
    return importlib.import_module(f"support.{name}")


@functools.cache
def _texts() -> dict[str, str]:
    """Maps subjects to their texts, shortest first."""
    texts = {label: load_subject(label).kernel.text for label in labels()}
    return dict(sorted(texts.items(), key=lambda pair: len(pair[1])))


def _users(misread: Misread) -> list[str]:
    if misread.what == "text":
        pattern = re.compile(TEXTS[misread.how][0])
        return [label for label, text in _texts().items() if pattern.search(text)]
    opcodes = _support("instruction_rows").opcodes
    return [label for label, text in _texts().items() if misread.what in opcodes(text)]


def candidates(seed: int) -> Iterator[Misread]:
    """Yields misreadings of rows that kernels use and of other instructions, shuffled."""
    opcodes = _support("instruction_rows").opcodes
    used = sorted(INSTRUCTIONS.keys() & set().union(*map(opcodes, _texts().values())))
    found = [Misread(opcode, how) for opcode in used for how in MISREADINGS]
    found += [Misread("text", how) for how in TEXTS]
    random.Random(seed).shuffle(found)
    return iter(found)


# --- one mutant


def _planted(kernel: Kernel, misread: Misread, operands: Any) -> tuple[np.ndarray, ...] | None:
    """Runs a kernel in a simulator that misreads; None if it fails."""
    text = kernel.text
    row: Instruction | None = INSTRUCTIONS.get(misread.what)
    if row is None:
        pattern, replacement = TEXTS[misread.how]
        text = re.sub(pattern, replacement, text)
    else:
        changed = MISREADINGS[misread.how](row.meaning)
        INSTRUCTIONS[row.opcode] = dataclasses.replace(row, meaning=changed)
    # the simulator caches texts that it has read
    text += f"// {next(_fresh)}\n"
    try:
        with np.errstate(all="ignore"):
            return simulator.run(dataclasses.replace(kernel, text=text, lines={}), *operands)
    except (simulator.SimulationError, TypeError, ValueError, LookupError):
        return None  # the misreading does not fit the operands' types, or addresses go astray
    finally:
        if row is not None:
            INSTRUCTIONS[row.opcode] = row


@functools.cache
def _executed(label: str) -> tuple[np.ndarray, ...]:
    subject = load_subject(label)
    return run(load(subject.kernel), subject.operands).arrays


@functools.cache
def _group(opcode: str) -> Any:
    (group,) = _support("instruction_rows").groups(seed=2, rows=[INSTRUCTIONS[opcode]])
    return group


@functools.cache
def _row_executed(opcode: str) -> np.ndarray:
    group = _group(opcode)
    return run(load(group.kernel), group.operands).arrays[0]


def _same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def verdict(misread: Misread) -> str | None:
    """Returns what finds a mutant, empty if nothing does, None if it is no mutant.

    A run that fails in the simulator finds nothing: the simulator would have found it alone.
    """
    changes = False
    if misread.what in INSTRUCTIONS:
        row, group = INSTRUCTIONS[misread.what], _group(misread.what)
        (plain,) = simulator.run(group.kernel, *group.operands)
        planted = _planted(group.kernel, misread, group.operands)
        if planted is None:
            return None
        differences = _support("instruction_rows").differences
        if differences(row, _row_executed(misread.what)[0], planted[0][0]).any():
            return "row"
        changes = bool((plain != planted[0]).any())
    for label in _users(misread)[:SUBJECTS_OF_ONE]:
        subject = load_subject(label)
        results = _planted(subject.kernel, misread, subject.operands)
        if results is None:
            continue
        if not _same(results, _executed(label)):
            return label
        changes |= not _same(results, subject.run())
    return "" if changes else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.machine_code.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    found = survivors = none = 0
    for misread in candidates(arguments.seed):
        if found + survivors == arguments.mutants:
            break
        by = verdict(misread)
        none += by is None
        found += bool(by)
        if by == "":
            survivors += 1
            print(f"survives: {misread}")
        if by:
            print(f"found by {by}: {misread}", file=sys.stderr)
    total = found + survivors
    print(f"{found} of {total} found: {found / max(1, total):.1%}; {none} more change nothing")
    return 0 if total and found / total >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
