"""Instructions in which the lanes of a warp take part together: shuffles, votes, the warp barrier.

Each has a membermask. The lanes it names must all execute the instruction together, and whoever executes it must
be named (threads that have exited do not count); a shuffle must read from a lane that takes part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..ptx.types import REGISTER_DTYPES, TYPES
from .errors import ShuffleError, TypeMismatch, UnknownInstruction
from .frame import WARP, Frame
from .operands import Operands, Step
from .program import Instruction, Negated, Pair

_ALL = 0xFFFFFFFF
_LANE = np.arange(WARP, dtype=np.int64)
_U32 = TYPES["u32"]


def shuffle_source(mode: str, lane: np.ndarray, b: Any, c: Any) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, whether it is in range) as PTX ISA 9.7.9.6 defines them; all int64, broadcasting."""
    step, clamp, segment = b & 31, c & 31, c >> 8 & 31
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - step
        inside = source >= highest
    else:
        source = {"down": lane + step, "bfly": lane ^ step, "idx": lowest | (step & ~segment)}[mode]
        inside = source <= highest
    return np.where(inside, source, lane), inside


@lru_cache(maxsize=1024)
def _uniform_source(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    return shuffle_source(mode, _LANE, np.int64(b), np.int64(c))


def _bits(frame: Frame, lanes: np.ndarray) -> np.ndarray:
    """Lane mask of each warp of the batch, shape (warps,), u32."""
    flags = np.zeros(frame.batch.lanes, np.bool_)
    flags[lanes] = True
    return np.packbits(flags.reshape(-1, WARP), axis=1, bitorder="little").view("<u4").reshape(-1)


def _check_members(frame: Frame, instruction: Instruction, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(members per lane, executing lanes' mask per lane), shape (lanes of the frame,); an error if they disagree."""
    lanes, batch = frame.all_lanes, frame.batch
    members = np.broadcast_to(members, lanes.size)
    warps = lanes // WARP
    here = _bits(frame, lanes)[warps]
    own = (members >> (lanes % WARP).astype(np.uint32)) & np.uint32(1) == 0
    if own.any():
        position = int(np.argmax(own))
        raise frame.fault(
            ShuffleError,
            instruction,
            position,
            f"lane {int(lanes[position]) % WARP} executes this but "
            f"membermask {int(members[position]):#x} does not name it",
        )
    live = _bits(frame, np.flatnonzero(batch.exists & ~batch.exited))[warps]
    absent = members & live & ~here
    if absent.any():
        position = int(np.argmax(absent != 0))
        raise frame.fault(
            ShuffleError,
            instruction,
            position,
            f"membermask {int(members[position]):#x} names lanes {int(absent[position]):#x}, which are elsewhere",
        )
    return members, here


def _full(frame: Frame, members: np.ndarray) -> bool:
    return members.size == 1 and int(members[0]) == _ALL and frame.whole_warps


def compile_shuffle(operands: Operands, instruction: Instruction) -> Step:
    parts = instruction.opcode.split(".")
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in ("up", "down", "bfly", "idx") or parts[3] != "b32":
        raise operands.error(UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction")
    operands.count(instruction, 5)
    mode = parts[2]
    target, *given = instruction.operands
    in_range = target.second if isinstance(target, Pair) else None
    target = target.first if isinstance(target, Pair) else target
    slot, convert = operands.destination(target, _U32, instruction, untyped=True)
    if in_range is not None and in_range.cls != "pred":
        raise operands.error(TypeMismatch, instruction, f"{in_range.name} is no predicate")
    slots = [operands.source(o, _U32, instruction, untyped=True)[0] for o in given]
    held = REGISTER_DTYPES[target.cls]  # type: ignore[union-attr]

    def run(frame: Frame) -> None:
        value, b, c, members = (frame.fetch(s, instruction) for s in slots)
        uniform = b.size == 1 and c.size == 1
        if _full(frame, members):
            if uniform:
                source, inside = _uniform_source(mode, int(b[0]), int(c[0]))
                result = value if value.size == 1 else value.reshape(-1, WARP).take(source, axis=1).reshape(-1)
                inside = np.tile(inside, frame.count // WARP) if in_range is not None else inside
            else:
                source, inside = shuffle_source(mode, frame.all_lanes % WARP, b.astype(np.int64), c.astype(np.int64))
                start = np.arange(frame.count) // WARP * WARP
                result = value if value.size == 1 else value[start + source]
        else:
            result, inside = _shuffle_some(frame, instruction, mode, value, b, c, members)
        frame.regs[slot] = result if result.dtype == held else result.view(held)
        if in_range is not None:
            frame.regs[in_range.index] = inside

    writes = (slot,) if in_range is None else (slot, in_range.index)
    return Step(run, tuple(r for s in slots for r in operands.register_read(s)), writes)


def _shuffle_some(
    frame: Frame,
    instruction: Instruction,
    mode: str,
    value: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    members: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """A shuffle among some lanes of their warps."""
    members, here = _check_members(frame, instruction, members)
    lanes = frame.all_lanes
    source, inside = shuffle_source(mode, lanes % WARP, b.astype(np.int64), c.astype(np.int64))
    source, inside = np.broadcast_to(source, lanes.size), np.broadcast_to(inside, lanes.size)
    readable = (members & here) >> source.astype(np.uint32) & np.uint32(1) == 1
    if not readable.all():
        position = int(np.argmin(readable))
        lane = int(lanes[position]) // WARP * WARP + int(source[position])
        why = "has exited" if frame.batch.exited[lane] or not frame.batch.exists[lane] else "does not take part"
        raise frame.fault(
            ShuffleError,
            instruction,
            position,
            f"lane {int(lanes[position]) % WARP} reads lane {int(source[position])}, which {why}",
        )
    where = np.zeros(frame.batch.lanes, np.int64)
    where[lanes] = np.arange(lanes.size)
    return (value if value.size == 1 else value[where[lanes // WARP * WARP + source]]), inside


def compile_vote(operands: Operands, instruction: Instruction) -> Step:
    modes = {
        "vote.sync.any.pred": "any",
        "vote.sync.all.pred": "all",
        "vote.sync.uni.pred": "uni",
        "vote.sync.ballot.b32": "ballot",
    }
    mode = modes.get(instruction.opcode)
    if mode is None:
        raise operands.error(UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction")
    operands.count(instruction, 3)
    target, given, mask = instruction.operands
    negated = isinstance(given, Negated)
    given = given.register if isinstance(given, Negated) else given
    slot, _ = operands.destination(target, _U32 if mode == "ballot" else TYPES["pred"], instruction)
    condition, _ = operands.source(given, TYPES["pred"], instruction)
    mask_slot, _ = operands.source(mask, _U32, instruction)

    def run(frame: Frame) -> None:
        holds, members = frame.fetch(condition, instruction), frame.fetch(mask_slot, instruction)
        holds = ~holds if negated else holds
        if holds.size == 1 and _full(frame, members):
            votes = np.where(holds, np.uint32(_ALL), np.uint32(0))
            here, members = np.full(1, _ALL, np.uint32), np.full(1, _ALL, np.uint32)
        else:
            members, here = _check_members(frame, instruction, members)
            lanes = frame.all_lanes
            votes = _bits(frame, lanes[np.broadcast_to(holds, lanes.size)])[lanes // WARP] & members
        everyone = members & here
        result = {
            "any": votes != 0,
            "all": votes == everyone,
            "uni": (votes == 0) | (votes == everyone),
            "ballot": votes,
        }[mode]
        frame.regs[slot] = result

    reads = tuple(r for s in (condition, mask_slot) for r in operands.register_read(s))
    return Step(run, reads, (slot,))


def compile_active_mask(operands: Operands, instruction: Instruction) -> Step:
    if instruction.opcode != "activemask.b32":
        raise operands.error(UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction")
    operands.count(instruction, 1)
    slot, _ = operands.destination(instruction.operands[0], _U32, instruction)

    def run(frame: Frame) -> None:
        lanes = frame.all_lanes
        frame.regs[slot] = _bits(frame, lanes)[lanes // WARP]

    return Step(run, (), (slot,))


def compile_warp_barrier(operands: Operands, instruction: Instruction) -> Step:
    operands.count(instruction, 1)
    slot, _ = operands.source(instruction.operands[0], _U32, instruction)

    def run(frame: Frame) -> None:
        members = frame.fetch(slot, instruction)
        if not _full(frame, members):
            _check_members(frame, instruction, members)
        frame.batch.pass_warp_barrier(frame.all_lanes)

    return Step(run, operands.register_read(slot), ())
