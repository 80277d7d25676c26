"""atom and red: read, change and write in one step. Lanes that meet at one place are served one
after the other, the lowest lane first; a GPU may take any order, and so does a perturbed run. PTX
ISA 9.1, 9.7.13."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..access import Access
from ..batch import Batch
from ..errors import UnknownInstruction
from ..frame import Frame
from ..races.strong import Strong, semantics_of
from ..text.program import Instruction
from .loads_stores import UPDATED, address_of, synchronizes
from .operands import Operands, named_type
from .registry import compiles
from .step import Step

Operation = Callable[..., np.ndarray]  # (old, operand, ...) -> new

_ORDERINGS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_INTEGERS = ("u32", "s32", "u64", "s64")
_BITS = ("b32", "b64")


def _compare_and_swap(old: np.ndarray, expected: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old == expected, new, old)


#: name -> (types, meaning); a second operand only for cas
_OPERATIONS: dict[str, tuple[tuple[str, ...], Operation]] = {
    "add": (("u32", "s32", "u64", "f32"), np.add),
    "min": (_INTEGERS, np.minimum),
    "max": (_INTEGERS, np.maximum),
    "and": (_BITS, np.bitwise_and),
    "or": (_BITS, np.bitwise_or),
    "xor": (_BITS, np.bitwise_xor),
    "exch": (_BITS, lambda old, new: new),
    "cas": (_BITS, _compare_and_swap),
    "inc": (("u32",), lambda old, limit: np.where(old >= limit, np.uint32(0), old + np.uint32(1))),
    "dec": (
        ("u32",),
        lambda old, limit: np.where((old == 0) | (old > limit), limit, old - np.uint32(1)),
    ),
}


def _flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal floats as zeros of their sign."""
    return np.where(
        np.abs(x) < np.finfo(np.float32).smallest_normal, np.copysign(np.float32(0), x), x
    )


def _add_in_global(old: np.ndarray, x: np.ndarray) -> np.ndarray:
    """add.f32 in global memory flushes subnormals, in shared memory it keeps them."""
    return _flushed(_flushed(old) + _flushed(x))


def serve(
    view: np.ndarray,
    index: np.ndarray,
    operation: Operation,
    values: list[np.ndarray],
    turns: np.ndarray,
) -> np.ndarray:
    """view[index[i]] = operation(view[index[i]], values[0][i], ...) one lane after the other; what
    each lane found.
    """
    lanes = turns[
        np.argsort(index[turns], kind="stable")
    ]  # those of one place stand together, in their order
    first = np.flatnonzero(np.diff(index[lanes], prepend=-1))
    turn = np.arange(index.size) - np.repeat(first, np.diff(first, append=index.size))
    lanes = lanes[np.argsort(turn, kind="stable")]
    found = np.empty(index.size, view.dtype)
    for group in np.split(lanes, np.cumsum(np.bincount(turn))[:-1]):  # no two of a group meet
        at = index[group]
        found[group] = view[at]
        view[at] = operation(found[group], *(value[group] for value in values))
    return found


@compiles("atom", "red")
def compile_atomic(operands: Operands, instruction: Instruction) -> Step:
    kind, *modifiers, name, type_name = instruction.opcode.split(".")
    if modifiers and modifiers[0] in _ORDERINGS:
        modifiers.pop(0)
    if modifiers and modifiers[0] in _SCOPES:
        modifiers.pop(0)
    space = modifiers.pop(0).removesuffix("::cta") if modifiers else "generic"
    types, operation = _OPERATIONS.get(name, ((), np.add))
    returns = kind == "atom"
    if (
        modifiers
        or space not in UPDATED
        or type_name not in types
        or (not returns and name in ("exch", "cas"))
    ):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.count(instruction, 2 + returns + (name == "cas"))
    type_, untyped = named_type(type_name), type_name in _BITS
    assert type_ is not None
    target = instruction.operands[0] if returns else None
    address, *given = instruction.operands[1 if returns else 0 :]
    slot, convert = (-1, None)
    if target is not None:
        slot, convert = operands.destination(target, type_, instruction, untyped=untyped)
    base, offset = address_of(operands, instruction, address, space)
    sources = [operands.source(o, type_, instruction, untyped=untyped) for o in given]
    dtype, semantics = type_.dtype, semantics_of(instruction.opcode)
    if name == "add" and type_name == "f32" and space != "shared":
        operation = _add_in_global

    def run(batch: Batch, frame: Frame) -> None:
        addresses = np.broadcast_to(frame.fetch(base, instruction), frame.count)
        values = []
        for source, view in sources:
            value = frame.fetch(source, instruction)
            values.append(np.broadcast_to(value if view is None else view(value), frame.count))

        def change(
            view: np.ndarray, index: np.ndarray, lanes: np.ndarray, turns: np.ndarray
        ) -> np.ndarray:
            served = serve(view.view(dtype), index, operation, [v[lanes] for v in values], turns)
            return served.view(view.dtype)

        strong = Strong(change, semantics, returns=returns)
        access = Access(frame, instruction, addresses, offset, type_.size)
        found = batch.spaces[space].update(access, strong).view(dtype)
        if returns:
            frame.regs[slot] = found if convert is None else convert(found)

    reads = tuple(r for s in (base, *(s for s, _ in sources)) for r in operands.register_read(s))
    return Step(
        run,
        reads,
        (slot,) if returns else (),
        synchronizes=returns or synchronizes(instruction),
    )
