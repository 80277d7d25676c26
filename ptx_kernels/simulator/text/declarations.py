"""Parses declarations of registers, variables and parameters."""

from __future__ import annotations

import re

import numpy as np

from ..address_space import LOCAL_BASE, SHARED_BASE
from .program import Data, EntryParameter, Function, Name, Parameter, Program, Register
from .scopes import Scopes, number
from .source import parts

#: bits -> register class; f32 and predicates are separate classes
_CLASSES = (
    {"pred": "pred", "f32": "f32"}
    | {f"{kind}{bits}": f"b{bits}" for kind in "bus" for bits in (16, 32, 64)}
    | {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|common)\s+)*(\.extern\s+)?\.(shared|local|const|global)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.([busf])(\d+)\s+([\w$%]+)((?:\[\d*\])*)(?:\s*=\s*(.+))?",
    re.DOTALL,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf]\d+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?([\w$%]+)(?:\[(\d+)\])?"
)
#: Limits on declarations. Those of local memory per thread and of a module's constants are CUDA's,
#: the others are ours.
_MOST_BYTES = {"local": 512 << 10, "const": 64 << 10, "global": 1 << 30}
_MOST_REGISTERS = 1 << 20


class Declarations:
    """Declarations of one program, filled by the parser.

    Attributes:
      count: `.param` variables of the current function so far.
    """

    def __init__(self, scopes: Scopes, program: Program) -> None:
        self.scopes, self.program = scopes, program
        self.fail, self.declare = scopes.source.fail, scopes.declare
        self.count = 0

    def entry_parameters(self, text: str, position: int) -> tuple[EntryParameter, ...]:
        parameters = []
        for part in parts(text):
            match = _PARAM.fullmatch(part)
            if not match:
                raise self.fail(position, f"parameter `{part}` is no .param declaration")
            type_, name, count = match.groups()
            parameters.append(EntryParameter(name, type_, int(type_[1:]) // 8 * int(count or 1)))
        return tuple(parameters)

    def parameter(self, text: str, position: int) -> Parameter:
        """Declares a `.param` variable of a function's header or around a call."""
        match = _PARAM.fullmatch(text)
        if not match:
            raise self.fail(position, f"`{text}` is no .param declaration")
        parameter = Parameter(match[2], self.count)
        self.count += 1
        self.declare(match[2], parameter, position)
        return parameter

    def registers(self, text: str, position: int, function: Function) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.+)", text, re.DOTALL)
        if not match or match[1] not in _CLASSES:
            raise self.fail(position, f"`{text}` declares no register class that the simulator has")
        for declared in match[2].split(","):
            several = re.fullmatch(r"([\w$%]+)\s*(?:<(\d+)>)?", declared.strip())
            if not several:
                raise self.fail(position, f"`{declared.strip()}` is no register declaration")
            name, count = several.groups()
            if count and int(count) > _MOST_REGISTERS:
                raise self.fail(
                    position,
                    f"{count} registers {name}; the simulator takes up to {_MOST_REGISTERS}",
                )
            for register in [name] if count is None else [f"{name}{i}" for i in range(int(count))]:
                new = Register(register, len(function.registers), _CLASSES[match[1]])
                self.declare(register, new, position)
                function.registers.append(new)

    def variable(self, text: str, position: int) -> None:
        program = self.program
        match = _VARIABLE.fullmatch(text.strip())
        if not match:
            raise self.fail(position, f"`{text}` is no variable that the simulator knows")
        extern, space, align, kind, bits, name, extents, initial = match.groups()
        size = int(bits) // 8
        alignment = int(align or size)
        if not alignment or alignment & (alignment - 1):
            raise self.fail(position, f"alignment {alignment} is no power of two")
        if name in program.symbols or name in program.local_symbols or name in program.data:
            raise self.fail(position, f"{name} is declared twice")
        if self.scopes.blocks:
            self.declare(name, Name(name), position)
        if extern:
            if space != "shared":
                raise self.fail(position, f"{name} is defined elsewhere")
            # dynamic: starts after the static variables, known at the end
            program.symbols[name] = -1
            return
        for extent in re.findall(r"\[(\d*)\]", extents):
            if not extent:
                raise self.fail(position, f"{name} has no size")
            size *= int(extent)
        start = -(-program.local_bytes // alignment) * alignment if space == "local" else 0
        if start + size > (most := _MOST_BYTES.get(space, start + size)):
            raise self.fail(
                position,
                f"{name} ends at {start + size} bytes of .{space} memory; {most} are the most",
            )
        if space in ("const", "global"):
            program.data[name] = Data(
                name, space, self.initial(initial, f"{kind}{bits}", size, position)
            )
        elif space == "shared":
            start = -(-program.static_shared_bytes // alignment) * alignment
            program.symbols[name] = SHARED_BASE + start
            program.static_shared_bytes = start + size
        else:
            program.local_symbols[name] = LOCAL_BASE + start
            program.local_bytes = start + size

    def initial(self, text: str | None, type_: str, size: int, position: int) -> np.ndarray:
        """Returns the bytes of a variable's initializer, zero-padded, shape (size,), u8."""
        numbers = [number(part) for part in parts((text or "").strip("{} \n\t"))]
        if None in numbers:
            raise self.fail(position, "an initializer of anything but numbers is not supported")
        dtype = np.dtype(("f" if type_[0] == "f" else "u") + str(int(type_[1:]) // 8))
        values = [
            n.value if dtype.kind == "f" else int(n.value) % (1 << 8 * dtype.itemsize)
            for n in numbers
            if n
        ]
        given = np.array(values, dtype).view(np.uint8)
        if given.size > size:
            raise self.fail(position, f"{given.size} bytes of initializer for {size} bytes")
        return np.concatenate([given, np.zeros(size - given.size, np.uint8)])
