"""Binds an instruction's operands to register slots, as declared by its instruction table row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...ptx.instructions import (
    NAMED_TYPES,
    At,
    From,
    Number,
    Spelled,
    To,
    Version,
    Words,
    is_untyped,
)
from ...ptx.types import Type
from ..access import Access
from ..batch import Batch
from ..errors import ParseError, SimulationError, TypeMismatch
from ..frame import Frame
from ..text.program import Immediate, Instruction, Name, Negated, Operand, Pair, Register, Vector
from .operands import Convert, Operands

Read = Callable[[Frame], Any]


class Place(NamedTuple):
    """Addresses of a memory operand, one per lane or one for all, plus a constant byte offset.

    `addresses` has shape (lanes,) or (1,).
    """

    addresses: np.ndarray
    offset: int


class Call(NamedTuple):
    """One execution of an instruction by the lanes of a frame.

    Attributes:
      words: the opcode's variable words, by name.
      pair: whether the destination is `d|p`.
    """

    batch: Batch
    frame: Frame
    instruction: Instruction
    words: Words
    pair: bool

    def every(self, values: np.ndarray) -> np.ndarray:
        """Broadcasts the values to one per lane, shape (lanes of the frame,)."""
        return values if values.size == self.frame.count else _spread(values, self.frame.count)

    def access(self, place: Place, width: int) -> Access:
        """Returns an access of `width` bytes at a memory operand."""
        return Access(self.frame, self.instruction, place.addresses, place.offset, width)

    def access_each(self, place: Place, width: int) -> Access:
        """Returns an access of `width` bytes at a memory operand, with one address per lane."""
        addresses = self.every(place.addresses)
        return Access(self.frame, self.instruction, addresses, place.offset, width)

    def fault(self, error: type[SimulationError], position: int, what: str) -> SimulationError:
        """Returns an error for the lane at this position in the frame."""
        return self.frame.fault(error, self.instruction, position, what)


def _spread(values: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(values, count)


class Binding:
    """Operands of one instruction, bound to slots of the register file.

    Attributes:
      targets: slot of each destination that is present, and the conversion of its result.
      readers: functions that read the sources: an array of the operand's type, a list of them, a
        `Place`, an int or None.
      reads: slots of the registers that are read.
      pair: whether the destination is `d|p`.
    """

    def __init__(self, operands: Operands, instruction: Instruction, spelled: Spelled) -> None:
        self._operands, self.instruction, self.spelled = operands, instruction, spelled
        self.targets: list[tuple[int, Convert | None]] = []
        self.reads: list[int] = []
        self.pair = False
        self.readers: list[Read] = []
        kinds = spelled.operands
        operands.needs(instruction, spelled.row.needs)
        operands.count(instruction, *range(spelled.least, len(kinds) + 1))
        given = instruction.operands
        for kind, operand in zip(kinds, given, strict=False):
            self._bind(kind, operand)
        self.readers += [_nothing] * (len(kinds) - len(given))

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(slot for slot, _ in self.targets)

    def values(self, frame: Frame) -> list[Any]:
        """Returns the values of the source operands for the frame's lanes."""
        return [read(frame) for read in self.readers]

    def call(self, batch: Batch, frame: Frame) -> Call:
        return Call(batch, frame, self.instruction, self.spelled.words, self.pair)

    def _bind(self, kind: To | From | At | Number, operand: Operand) -> None:
        if isinstance(kind, To):
            self._bind_target(kind, operand)
            return
        if kind.optional:
            self._require(kind.needs)
        if isinstance(kind, At):
            self.readers.append(self._place(kind, operand))
        elif isinstance(kind, Number):
            self.readers.append(self._number(kind, operand))
        elif kind.count is None:
            self.readers.append(self._source(kind, operand))
        else:
            readers = [self._source(kind, item) for item in self._vector(kind, operand)]
            self.readers.append(lambda frame: [read(frame) for read in readers])

    def _require(self, needs: Version) -> None:
        self._operands.needs(self.instruction, needs)

    def _vector(self, kind: To | From, operand: Operand) -> tuple[Register | Immediate, ...]:
        items = operand.items if isinstance(operand, Vector) else ()
        only_registers = isinstance(kind, To) or kind.registers
        if len(items) != kind.count or (
            only_registers and not all(isinstance(item, Register) for item in items)
        ):
            raise self._miscounted(kind)
        return items

    def _bind_target(self, kind: To, operand: Operand) -> None:
        if kind.sink and isinstance(operand, Name) and operand.name == "_":
            self._require(kind.needs)
            return
        if kind.count is not None:
            for item in self._vector(kind, operand):
                self._target(kind.type, item, kind.wider)
            return
        if isinstance(operand, Vector):
            raise self._miscounted(kind)
        if not isinstance(operand, Pair):
            self._target(kind.type, operand, kind.wider)
            return
        if not kind.second:
            raise self._error(
                TypeMismatch, f"{self.instruction.opcode} has no second result after |"
            )
        self._target(kind.type, operand.first, kind.wider)
        if kind.second == "pred" and operand.second.cls != "pred":
            raise self._error(TypeMismatch, f"{operand.second.name} is no predicate")
        self._target(kind.second, operand.second, False)
        self.pair = True

    def _target(self, spelling: str, operand: Operand, wider: bool) -> None:
        type_, untyped = _type(spelling)
        self.targets.append(
            self._operands.destination(
                operand, type_, self.instruction, untyped=untyped, wider=wider
            )
        )

    def _source(self, kind: From, operand: Operand) -> Read:
        type_, untyped = _type(kind.type)
        negated = kind.negatable and isinstance(operand, Negated)
        if isinstance(operand, Negated) and kind.negatable:
            operand = operand.register
        slot, convert = self._operands.source(
            operand, type_, self.instruction, untyped=untyped or kind.untyped, wider=kind.wider
        )
        return self._read(slot, np.logical_not if negated else convert)

    def _place(self, kind: At, operand: Operand) -> Read:
        slot, offset = self._operands.address(self.instruction, operand, kind.space)
        return self._read(slot, lambda addresses: Place(addresses, offset))

    def _read(self, slot: int, convert: Callable[[np.ndarray], Any] | None) -> Read:
        """Returns a function that reads a slot of the register file."""
        self.reads += self._operands.register_read(slot)
        instruction = self.instruction

        def read(frame: Frame) -> Any:
            value = frame.regs[slot]
            if value is None:
                value = frame.fetch(slot, instruction)
            return value if convert is None else convert(value)

        return read

    def _number(self, kind: Number, operand: Operand) -> Read:
        value = operand.value if isinstance(operand, Immediate) else None
        allowed = value in kind.choices if kind.choices else isinstance(value, int) and value >= 0
        if not isinstance(value, int) or not allowed:
            raise self._error(ParseError, f"{kind.what}, an immediate")
        return lambda frame: value

    def _miscounted(self, kind: To | From) -> SimulationError:
        what = f"needs a vector of {kind.count} registers"
        if kind.wider or kind.count is None:
            what = f"moves {kind.count or 1} register(s)"
        return self._error(TypeMismatch, f"{self.instruction.opcode} {what}")

    def _error(self, error: type[SimulationError], what: str) -> SimulationError:
        return self._operands.error(error, self.instruction, what)


def _nothing(frame: Frame) -> None:
    """Returns None, as the value of an omitted operand."""


def _type(spelling: str) -> tuple[Type, bool]:
    """Returns (type of an operand, whether any register class of its size fits)."""
    return NAMED_TYPES[spelling], is_untyped(spelling)
