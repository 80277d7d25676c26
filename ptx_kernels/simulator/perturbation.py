"""What hardware leaves open, drawn at random: a kernel's results must not depend on it beyond its
tolerance.

Inside `with perturbation(seed):` every launch, also one that JAX makes on a thread of its own,
  - runs blocks in a random order, and between two barriers the warps of a block in random groups;
  - lets a random lane win where lanes of a warp store to one place, and serves atomics in a random
  order;
  - moves the results of `.approx` instructions within their documented error, always the same way
  for one operand,
    as hardware is a function too;
  - contracts multiplications and additions that state no rounding, as ptxas may;
  - adds up an mma in a random order.
The draws depend on the seed and the kernel's text only.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..ptx.instructions import INSTRUCTIONS, Error
from .text.program import Address, Instruction, Negated, Operand, Pair, Program, Register, Vector

_seed: int | None = None


@dataclass(frozen=True)
class Perturbation:
    """The draws of one launch. `salt` depends on the seed alone: all launches have one and the same
    hardware.
    """

    generator: np.random.Generator
    salt: np.uint32


@contextlib.contextmanager
def perturbation(seed: int) -> Iterator[None]:
    """Launches of this process inside the context are perturbed."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


def current(text: str) -> Perturbation | None:
    """The draws for a launch of `text`; None outside of a `perturbation`."""
    if _seed is None:
        return None
    salt = np.random.default_rng(_seed).integers(0, 1 << 32, dtype=np.uint32)
    return Perturbation(np.random.default_rng([_seed, zlib.crc32(text.encode())]), np.uint32(salt))


def moved(
    result: np.ndarray, operands: list[np.ndarray], error: Error, salt: np.uint32
) -> np.ndarray:
    """Float32 results moved by up to the documented error; what the operand's special values give
    is exact.
    """
    exact = result.astype(np.float64)
    bound = np.maximum(error.ulps * np.spacing(np.abs(result)), error.relative * np.abs(exact))
    nudged = exact + _direction(operands, salt) * np.maximum(bound, error.absolute)
    open_ = np.isfinite(result) & np.isfinite(operands[-1]) & (result != 0) & (operands[-1] != 0)
    return np.where(open_, nudged.astype(np.float32), result)


def _direction(operands: list[np.ndarray], salt: np.uint32) -> np.ndarray:
    """-1 to 1 by the operands' bits: a hash (the finalizer of MurmurHash3)."""
    mixed = np.array([salt])
    for operand in operands:
        mixed = (mixed ^ np.ascontiguousarray(operand).view(np.uint32)) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        mixed ^= mixed >> np.uint32(16)
    return mixed / 2.0**31 - 1.0


# --- contraction ---

_FUSED = {("mul.f32", "add.f32"): "fma.rn.f32", ("mul.ftz.f32", "add.ftz.f32"): "fma.rn.ftz.f32"}


def contracted(program: Program, generator: np.random.Generator) -> Program:
    """The program with some pairs of mul and add as one fma, each with probability 1/2.

    A pair is a mul without a stated rounding whose only reader is an add without one in the same basic block.
    """
    code = program.instructions
    if not any(i.opcode in ("mul.f32", "mul.ftz.f32") for i in code):
        return program
    writes = [_written(i) for i in code]
    reads = [_read(i) for i in code]
    borders = set(program.labels.values()) | {n + 1 for n, i in enumerate(code) if _ends_block(i)}
    changed = list(code)
    for at, product in enumerate(code):
        if product.opcode not in ("mul.f32", "mul.ftz.f32"):
            continue
        target = product.operands[0]
        readers = [n for n, registers in enumerate(reads) if target in registers]
        if (
            len(readers) != 1
            or sum(target in registers for registers in writes) != 1
            or product.guard
        ):
            continue
        (to,) = readers
        total = code[to]
        opcode = _FUSED.get((product.opcode, total.opcode))
        if opcode not in INSTRUCTIONS or to <= at or any(at < b <= to for b in borders):
            continue
        if (
            any(w & set(reads[at]) for w in writes[at + 1 : to])
            or total.operands.count(target) != 1
        ):
            continue
        if generator.random() < 0.5:
            addend = next(o for o in total.operands[1:] if o != target)
            changed[to] = replace(
                total, opcode=opcode, operands=(total.operands[0], *product.operands[1:], addend)
            )
    return replace(program, instructions=changed)


def _ends_block(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in ("bra", "brx", "ret", "exit", "bar", "barrier")


def _registers(operand: Operand) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [item for item in operand.items if isinstance(item, Register)]
    if isinstance(operand, Pair):
        return [operand.first, operand.second]
    if isinstance(operand, Negated):
        return [operand.register]
    if isinstance(operand, Address) and isinstance(operand.base, Register):
        return [operand.base]
    return []


def _written(instruction: Instruction) -> set[Register]:
    """The registers of the first operand; where an instruction writes none it is an address or a label."""
    first = instruction.operands[0] if instruction.operands else None
    return set(_registers(first)) if isinstance(first, Register | Vector | Pair) else set()


def _read(instruction: Instruction) -> list[Register]:
    """All other registers, and those of an address; of a store's or branch's operands all."""
    first, *others = instruction.operands or (None,)
    found = [register for operand in others for register in _registers(operand)]
    if isinstance(first, Address):
        found += _registers(first)
    return found + ([instruction.guard[0]] if instruction.guard else [])
