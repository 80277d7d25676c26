"""Simulates ld, st, atom, red, membar and fence.

Strong accesses (relaxed, acquire or release) and atomics may be concurrent without a race.
`volatile` is not strong here: code that relies on it assumes that warps run in lockstep.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...ptx.instructions import NAMED_TYPES, machine_row
from ...ptx.instructions.memory import space_of
from ..errors import UnknownInstruction
from ..races.strong import Change, Semantics, Strong, semantics_of, unchanged
from ..text.program import Instruction
from .atomics import OPERATIONS, add_in_global, serve
from .binding import Call, Place
from .meaning import means
from .operands import Operands
from .registry import compiles
from .step import Step

_STRONG = ("relaxed", "acquire", "release")


@dataclass(frozen=True)
class _Kind:
    """State space, element type, bytes per lane and ordering of a memory opcode."""

    space: str
    dtype: np.dtype
    width: int
    strong: bool
    semantics: Semantics
    non_coherent: bool


@lru_cache(maxsize=1024)
def _kind(opcode: str) -> _Kind:
    spelled = machine_row(opcode)
    assert spelled is not None
    words = spelled.words
    type_, space = NAMED_TYPES[words["type"]], space_of(words)
    strong = any(word in words.get("order", "") for word in _STRONG)
    return _Kind(
        space,
        type_.dtype,
        type_.size * int(words.get("vector", "v1")[1:]),
        strong and space in ("global", "shared", "generic"),
        semantics_of(opcode),
        bool(words.get("nc")),
    )


@means("ld")
def load(call: Call, place: Place) -> np.ndarray | list[np.ndarray]:
    kind = _kind(call.instruction.opcode)
    memory = call.batch.spaces[kind.space]
    if kind.strong:
        observe = Strong(unchanged, kind.semantics, writes=False)
        items = memory.update(call.access_each(place, kind.width), observe)
    elif kind.non_coherent:
        items = call.batch.memory.load(call.access(place, kind.width), non_coherent=True)
    else:
        items = memory.load(call.access(place, kind.width))
    elements = items.view(kind.dtype)
    if kind.width == kind.dtype.itemsize:
        return elements
    return list(np.ascontiguousarray(elements.reshape(items.size, -1).T))


@means("st")
def store(call: Call, place: Place, value: np.ndarray | list[np.ndarray]) -> None:
    kind = _kind(call.instruction.opcode)
    memory, width = call.batch.spaces[kind.space], kind.width
    items = _joined(value, width) if isinstance(value, list) else value.view(f"u{width}")
    if not kind.strong:
        memory.store(call.access(place, width), items)
        return
    replace = Strong(_replaced_by(call.every(items)), kind.semantics, reads=False, returns=False)
    memory.update(call.access_each(place, width), replace)


@compiles("st")
def refuse_store(operands: Operands, instruction: Instruction) -> Step:
    """Raises for a store that no row of the instruction table matches."""
    parts = instruction.opcode.split(".")
    if "nc" in parts or "const" in parts:
        what = "only loads can be non-coherent or constant"
        raise operands.error(UnknownInstruction, instruction, what)
    raise operands.unknown(instruction)


def _joined(columns: list[np.ndarray], width: int) -> np.ndarray:
    """Combines values that are adjacent in memory into one item of `width` bytes per lane."""
    element = np.dtype(f"u{width // len(columns)}")
    rows = np.empty((max(c.size for c in columns), len(columns)), element)
    for i, column in enumerate(columns):
        rows[:, i] = column.view(element)
    return rows.view(np.complex128 if width == 16 else f"u{width}").reshape(-1)


def _replaced_by(items: np.ndarray) -> Change:
    def change(
        view: np.ndarray, index: np.ndarray, positions: np.ndarray, turns: np.ndarray
    ) -> np.ndarray:
        found = view[index]
        view[index[turns]] = items[positions][turns].view(view.dtype)
        return found

    return change


@means("atom", synchronizes=True)
def fetch_and_update(call: Call, place: Place, *values: np.ndarray) -> np.ndarray:
    return _update(call, place, values, returns=True)


@means("red")
def update(call: Call, place: Place, value: np.ndarray) -> None:
    _update(call, place, (value,), returns=False)


def _update(
    call: Call, place: Place, values: tuple[np.ndarray, ...], *, returns: bool
) -> np.ndarray:
    """Performs an atomic update at one address per lane; returns the previous values."""
    kind, name = _kind(call.instruction.opcode), call.words["operation"]
    operation, each = OPERATIONS[name], [call.every(value) for value in values]
    if name == "add" and kind.dtype == np.float32 and kind.space != "shared":
        operation = add_in_global

    def change(
        view: np.ndarray, index: np.ndarray, lanes: np.ndarray, turns: np.ndarray
    ) -> np.ndarray:
        items = view.view(kind.dtype)
        return serve(items, index, operation, [v[lanes] for v in each], turns).view(view.dtype)

    strong = Strong(change, kind.semantics, returns=returns)
    access = call.access_each(place, kind.width)
    found: np.ndarray = call.batch.spaces[kind.space].update(access, strong)
    return found.view(kind.dtype)


@means("membar", "fence", synchronizes=True)
def fence(call: Call) -> None:
    """Acts as a release and an acquire with the strong accesses around it.

    PTX ISA 9.1, 9.7.13.5 defines it.
    """
    call.batch.happens_before.fence(
        call.frame.all_lanes, semantics_of(call.instruction.opcode).wide
    )
