"""Products of small matrices, and loads of their fragments.

Layouts of fragments: PTX manual, chapters on mma.sync and ldmatrix. Lane 4g + t has row g, or of
the second operand column g.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction, Operand
from .errors import AbsentLaneFault, UnknownInstructionFault
from .operands import Reader
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine


def whole_warps(mask: Mask, m: Machine) -> np.ndarray:
    """Returns the numbers of the warps that take part.

    Raises:
      AbsentLaneFault: only some lanes of a warp do.
    """
    if mask is None:
        return np.arange(m.state.warps)
    some = mask.any(axis=0)
    if not mask[:, some].all():
        raise AbsentLaneFault("an instruction of a whole warp without some of its lanes")
    return np.flatnonzero(some)


def _registers(operand: Operand, m: Machine, count: int) -> list[Reader]:
    return [m.operands.raw(operand, word) for word in range(count)]


def _take(read: Reader, warps: np.ndarray, m: Machine) -> np.ndarray:
    """Reads a register of some warps: (8, 4, warps), by g and t."""
    value = np.broadcast_to(read(), m.state.counter.shape)[:, warps]
    return np.ascontiguousarray(value).reshape(8, 4, -1)


def _elements(word: np.ndarray, kind: str) -> np.ndarray:
    """Splits words (8, 4, warps) to numbers (warps, 8, 4 * parts)."""
    if kind in ("U8", "S8"):
        parts = word.view(np.uint8 if kind == "U8" else np.int8).reshape(*word.shape, 4)
    else:
        halves = word.view(np.uint16).reshape(*word.shape, 2)
        if kind == "F16":
            parts = halves.view(np.float16)
        else:
            parts = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return parts.transpose(2, 0, 1, 3).reshape(word.shape[2], 8, -1).astype(np.float64)


def _product(
    i: Instruction, m: Machine, kinds: tuple[str, str], shape: tuple[int, int], to_numbers: type
) -> Step:
    """Multiplies rows x depth by depth x 8 and adds rows x 8, in float64: exact for integers.

    Args:
      shape: (rows, depth) with 8 or 16 rows.
    """
    rows, depth = shape
    halves = rows // 8
    parts = 4 if kinds[0] in ("U8", "S8") else 2
    blocks = depth // (4 * parts)  # registers along the depth
    target, a, b, c = i.operands[:4]
    left = _registers(a, m, halves * blocks)
    right = _registers(b, m, blocks)
    addend = _registers(c, m, 2 * halves)
    puts = [m.state.registers[target.index + k] for k in range(2 * halves)]

    def step(mask: Mask) -> None:
        warps = whole_warps(mask, m)
        of_left = [_elements(_take(read, warps, m), kinds[0]) for read in left]
        of_halves = [np.concatenate(of_left[half::halves], axis=2) for half in range(halves)]
        of_right = [_elements(_take(read, warps, m), kinds[1]) for read in right]
        x = np.concatenate(of_halves, axis=1)
        y = np.concatenate(of_right, axis=2).transpose(0, 2, 1)
        z = np.empty((len(warps), rows, 8))
        for k, read in enumerate(addend):
            value: np.ndarray = _take(read, warps, m).view(to_numbers).transpose(2, 0, 1)
            z[:, 8 * (k >> 1) :, k & 1 :: 2][:, :8] = value
        total = x @ y + z
        if to_numbers is np.int32:
            result = total.astype(np.int64).astype(np.uint32)
        else:
            result = total.astype(np.float32).view(np.uint32)
        for k, place in enumerate(puts):
            part = result[:, 8 * (k >> 1) :, k & 1 :: 2][:, :8]
            place[:, warps] = part.transpose(1, 2, 0).reshape(32, -1)

    return step


@instruction("IMMA")
def _integer_product(i: Instruction, m: Machine) -> Step:
    shapes = {"8816": (8, 16), "16816": (16, 16), "16832": (16, 32)}
    if i.modifiers[0] not in shapes or len(i.modifiers) != 3:
        raise UnknownInstructionFault("shape or types of IMMA")
    return _product(i, m, (i.modifiers[1], i.modifiers[2]), shapes[i.modifiers[0]], np.int32)


@instruction("HMMA")
def _float_product(i: Instruction, m: Machine) -> Step:
    """Adds exactly and rounds once; hardware truncates inner sums."""
    shapes = {"1688": (16, 8), "16816": (16, 16)}
    if i.modifiers[0] not in shapes or set(i.modifiers[1:]) - {"F32", "BF16"} or "F32" not in i:
        raise UnknownInstructionFault("shape or types of HMMA")
    kind = "BF16" if "BF16" in i else "F16"
    return _product(i, m, (kind, kind), shapes[i.modifiers[0]], np.float32)


@instruction("LDSM")
def _load_matrices(i: Instruction, m: Machine) -> Step:
    """Loads 8 x 8 matrices of halves: lane 8k + r has the address of row r of matrix k."""
    count = int(i.one_of("2", "4", default="1"))
    transposed = "MT88" in i
    if not transposed and "M88" not in i or "16" not in i:
        raise UnknownInstructionFault("shape of LDSM")
    address = m.operands.address(i.operands[1], extended=False)
    puts = [m.state.registers[i.operands[0].index + k] for k in range(count)]

    def step(mask: Mask) -> None:
        warps = whole_warps(mask, m)
        addresses = np.broadcast_to(address(), m.state.counter.shape)[: 8 * count, warps]
        blocks = np.broadcast_to(m.blocks, m.state.counter.shape)[: 8 * count, warps]
        places = m.shared.place(addresses.ravel(), 16, blocks.ravel())
        rows = np.ascontiguousarray(m.shared.load(places, 16)).view(np.uint16)
        matrices = rows.reshape(count, 8, len(warps), 8)  # matrix, row, warp, column
        for matrix, place in zip(matrices, puts, strict=True):
            of_lane = matrix.transpose(2, 0, 1) if transposed else matrix.transpose(0, 2, 1)
            low, high = of_lane[:, 0::2].astype(np.uint32), of_lane[:, 1::2].astype(np.uint32)
            place[:, warps] = (low | high << np.uint32(16)).reshape(32, -1)

    return step
