"""Instructions in which the lanes of a warp take part together: shuffles, votes, matches, sums, the
warp barrier.

Each has a membermask. The lanes it names must all execute the instruction together, and whoever
executes it must be named (threads that have exited do not count); a shuffle must read from a lane
that takes part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ...ptx.types import REGISTER_DTYPES, TYPES
from ..batch import Batch
from ..errors import ShuffleError, TypeMismatch, UnknownInstruction
from ..frame import Frame
from ..layout import WARP
from ..text.program import Instruction, Negated, Pair
from .operands import Operands, named_type
from .registry import compiles
from .step import Step

_ALL = 0xFFFFFFFF
_LANE = np.arange(WARP, dtype=np.int64)
_U32 = TYPES["u32"]


def shuffle_source(mode: str, lane: np.ndarray, b: Any, c: Any) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, whether it is in range) as PTX ISA 9.7.9.6 defines them; all int64,
    broadcasting.
    """
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
    flags = np.zeros(frame.layout.lanes, np.bool_)
    flags[lanes] = True
    return np.packbits(flags.reshape(-1, WARP), axis=1, bitorder="little").view("<u4").reshape(-1)


def _check_members(
    batch: Batch, frame: Frame, instruction: Instruction, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(members per lane, executing lanes' mask per lane), shape (lanes of the frame,); an error if
    they disagree.
    """
    lanes = frame.all_lanes
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
    live = _bits(frame, np.flatnonzero(frame.layout.exists & ~batch.exited))[warps]
    absent = members & live & ~here
    if absent.any():
        position = int(np.argmax(absent != 0))
        raise frame.fault(
            ShuffleError,
            instruction,
            position,
            f"membermask {int(members[position]):#x} names lanes {int(absent[position]):#x}, which are elsewhere",
        )
    _check_agreement(frame, instruction, members)
    return members, here


def _check_agreement(frame: Frame, instruction: Instruction, members: np.ndarray) -> None:
    """An error if a lane that another one names has a membermask of its own."""
    if (members == members[0]).all():
        return
    lanes = frame.all_lanes
    masks = np.zeros(frame.layout.lanes, np.uint32)
    masks[lanes] = members
    theirs = masks.reshape(-1, WARP)[
        lanes // WARP
    ]  # shape (lanes of the frame, lanes of a warp); 0: not here
    named = members[:, None] >> np.arange(WARP, dtype=np.uint32) & np.uint32(1) == 1
    other = named & (theirs != 0) & (theirs != members[:, None])
    if other.any():
        position = int(np.argmax(other.any(axis=1)))
        lane = int(np.argmax(other[position]))
        what = (
            f"membermask {int(members[position]):#x} names lane {lane}, whose membermask is "
            f"{int(theirs[position, lane]):#x}"
        )
        raise frame.fault(ShuffleError, instruction, position, what)


def _full(frame: Frame, members: np.ndarray) -> bool:
    return members.size == 1 and int(members[0]) == _ALL and frame.whole_warps


@compiles("shfl")
def compile_shuffle(operands: Operands, instruction: Instruction) -> Step:
    parts = instruction.opcode.split(".")
    if (
        len(parts) != 4
        or parts[1] != "sync"
        or parts[2] not in ("up", "down", "bfly", "idx")
        or parts[3] != "b32"
    ):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
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

    def run(batch: Batch, frame: Frame) -> None:
        value, b, c, members = (frame.fetch(s, instruction) for s in slots)
        uniform = b.size == 1 and c.size == 1
        if _full(frame, members):
            if uniform:
                source, inside = _uniform_source(mode, int(b[0]), int(c[0]))
                result = (
                    value
                    if value.size == 1
                    else value.reshape(-1, WARP).take(source, axis=1).reshape(-1)
                )
                inside = np.tile(inside, frame.count // WARP) if in_range is not None else inside
            else:
                source, inside = shuffle_source(
                    mode, frame.all_lanes % WARP, b.astype(np.int64), c.astype(np.int64)
                )
                start = np.arange(frame.count) // WARP * WARP
                result = value if value.size == 1 else value[start + source]
        else:
            result, inside = _shuffle_some(batch, frame, instruction, mode, value, b, c, members)
        frame.regs[slot] = result if result.dtype == held else result.view(held)
        if in_range is not None:
            frame.regs[in_range.index] = inside

    writes = (slot,) if in_range is None else (slot, in_range.index)
    return Step(run, tuple(r for s in slots for r in operands.register_read(s)), writes)


def _shuffle_some(
    batch: Batch,
    frame: Frame,
    instruction: Instruction,
    mode: str,
    value: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    members: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """A shuffle among some lanes of their warps."""
    members, here = _check_members(batch, frame, instruction, members)
    lanes = frame.all_lanes
    source, inside = shuffle_source(mode, lanes % WARP, b.astype(np.int64), c.astype(np.int64))
    source, inside = np.broadcast_to(source, lanes.size), np.broadcast_to(inside, lanes.size)
    readable = (members & here) >> source.astype(np.uint32) & np.uint32(1) == 1
    if not readable.all():
        position = int(np.argmin(readable))
        lane = int(lanes[position]) // WARP * WARP + int(source[position])
        why = (
            "has exited"
            if batch.exited[lane] or not frame.layout.exists[lane]
            else "does not take part"
        )
        raise frame.fault(
            ShuffleError,
            instruction,
            position,
            f"lane {int(lanes[position]) % WARP} reads lane {int(source[position])}, which {why}",
        )
    where = np.zeros(frame.layout.lanes, np.int64)
    where[lanes] = np.arange(lanes.size)
    return (value if value.size == 1 else value[where[lanes // WARP * WARP + source]]), inside


@compiles("vote")
def compile_vote(operands: Operands, instruction: Instruction) -> Step:
    modes = {
        "vote.sync.any.pred": "any",
        "vote.sync.all.pred": "all",
        "vote.sync.uni.pred": "uni",
        "vote.sync.ballot.b32": "ballot",
    }
    mode = modes.get(instruction.opcode)
    if mode is None:
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.count(instruction, 3)
    target, given, mask = instruction.operands
    negated = isinstance(given, Negated)
    given = given.register if isinstance(given, Negated) else given
    slot, _ = operands.destination(target, _U32 if mode == "ballot" else TYPES["pred"], instruction)
    condition, _ = operands.source(given, TYPES["pred"], instruction)
    mask_slot, _ = operands.source(mask, _U32, instruction)

    def run(batch: Batch, frame: Frame) -> None:
        holds, members = frame.fetch(condition, instruction), frame.fetch(mask_slot, instruction)
        holds = ~holds if negated else holds
        if holds.size == 1 and _full(frame, members):
            votes = np.where(holds, np.uint32(_ALL), np.uint32(0))
            here, members = np.full(1, _ALL, np.uint32), np.full(1, _ALL, np.uint32)
        else:
            members, here = _check_members(batch, frame, instruction, members)
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


_REDUX: dict[str, tuple[Any, tuple[str, ...]]] = {
    "add": (np.add, ("u32", "s32")),
    "min": (np.minimum, ("u32", "s32")),
    "max": (np.maximum, ("u32", "s32")),
    "and": (np.bitwise_and, ("b32",)),
    "or": (np.bitwise_or, ("b32",)),
    "xor": (np.bitwise_xor, ("b32",)),
}


def _groups(frame: Frame, members: np.ndarray) -> list[np.ndarray]:
    """Positions in the frame of the lanes of each warp and membermask."""
    keys = (frame.all_lanes // WARP).astype(np.uint64) << np.uint64(32) | members.astype(np.uint64)
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]


@compiles("redux")
def compile_redux(operands: Operands, instruction: Instruction) -> Step:
    """redux.sync: one result of all member lanes, to each of them. sm_80."""
    parts = instruction.opcode.split(".")
    operation, types = _REDUX.get(parts[2] if len(parts) == 4 else "", (None, ()))
    if operation is None or parts[1] != "sync" or parts[3] not in types:
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, ((7, 0), 80))
    operands.count(instruction, 3)
    type_ = named_type(parts[3])
    assert type_ is not None
    target, given, mask = instruction.operands
    slot, convert = operands.destination(target, type_, instruction)
    source, view = operands.source(given, type_, instruction)
    mask_slot, _ = operands.source(mask, _U32, instruction)

    def run(batch: Batch, frame: Frame) -> None:
        value = frame.fetch(source, instruction)
        value = np.broadcast_to(value if view is None else view(value), frame.count)
        members, _ = _check_members(batch, frame, instruction, frame.fetch(mask_slot, instruction))
        result = np.empty(frame.count, type_.dtype)
        for positions in _groups(frame, members):
            result[positions] = operation.reduce(value[positions])
        frame.regs[slot] = result if convert is None else convert(result)

    reads = tuple(r for s in (source, mask_slot) for r in operands.register_read(s))
    return Step(run, reads, (slot,))


@compiles("match")
def compile_match(operands: Operands, instruction: Instruction) -> Step:
    """match.any: the member lanes with the same value; match.all: all member lanes if they agree,
    else none. sm_70.
    """
    parts = instruction.opcode.split(".")
    if parts not in (
        ["match", mode, "sync", bits] for mode in ("any", "all") for bits in ("b32", "b64")
    ):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, ((7, 0), 70))
    operands.count(instruction, 3)
    everyone, type_ = parts[1] == "all", named_type(parts[3])
    assert type_ is not None
    target, given, mask = instruction.operands
    agree = target.second if isinstance(target, Pair) else None
    if agree is not None and not everyone:
        raise operands.error(
            TypeMismatch, instruction, "only match.all has a predicate as its second result"
        )
    slot, _ = operands.destination(
        target.first if isinstance(target, Pair) else target, _U32, instruction
    )
    agree_slot = (
        () if agree is None else (operands.destination(agree, TYPES["pred"], instruction)[0],)
    )
    source, view = operands.source(given, type_, instruction, untyped=True)
    mask_slot, _ = operands.source(mask, _U32, instruction)

    def run(batch: Batch, frame: Frame) -> None:
        value = frame.fetch(source, instruction)
        value = np.broadcast_to(value if view is None else view(value), frame.count)
        members, _ = _check_members(batch, frame, instruction, frame.fetch(mask_slot, instruction))
        own = np.uint32(1) << (frame.all_lanes % WARP).astype(np.uint32)
        result = np.zeros(frame.count, np.uint32)
        for positions in _groups(frame, members):
            distinct = np.unique(value[positions])
            for key in distinct if not everyone else distinct[: distinct.size == 1]:
                same = positions[value[positions] == key]
                result[same] = np.bitwise_or.reduce(own[same])
        frame.regs[slot] = result
        for register in agree_slot:
            frame.regs[register] = result != 0

    reads = tuple(r for s in (source, mask_slot) for r in operands.register_read(s))
    return Step(run, reads, (slot, *agree_slot))


@compiles("activemask")
def compile_active_mask(operands: Operands, instruction: Instruction) -> Step:
    if instruction.opcode != "activemask.b32":
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.count(instruction, 1)
    slot, _ = operands.destination(instruction.operands[0], _U32, instruction)

    def run(batch: Batch, frame: Frame) -> None:
        lanes = frame.all_lanes
        frame.regs[slot] = _bits(frame, lanes)[lanes // WARP]

    return Step(run, (), (slot,))


@compiles("bar.warp.sync")
def compile_warp_barrier(operands: Operands, instruction: Instruction) -> Step:
    operands.count(instruction, 1)
    slot, _ = operands.source(instruction.operands[0], _U32, instruction)

    def run(batch: Batch, frame: Frame) -> None:
        members = frame.fetch(slot, instruction)
        if not _full(frame, members):
            _check_members(batch, frame, instruction, members)
        batch.order.pass_warp_barrier(frame.all_lanes)

    return Step(run, operands.register_read(slot), ())
