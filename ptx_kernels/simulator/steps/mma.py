"""Matrix instructions of a whole warp: `mma.sync` on tensor cores, and `ldmatrix`, which loads its
fragments.

Layouts follow PTX ISA 9.1, 9.7.14.5 (mma) and 9.7.14.5.15 (ldmatrix). With g = lane / 4 and t =
lane % 4, each 32-bit register of a fragment of A (or B) holds neighbouring values along k of row
(or column) g, t counting
registers: register i of A has rows g + 8 * (i % 2) and the lower or upper half of k, register i of
B the lower or upper half of k. Result i lies in row g + 8 * (i // 2), column 2t + i % 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Version, bf16_to_f32
from ...ptx.types import TYPES, Type
from ..access import Access
from ..batch import Batch
from ..errors import TypeMismatch, UnknownInstruction, WarpDivergence
from ..frame import Frame
from ..layout import WARP
from ..text.program import Instruction, Operand, Register, Vector
from .loads_stores import address_of
from .operands import Operands
from .registry import compiles
from .step import Step

_INTEGERS = ("s8", "u8")
_FLOATS = ("f16", "bf16")
_NEEDS: Version = ((7, 0), 80)
_U32 = TYPES["u32"]


@dataclass(frozen=True)
class _Shape:
    """One mma: 16 x k times k x 8, and the register counts of A, B and C."""

    k: int
    a: str
    b: str
    accumulator: Type

    @property
    def a_registers(self) -> int:
        return 2 * self.b_registers

    @property
    def b_registers(self) -> int:
        return self.k * self.width // 16

    @property
    def width(self) -> int:
        """Bytes of an element of A and B."""
        return 1 if self.a in _INTEGERS else 2


def _shape(opcode: str) -> _Shape | None:
    """What `mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32` says, or None if it is no mma known
    here.
    """
    parts = opcode.split(".")
    if len(parts) != 10 or parts[:3] != ["mma", "sync", "aligned"] or parts[4:6] != ["row", "col"]:
        return None
    size, (d, a, b, c) = parts[3], parts[6:]
    if a in _INTEGERS and b in _INTEGERS and d == c == "s32" and size in ("m16n8k16", "m16n8k32"):
        return _Shape(int(size[6:]), a, b, TYPES["s32"])
    if a in _FLOATS and a == b and d == c == "f32" and size in ("m16n8k8", "m16n8k16"):
        return _Shape(int(size[6:]), a, b, TYPES["f32"])
    return None


def _numbers(words: np.ndarray, type_: str) -> np.ndarray:
    """u32 (..., n) -> the values in them, (..., n * values per word): float32, which holds each
    type exactly.
    """
    if type_ == "bf16":
        return bf16_to_f32(words.view(np.uint16))
    return words.view({"s8": np.int8, "u8": np.uint8, "f16": np.float16}[type_]).astype(np.float32)


def _fragment(registers: list[np.ndarray], type_: str, rows: int) -> np.ndarray:
    """Registers u32 (lanes,) of A or B -> float32 (warps, rows, k): B as its transpose."""
    halves = rows // 8
    parts = [
        _numbers(r.reshape(-1, 8, 4), type_) for r in registers
    ]  # (warps, 8, k / halves of it)
    columns = [np.concatenate(parts[i : i + halves], axis=1) for i in range(0, len(parts), halves)]
    return np.concatenate(columns, axis=2)


def _multiply(
    shape: _Shape, a: np.ndarray, b: np.ndarray, c: np.ndarray, rng: np.random.Generator | None
) -> np.ndarray:
    """c + a @ b.T of (warps, 16, k) and (warps, 8, k).

    Integers are exact and wrap at 32 bits. Floats: the exact products' sum in float64, rounded once
    to float32. The order in which a tensor core adds, and how it rounds in between, is not
    documented; `rng` picks one of the
    possibilities: products in random order, each partial sum rounded to float32 towards zero or to
    nearest.
    """
    if shape.accumulator.is_integer:
        products = np.matmul(a, b.transpose(0, 2, 1))  # below 2^24: exact in float32
        return c + products.astype(np.int32)
    if rng is None:
        return (
            np.matmul(a.astype(np.float64), b.astype(np.float64).transpose(0, 2, 1)) + c
        ).astype(np.float32)
    total, truncate = c, bool(rng.integers(2))
    for i in rng.permutation(shape.k):
        exact = total + a[:, :, None, i].astype(np.float64) * b[:, None, :, i]
        total = exact.astype(np.float32)
        if truncate:
            total = np.where(
                np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total
            )
    return total


def _whole_warps(frame: Frame, instruction: Instruction) -> None:
    if frame.whole_warps:
        return
    lanes = frame.all_lanes
    present = np.bincount(lanes // WARP, minlength=frame.layout.lanes // WARP)[lanes // WARP]
    position = int(np.argmax(present < WARP))
    raise frame.fault(
        WarpDivergence,
        instruction,
        position,
        f"{int(present[position])} of the warp's 32 lanes execute this; all of them must, together",
    )


def _registers(
    operands: Operands, instruction: Instruction, operand: Operand, count: int
) -> tuple[Register, ...]:
    registers = (
        tuple(r for r in operand.items if isinstance(r, Register))
        if isinstance(operand, Vector)
        else ()
    )
    if len(registers) != count:
        raise operands.error(
            TypeMismatch, instruction, f"{instruction.opcode} needs a vector of {count} registers"
        )
    return registers


@compiles("mma")
def compile_mma(operands: Operands, instruction: Instruction) -> Step:
    shape = _shape(instruction.opcode)
    if shape is None:
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, _NEEDS)
    operands.count(instruction, 4)
    counts = (4, shape.a_registers, shape.b_registers, 4)
    types = (shape.accumulator, _U32, _U32, shape.accumulator)
    d, a, b, c = (
        [
            (register.index, operands.source(register, type_, instruction)[1])
            for register in _registers(operands, instruction, operand, count)
        ]
        for operand, count, type_ in zip(instruction.operands, counts, types, strict=True)
    )
    held = np.dtype(np.float32 if shape.accumulator is TYPES["f32"] else np.uint32)

    def fetch(frame: Frame, slots: list) -> list[np.ndarray]:
        values = (frame.fetch(slot, instruction) for slot, _ in slots)
        return [v if v.size > 1 else np.broadcast_to(v, frame.count) for v in values]

    def run(batch: Batch, frame: Frame) -> None:
        _whole_warps(frame, instruction)
        left = _fragment([np.ascontiguousarray(v) for v in fetch(frame, a)], shape.a, 16)
        right = _fragment([np.ascontiguousarray(v) for v in fetch(frame, b)], shape.b, 8)
        start = np.empty((frame.count // WARP, 16, 8), shape.accumulator.dtype)
        for i, value in enumerate(fetch(frame, c)):
            start[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] = value.view(start.dtype).reshape(
                -1, 8, 4
            )
        result = _multiply(shape, left, right, start, batch.freedom.generator)
        for i, (slot, _) in enumerate(d):
            part = result[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2]
            frame.regs[slot] = part.reshape(-1).view(held)

    reads = tuple(slot for slots in (a, b, c) for slot, _ in slots)
    return Step(run, reads, tuple(slot for slot, _ in d))


@compiles("ldmatrix")
def compile_ldmatrix(operands: Operands, instruction: Instruction) -> Step:
    """Lanes 8i to 8i + 7 name the rows (16 bytes each) of matrix i; every lane gets 32 bits of each
    matrix.
    """
    parts = instruction.opcode.split(".")
    transposed = parts[5:6] == ["trans"]
    spelled = (
        parts[:4] == ["ldmatrix", "sync", "aligned", "m8n8"]
        and parts[4:5]
        and parts[4] in ("x1", "x2", "x4")
    )
    if not spelled or parts[6 if transposed else 5 :] not in (
        ["shared", "b16"],
        ["shared::cta", "b16"],
    ):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, ((6, 5), 75))
    operands.count(instruction, 2)
    count = int(parts[4][1])
    registers = _registers(operands, instruction, instruction.operands[0], count)
    slots = [operands.destination(register, _U32, instruction)[0] for register in registers]
    base, offset = address_of(operands, instruction, instruction.operands[1], "shared")

    def run(batch: Batch, frame: Frame) -> None:
        _whole_warps(frame, instruction)
        addresses = np.broadcast_to(frame.fetch(base, instruction), frame.count)
        givers = np.flatnonzero(np.arange(frame.count) % WARP < 8 * count)
        some = Access(frame.subset(givers), instruction, addresses[givers], offset, 16)
        rows = batch.shared.load(some)
        matrices = np.broadcast_to(rows, givers.size).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        words = (
            np.ascontiguousarray(matrices.transpose(1, 0, 2, 3)).view(np.uint32).reshape(count, -1)
        )
        for slot, values in zip(slots, words, strict=True):
            frame.regs[slot] = values

    return Step(run, operands.register_read(base), tuple(slots))
