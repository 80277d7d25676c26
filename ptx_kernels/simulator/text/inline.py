"""Inlines calls into one flat body; each copy of a `.func` has its own registers and labels.

Variables of `.param` space become registers, one per stored (variable, offset). Passing an argument
is then a move. Reading a parameter that was never stored reads an unwritten register.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ParseError
from .program import (
    Address,
    Arguments,
    Function,
    Immediate,
    Instruction,
    Name,
    Negated,
    Operand,
    Pair,
    Parameter,
    Program,
    Register,
    Vector,
)

_MOST_INSTRUCTIONS = 200_000  # nested copies may grow without bound
_RETURNS = ("ret", "ret.uni")


def inline(program: Program, functions: dict[str, Function]) -> None:
    """Fills the program's registers, instructions and labels from its entry, all calls inlined.

    Raises:
      ParseError: a call of an unknown or recursive function, or through a register; parameters that
        do not fit.
    """
    _Inliner(program, functions).copy(functions[program.name], {}, ())


@dataclass
class _Copy:
    """One copy of a function, with its registers, parameters and labels in the program."""

    function: Function
    registers: list[Register]
    parameters: dict[int, int]  # number in the function -> number in the program
    suffix: str
    stack: tuple[str, ...] = field(default=())

    def label(self, name: str) -> str:
        return name + self.suffix


class _Inliner:
    def __init__(self, program: Program, functions: dict[str, Function]) -> None:
        self.program, self.functions = program, functions
        # (parameter, offset) -> register, bytes
        self.slots: dict[tuple[int, int], tuple[Register, int]] = {}
        self.parameters = self.copies = 0

    def fail(self, instruction: Instruction, message: str) -> ParseError:
        shown = f"line {instruction.line}: {instruction.text}"
        return ParseError(f"kernel {self.program.name}: {message}\n  {shown}", instruction.line)

    def new_register(self, name: str, cls: str) -> Register:
        register = Register(name, len(self.program.registers), cls)
        self.program.registers.append(register)
        return register

    def new_parameter(self) -> int:
        self.parameters += 1
        return self.parameters

    def copy(self, function: Function, bound: dict[int, int], stack: tuple[str, ...]) -> None:
        """Appends the function's body to the program.

        `bound`: the program's parameter for each parameter that the caller supplies.
        """
        program, code = self.program, self.program.instructions
        registers = [self.new_register(r.name, r.cls) for r in function.registers]
        copy = _Copy(
            function, registers, bound, f"@{self.copies}" if stack else "", (*stack, function.name)
        )
        self.copies += 1
        at: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            at.setdefault(index, []).append(label)
        for index, instruction in enumerate(function.instructions):
            for label in at.get(index, ()):
                program.labels[copy.label(label)] = len(code)
            self.instruction(instruction, copy)
            if len(code) > _MOST_INSTRUCTIONS:
                raise self.fail(
                    instruction,
                    f"more than {_MOST_INSTRUCTIONS} instructions once calls are inlined",
                )
        for label in at.get(len(function.instructions), ()):
            program.labels[copy.label(label)] = len(code)
        program.labels[copy.label("(end)")] = len(code)

    def instruction(self, instruction: Instruction, copy: _Copy) -> None:
        operation, operands = instruction.opcode.split(".")[0], instruction.operands
        guard = (
            (copy.registers[instruction.guard[0].index], instruction.guard[1])
            if instruction.guard
            else None
        )

        def emit(
            opcode: str, *operands: Operand, guard: tuple[Register, bool] | None = guard
        ) -> None:
            self.program.instructions.append(
                Instruction(opcode, operands, guard, instruction.line, instruction.text)
            )

        if operation == "call":
            if guard is not None:
                raise self.fail(instruction, "a call under a predicate is not supported")
            self.call(instruction, copy)
        elif instruction.opcode in _RETURNS and len(copy.stack) > 1:
            emit("bra", Name(copy.label("(end)")))
        elif operation == "bra":
            names = (Name(copy.label(o.name)) if isinstance(o, Name) else o for o in operands)
            emit(instruction.opcode, *names)
        elif operation == "brx":
            if guard is not None:
                raise self.fail(instruction, "brx.idx under a predicate is not supported")
            index, targets = self.table(instruction, copy)
            taken = self.new_register("%brx", "pred")
            for number, target in enumerate(targets):
                emit("setp.eq.u32", taken, index, Immediate(number, str(number)))
                emit("bra", Name(copy.label(target)), guard=(taken, False))
            emit("trap")
        elif operation in ("ld", "st") and any(
            isinstance(o, Address) and isinstance(o.base, Parameter) for o in operands
        ):
            for opcode, *moved in self.parameter_moves(instruction, copy):
                emit(opcode, *moved)
        else:
            emit(instruction.opcode, *(self.operand(o, copy) for o in operands))

    def operand(self, operand: Operand, copy: _Copy) -> Operand:
        registers = copy.registers
        match operand:
            case Register():
                return registers[operand.index]
            case Vector():
                return Vector(
                    tuple(
                        registers[i.index] if isinstance(i, Register) else i for i in operand.items
                    )
                )
            case Pair():
                return Pair(registers[operand.first.index], registers[operand.second.index])
            case Negated():
                return Negated(registers[operand.register.index])
            case Address() if isinstance(operand.base, Register):
                return Address(registers[operand.base.index], operand.offset)
        return operand

    def table(self, instruction: Instruction, copy: _Copy) -> tuple[Register, tuple[str, ...]]:
        match instruction.operands:
            case (Register() as index, Name() as name) if name.name in copy.function.tables:
                return copy.registers[index.index], copy.function.tables[name.name]
        raise self.fail(instruction, "brx.idx takes a register and the label of .branchtargets")

    def call(self, instruction: Instruction, copy: _Copy) -> None:
        lists = [o.items for o in instruction.operands if isinstance(o, Arguments)]
        names = [o.name for o in instruction.operands if isinstance(o, Name)]
        if len(names) != 1 or not isinstance(
            instruction.operands[min(len(lists), 1)], Name | Arguments
        ):
            raise self.fail(
                instruction, "only calls of functions by name are supported, not through a register"
            )
        function = self.functions.get(names[0])
        if function is None or names[0] == self.program.name:
            raise self.fail(instruction, f"calls {names[0]}, which has no body")
        if names[0] in copy.stack:
            raise self.fail(
                instruction, f"recursion is not supported: {' -> '.join((*copy.stack, names[0]))}"
            )
        first = isinstance(instruction.operands[0], Arguments)
        results = lists[0] if first else ()
        arguments = lists[-1] if len(lists) > first else ()
        formal = (*function.results, *function.parameters)
        if len(results) != len(function.results) or len(arguments) != len(function.parameters):
            raise self.fail(
                instruction,
                f"{names[0]} takes {len(function.parameters)} parameters and gives "
                f"{len(function.results)}, got {len(arguments)} and {len(results)}",
            )
        bound = {
            f.number: self.number(a, copy)
            for f, a in zip(formal, (*results, *arguments), strict=True)
        }
        self.copy(function, bound, copy.stack)

    def number(self, parameter: Parameter, copy: _Copy) -> int:
        """Returns the number in the program of a function's `.param` variable."""
        if parameter.number not in copy.parameters:
            copy.parameters[parameter.number] = self.new_parameter()
        return copy.parameters[parameter.number]

    def parameter_moves(
        self, instruction: Instruction, copy: _Copy
    ) -> list[tuple[str, Operand, Operand]]:
        """Translates ld.param or st.param to moves: (opcode, destination, source)."""
        parts, load = instruction.opcode.split("."), instruction.opcode.startswith("ld")
        if len(instruction.operands) != 2 or parts[1] != "param":
            raise self.fail(instruction, f"{instruction.opcode} cannot reach .param space")
        value, place = instruction.operands if load else reversed(instruction.operands)
        values = value.items if isinstance(value, Vector) else (value,)
        vector, size = parts[2:-1], int(parts[-1][1:]) // 8
        if (
            not isinstance(place, Address)
            or not isinstance(place.base, Parameter)
            or vector != ([f"v{len(values)}"] if len(values) > 1 else [])
        ):
            raise self.fail(
                instruction,
                f"{instruction.opcode} moves no {len(values)} registers to or from .param",
            )
        moves: list[tuple[str, Operand, Operand]] = []
        for i, item in enumerate(values):
            key = self.number(place.base, copy), place.offset + i * size
            if key not in self.slots:
                if load:
                    raise self.fail(
                        instruction, f"nothing stores [{place.base.name}+{key[1]}] before this"
                    )
                self.slots[key] = (
                    self.new_register(f"{place.base.name}+{key[1]}", f"b{8 * max(size, 2)}"),
                    size,
                )
            slot, stored = self.slots[key]
            if stored != size:
                raise self.fail(
                    instruction, f"[{place.base.name}+{key[1]}] holds {stored} bytes, not {size}"
                )
            given = self.operand(item, copy)
            if load:
                moves.append((_load_move(given, parts[-1], size), given, slot))
            else:
                moves.append((f"mov.b{8 * max(size, 2)}", slot, given))
        return moves


def _load_move(destination: Operand, type_: str, size: int) -> str:
    """Returns the opcode of a move of a parameter's bits into a register, which may be wider."""
    held = (
        {"b16": 2, "b32": 4, "f32": 4, "b64": 8}.get(destination.cls, 0)
        if isinstance(destination, Register)
        else 0
    )
    if held == size:
        return f"mov.b{8 * size}"
    sign = "s" if type_[0] == "s" else "u"
    return f"cvt.{sign}{8 * held}.{sign}{8 * size}"
