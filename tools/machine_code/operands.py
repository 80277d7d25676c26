"""Compiles operands to functions that read or write them for all lanes.

A reader takes no argument and returns an array that broadcasts to (32, warps); it may be a view of
the registers. A writer takes such an array and a mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from .code import TRUE, ZERO, Instruction, Operand
from .errors import Fault, UnknownInstructionFault
from .state import Mask, State

Reader = Callable[[], np.ndarray]
Writer = Callable[[np.ndarray, Mask], None]
NAN = np.uint32(0x7FFFFFFF)  # what arithmetic returns for any NaN
_SIGN = np.uint32(0x80000000)
_TERM = re.compile(r"(-?)(UR|R)(\d+|Z)(?:\.(\w+))?$")
_SPECIAL = {"INF": np.inf, "QNAN": np.nan}


class Constants(Protocol):
    """Constant banks, and addresses of global variables."""

    def word(self, bank: int, offset: int) -> int: ...
    def address(self, variable: str) -> int: ...


def fixed(value: int, dtype: type = np.uint32) -> np.ndarray:
    """Returns an integer as an array (1, 1), wrapped to the type."""
    return np.array([[value & ((1 << 8 * np.dtype(dtype).itemsize) - 1)]], dtype)


class Operands:
    """Compiles the operands of one launch's instructions."""

    def __init__(self, state: State, constants: Constants) -> None:
        self.state, self.constants = state, constants

    # --- readers

    def raw(self, operand: Operand, word: int = 0) -> Reader:
        """Reads 32 bits, without marks; `word` counts on from the operand's first register."""
        value = self._raw(operand, word)
        return lambda: value

    def _raw(self, operand: Operand, word: int) -> np.ndarray:
        kind, index = operand.kind, operand.index
        if kind in ("register", "uniform"):
            if index == ZERO:
                return fixed(0)
            file = self.state.registers if kind == "register" else self.state.uniform
            return file[index + word]
        if kind == "constant":
            offset = sum(int(part, 0) for part in operand.body.split("+") if part != "URZ")
            return fixed(self.constants.word(index, offset + 4 * word))
        if kind == "symbol":
            return fixed(self.constants.address(operand.body) >> index)
        if kind == "integer":
            return fixed(index >> 32 * word)
        if kind == "float":
            return np.atleast_2d(_float(operand.body)).view(np.uint32)
        raise UnknownInstructionFault(f"operand {operand.text}")

    def u32(self, operand: Operand) -> Reader:
        """Reads an integer with its marks: `-` negates, `~` inverts."""
        value = self._raw(operand, 0)
        if operand.negative:
            return lambda: ~value + np.uint32(1)
        if operand.inverted:
            return lambda: ~value
        return lambda: value

    def s32(self, operand: Operand) -> Reader:
        read = self.u32(operand)
        return lambda: read().view(np.int32)

    def u64(self, operand: Operand) -> Reader:
        """Reads a pair of registers, or a sign-extended immediate."""
        if operand.kind == "integer":
            value = fixed(operand.index, np.uint64)
            return lambda: value
        low, high = self._raw(operand, 0), self._raw(operand, 1)

        def read() -> np.ndarray:
            value = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
            return ~value + np.uint64(1) if operand.negative else value

        return read

    def f32(self, operand: Operand) -> Reader:
        """Reads a float32 with its marks; `-` of a NaN flips its sign bit.

        Decimal immediates are numbers, hexadecimal ones bits.
        """
        if operand.kind == "integer" and "0x" not in operand.body:
            operand = replace(operand, kind="float")
        value = self._raw(operand, 0)
        if not operand.absolute and not operand.negative:
            floats = value.view(np.float32)
            return lambda: floats

        def read() -> np.ndarray:
            bits = value & ~_SIGN if operand.absolute else value
            return (bits ^ _SIGN if operand.negative else bits).view(np.float32)

        return read

    def predicate(self, operand: Operand) -> Reader:
        file = (
            self.state.predicates if operand.kind == "predicate" else self.state.uniform_predicates
        )
        value = file[operand.index]
        if operand.inverted:
            return lambda: ~value
        return lambda: value

    def address(self, operand: Operand, extended: bool) -> Reader:
        """Reads `[R2.64+UR4+0x10]` as int64; `extended` addresses have two registers a term."""
        terms: list[Reader] = []
        offset = 0
        for part in operand.body.replace("-0x", "+-0x").replace("++", "+").split("+"):
            if match := _TERM.match(part):
                terms.append(self._term(match, extended))
            elif part:
                offset += int(part, 0)
        first, *rest = terms or [lambda: np.zeros((1, 1), np.int64)]

        def read() -> np.ndarray:
            total = first() + offset
            for term in rest:
                total = total + term()
            return total

        return read

    def _term(self, match: re.Match[str], extended: bool) -> Reader:
        _, file, number, suffix = match.groups()
        index = ZERO if number == "Z" else int(number)
        operand = Operand(match[0], "uniform" if file == "UR" else "register", index)
        if extended and suffix != "U32":
            wide = self.u64(operand)
            return lambda: wide().view(np.int64)
        value, scale = self._raw(operand, 0), int(suffix[1:]) if suffix and suffix[0] == "X" else 1
        return lambda: value.astype(np.int64) * scale

    # --- writers

    def put(self, operand: Operand, word: int = 0) -> Writer:
        """Writes 32 bits of a register or a uniform register."""
        if operand.index == ZERO:
            return lambda value, mask: None
        if operand.kind == "uniform":
            return _uniform_writer(self.state.uniform[operand.index + word])
        return _writer(self.state.registers[operand.index + word])

    def put_wide(self, operand: Operand) -> Writer:
        """Writes a uint64 to a pair."""
        low, high = self.put(operand), self.put(operand, 1)

        def write(value: np.ndarray, mask: Mask) -> None:
            low(value.astype(np.uint32), mask)
            high((value >> np.uint64(32)).astype(np.uint32), mask)

        return write

    def put_predicate(self, operand: Operand) -> Writer:
        if operand.index == TRUE:
            return lambda value, mask: None
        if operand.kind == "uniform predicate":
            return _uniform_writer(self.state.uniform_predicates[operand.index])
        return _writer(self.state.predicates[operand.index])

    def put_f32(self, operand: Operand) -> Writer:
        """Writes float32 results of arithmetic, whose NaN have one pattern."""
        put = self.put(operand)

        def write(value: np.ndarray, mask: Mask) -> None:
            bits = value.view(np.uint32)
            nan = np.isnan(value)
            put(np.where(nan, NAN, bits) if nan.any() else bits, mask)

        return write


