"""Data classes of parsed PTX: functions as written, and the `Program` with calls inlined."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..address_space import SHARED_BASE


@dataclass(frozen=True)
class Register:
    name: str
    index: int
    cls: str


@dataclass(frozen=True)
class Immediate:
    """An integer, a float (decimal), or the bits of an f32 written as 0fXXXXXXXX."""

    value: int | float
    text: str
    float_bits: bool = False


@dataclass(frozen=True)
class Name:
    """A label, a variable of a memory, an entry parameter, a function or a special register."""

    name: str


@dataclass(frozen=True)
class Parameter:
    """A `.param` variable of a function, by its number: an argument or result of a call."""

    name: str
    number: int


@dataclass(frozen=True)
class Address:
    base: Register | Name | Parameter | None
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Register | Immediate, ...]


@dataclass(frozen=True)
class Pair:
    """Destination `d|p` of shfl and setp."""

    first: Register
    second: Register


@dataclass(frozen=True)
class Negated:
    register: Register


@dataclass(frozen=True)
class Arguments:
    """Parenthesized parameters of a call."""

    items: tuple[Parameter, ...]


Operand = Register | Immediate | Name | Parameter | Address | Vector | Pair | Negated | Arguments


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None  # predicate, and whether it is negated
    line: int
    text: str


@dataclass(frozen=True)
class EntryParameter:
    """A parameter of the entry: a scalar of `type`, or `nbytes` of an aggregate (b8).

    A scalar of u64 is usually a pointer.
    """

    name: str
    type: str
    nbytes: int


@dataclass(frozen=True)
class Data:
    """A `.const` or `.global` variable with its bytes at the start of a launch."""

    name: str
    space: str
    initial: np.ndarray


@dataclass
class Function:
    """An entry or a `.func` as written. `parameters` and `results` are for a `.func`."""

    name: str
    registers: list[Register] = field(default_factory=list)
    parameters: tuple[Parameter, ...] = ()
    results: tuple[Parameter, ...] = ()
    instructions: list[Instruction] = field(default_factory=list)
    # label -> index of the instruction after it
    labels: dict[str, int] = field(default_factory=dict)
    # label of .branchtargets -> its labels
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class Program:
    """A program to run: the entry with all calls inlined."""

    name: str
    version: tuple[int, int]
    target: int
    params: tuple[EntryParameter, ...] = ()
    registers: list[Register] = field(default_factory=list)
    symbols: dict[str, int] = field(default_factory=dict)  # shared symbol -> address
    static_shared_bytes: int = 0
    dynamic_start: int = SHARED_BASE  # address of dynamic shared memory
    local_symbols: dict[str, int] = field(default_factory=dict)  # local symbol -> address
    local_bytes: int = 0  # per thread
    data: dict[str, Data] = field(default_factory=dict)  # .const and .global variables
    required_block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] = (1, 1, 1)
    max_threads: int | None = None
    instructions: list[Instruction] = field(default_factory=list)
    # label -> index of the instruction after it
    labels: dict[str, int] = field(default_factory=dict)

    def shared_name(self, offset: int) -> str:
        """Returns `name + bytes` for an offset in shared memory."""
        below = [(at, name) for name, at in self.symbols.items() if at - SHARED_BASE <= offset]
        if not below:
            return f"shared offset {offset}"
        at, name = max(below)
        return f"shared {name}+{offset - (at - SHARED_BASE)}"