def carries(instruction: Instruction) -> tuple[list[Operand], list[Operand]]:
    """Splits the operands after the result: predicates that are written, and the rest."""
    rest = list(instruction.operands[1:])
    outs = []
    while rest and rest[0].is_predicate:
        outs.append(rest.pop(0))
    return outs, rest


def _writer(place: np.ndarray) -> Writer:
    def write(value: np.ndarray, mask: Mask) -> None:
        if mask is None:
            place[...] = value
        else:
            np.copyto(place, value, where=mask)

    return write


def _uniform_writer(place: np.ndarray) -> Writer:
    def write(value: np.ndarray, mask: Mask) -> None:
        if value.shape[0] == 1:
            if mask is None:
                place[...] = value
            else:
                np.copyto(place, value, where=mask.any(axis=0, keepdims=True))
            return
        lanes = np.ones(value.shape, bool) if mask is None else mask
        first = np.take_along_axis(value, lanes.argmax(axis=0)[None], axis=0)
        if (lanes & (value != first)).any():
            raise Fault("a uniform register gets different values from lanes of a warp")
        np.copyto(place, first, where=lanes.any(axis=0, keepdims=True))

    return write


def _float(body: str) -> np.ndarray:
    name = body.lstrip("+-")
    if name == "QNAN":
        bits = 0xFFFFFFFF if body[0] == "-" else 0x7FFFFFFF
        return fixed(bits).view(np.float32)
    value = _SPECIAL.get(name)
    value = float(body) if value is None else (-value if body[0] == "-" else value)
    return np.array([[value]], np.float64).astype(np.float32)
