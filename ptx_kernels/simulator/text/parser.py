"""PTX text -> functions, variables and instructions. Knows syntax only, no meanings."""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..address_space import LOCAL_BASE, SHARED_BASE
from ..errors import ParseError
from .inline import inline
from .program import (
    Address,
    Arguments,
    Data,
    EntryParameter,
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

#: bits -> register class; f32 and predicates are classes of their own
_CLASSES = (
    {"pred": "pred", "f32": "f32"}
    | {f"{kind}{bits}": f"b{bits}" for kind in "bus" for bits in (16, 32, 64)}
    | {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}
)
#: What carries no meaning for a run: comments, and line-oriented debug directives (which lack a ;).
_COMMENT = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*(?:\.loc|\.file|@@DWARF)\b[^\n]*", re.DOTALL | re.MULTILINE
)
_SECTION = re.compile(r"\.section\s+\S+\s*\{[^}]*\}")
_HEADER = re.compile(r"\.(?:version|target|address_size)\b[^\n]*")
_FUNCTION = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)([{;])"
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|common)\s+)*(\.extern\s+)?\.(shared|local|const|global)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.([busf])(\d+)\s+([\w$%]+)((?:\[\d*\])*)(?:\s*=\s*(.+))?",
    re.DOTALL,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf]\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?([\w$%]+)(?:\[(\d+)\])?"
)
_DELIMITER = re.compile(r"[;{}]|(?<!:):(?!:)")
_LABEL = re.compile(r"[\w$%.]+")
_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_ADDRESS = re.compile(r"([\w$%.]+?)?\s*(?:([+-])\s*(-?(?:0[xX][0-9a-fA-F]+|\d+)))?")
#: What a declaration may ask for: a thread's local memory and a module's constants as CUDA has
#: them; and by choice.
_MOST_BYTES = {"local": 512 << 10, "const": 64 << 10, "global": 1 << 30}
_MOST_REGISTERS = 1 << 20
_SPECIAL = re.compile(r"%(?:(?:n?tid|n?ctaid)\.[xyz]|laneid|warpid|nwarpid|lanemask_\w\w)")


class _Parser:
    def __init__(self, text: str) -> None:
        def blank(match: re.Match[str]) -> str:
            return re.sub(r"[^\n]", " ", match.group())

        self.text = _SECTION.sub(blank, _COMMENT.sub(blank, text))
        self.lines = text.split("\n")
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.kernel = "?"
        self.functions: dict[str, Function] = {}
        self.scopes: list[
            dict[str, Register | Parameter | Name]
        ] = []  # of the function; each block's names, by kind
        self.count = 0  # of the function's `.param` variables

    def fail(self, position: int, message: str) -> ParseError:
        line = self.line(position)
        shown = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        return ParseError(f"kernel {self.kernel}: {message}\n  line {line}: {shown}", line)

    def line(self, position: int) -> int:
        return bisect_left(self.newlines, position) + 1

    def skip_space(self, position: int) -> int:
        while position < len(self.text) and self.text[position].isspace():
            position += 1
        return position

    # --- the module
    # -------------------------------------------------------------------------------------------------

    def parse(self) -> Program:
        entries = [m for m in _FUNCTION.finditer(self.text) if m[1] == "entry"]
        if len(entries) != 1:
            raise ParseError(f"expected one .entry, found {len(entries)}")
        self.kernel = entries[0][3]
        program = Program(self.kernel, *self.header(self.text[: entries[0].start()]))
        position = self.skip_space(0)
        while position < len(self.text):
            position = self.skip_space(self.module_statement(position, program))
        inline(program, self.functions)
        return program

    def header(self, text: str) -> tuple[tuple[int, int], int]:
        version = re.search(r"\.version\s+(\d+)\.(\d+)", text)
        target = re.search(r"\.target\s+sm_(\d+)[af]?\b", text)
        if not version or not target:
            raise self.fail(0, ".version and .target sm_NN must come first")
        if not re.search(r"\.address_size\s+64\b", text):
            raise self.fail(0, ".address_size 64 is missing")
        return (int(version[1]), int(version[2])), int(target[1])

    def module_statement(self, position: int, program: Program) -> int:
        """Where the text goes on after the header line, function or variable at `position`."""
        if header := _HEADER.match(self.text, position):
            return header.end()
        if function := _FUNCTION.match(self.text, position):
            return self.function(function, program)
        end = self.text.find(";", position)
        statement = self.text[position:end] if end >= 0 else ""
        if re.match(r"(?:\.\w+\s+)*\.(?:shared|const|global)\b", statement):
            self.variable(statement, position, program)
        elif not statement.startswith(".pragma"):
            raise self.fail(
                position, "no declaration that the simulator knows, outside of every function"
            )
        return end + 1

    def function(self, match: re.Match[str], program: Program) -> int:
        kind, results, name, parameters, directives, opening = match.groups()
        if opening == ";":
            return (
                match.end()
            )  # a prototype; a call of what never gets a body is refused where it stands
        function = self.functions[name] = Function(name)
        self.scopes, self.count = [{}], 0
        if kind == "entry":
            program.params = self.entry_parameters(parameters or "", match.start(4))
            for parameter in program.params:
                self.declare(parameter.name, Name(parameter.name), match.start(4))
            self.directives(directives, match.start(5), program)
        else:
            function.results = tuple(
                self.parameter(p, match.start()) for p in _parts(results or "")
            )
            function.parameters = tuple(
                self.parameter(p, match.start()) for p in _parts(parameters or "")
            )
        return self.body(match.end(), function, program)

    def entry_parameters(self, text: str, position: int) -> tuple[EntryParameter, ...]:
        parameters = []
        for part in _parts(text):
            match = _PARAM.fullmatch(part)
            if not match:
                raise self.fail(position, f"parameter `{part}` is no .param declaration")
            type_, name, count = match.groups()
            parameters.append(EntryParameter(name, type_, int(type_[1:]) // 8 * int(count or 1)))
        return tuple(parameters)

    def parameter(self, text: str, position: int) -> Parameter:
        """A `.param` variable of a function: of its header, or declared around a call."""
        match = _PARAM.fullmatch(text)
        if not match:
            raise self.fail(position, f"`{text}` is no .param declaration")
        parameter = Parameter(match[2], self.count)
        self.count += 1
        self.declare(match[2], parameter, position)
        return parameter

    def declare(self, name: str, what: Register | Parameter | Name, position: int) -> None:
        """A name of the block at hand: of registers, parameters, variables and labels no two may have the same."""
        if name in self.scopes[-1]:
            kind = {Register: "register ", Parameter: "parameter "}.get(type(what), "")
            raise self.fail(position, f"{kind}{name} is declared twice")
        self.scopes[-1][name] = what

    def directives(self, text: str, position: int, program: Program) -> None:
        for name, values in re.findall(r"\.(\w+)\s+([\d,\s]+)", text):
            extents = [int(v) for v in values.split(",")]
            x, y, z = (*extents, 1, 1)[:3]
            if name == "reqntid":
                program.required_block = (x, y, z)
            elif name == "maxntid":
                program.max_threads = x * y * z
            elif name not in ("minnctapersm", "maxnreg"):
                raise self.fail(position, f"unknown directive .{name}")

    # --- a body -----------------------------------------------------------------------------------------------------

    def body(self, start: int, function: Function, program: Program) -> int:
        """Parses up to the closing brace; the position after it."""
        position, braces = (
            start,
            0,
        )  # position: where the current statement begins; braces: open vector operands
        label = ""
        for match in _DELIMITER.finditer(self.text, start):
            mark, pending = match.group(), self.text[position : match.start()].strip()
            if mark == "{":
                if pending:
                    braces += 1
                    continue
                self.scopes.append({})
            elif mark == "}":
                if braces:
                    braces -= 1
                    continue
                if pending:
                    raise self.fail(position, f"`{pending}` lacks its ;")
                self.scopes.pop()
                if not self.scopes:
                    return match.end()
            elif mark == ":":
                if not _LABEL.fullmatch(pending):
                    raise self.fail(match.start(), f"`{pending}` is no label")
                if pending in function.labels:
                    raise self.fail(match.start(), f"label {pending} is defined twice")
                label = pending
                self.declare(label, Name(label), match.start())
                function.labels[label] = len(function.instructions)
            elif pending.startswith(".branchtargets"):
                function.tables[label] = tuple(_parts(pending.removeprefix(".branchtargets")))
            elif pending:
                self.statement(pending, self.skip_space(position), function, program)
            position = match.end()
        raise self.fail(len(self.text.rstrip()) - 1, "the kernel's body lacks its }")

    def statement(self, text: str, position: int, function: Function, program: Program) -> None:
        if text.startswith(".reg"):
            self.registers(text, position, function)
        elif text.startswith(".param"):
            self.parameter(text, position)
        elif re.match(r"\.(extern|shared|local|const|global)\b", text):
            self.variable(text, position, program)
        elif re.match(r"\.(loc|pragma)\b", text):
            pass
        elif text.startswith("."):
            raise self.fail(position, f"unknown directive {text.split()[0]}")
        else:
            function.instructions.append(self.instruction(text, position))

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

    def variable(self, text: str, position: int, program: Program) -> None:
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
        if self.scopes:
            self.declare(name, Name(name), position)
        if extern:
            if space != "shared":
                raise self.fail(position, f"{name} is defined elsewhere")
            program.symbols[
                name
            ] = -1  # dynamic: starts after the static variables, known at the end
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
        """The bytes of a variable's initializer, zero where it gives none; shape (size,), u8."""
        numbers = [self.number(part) for part in _parts((text or "").strip("{} \n\t"))]
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

    # --- instructions -----------------------------------------------------------------------------------------------

    def instruction(self, text: str, position: int) -> Instruction:
        shown = " ".join(text.split())
        guard = None
        match = re.match(r"@(!?)\s*([\w$%.]+)\s+", text)
        if match:
            guard = (self.register(match[2], position), bool(match[1]))
            if guard[0].cls != "pred":
                raise self.fail(position, f"{match[2]} guards an instruction but is no predicate")
            text = text[match.end() :]
        opcode, rest = re.split(r"\s+", text + " ", maxsplit=1)
        operands = tuple(self.operand(p, position) for p in _parts(rest))
        return Instruction(opcode, operands, guard, self.line(position), shown + ";")

    def named(self, name: str) -> Register | Parameter | Name | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def register(self, name: str, position: int) -> Register:
        found = self.named(name)
        if not isinstance(found, Register):
            raise self.fail(position, f"register {name} is not declared")
        return found

    def number(self, text: str) -> Immediate | None:
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(struct.unpack(">f", bytes.fromhex(text[2:]))[0], text, float_bits=True)
        if _INTEGER.fullmatch(text):
            return Immediate(int(text.rstrip("U"), 0 if "x" in text.lower() else 10), text)
        if _FLOAT.fullmatch(text):
            return Immediate(float(text), text)
        return None

    def operand(self, text: str, position: int) -> Operand:
        if text.startswith("{") and text.endswith("}"):
            return Vector(
                tuple(
                    self.number(p) or self.register(p, position)
                    for p in map(str.strip, text[1:-1].split(","))
                )
            )
        if text.startswith("[") and text.endswith("]"):
            return self.address(text[1:-1].strip(), position)
        if text.startswith("(") and text.endswith(")"):
            named = [self.named(p) for p in _parts(text[1:-1])]
            if not all(isinstance(p, Parameter) for p in named):
                raise self.fail(position, f"`{text}` are not all .param variables")
            return Arguments(tuple(p for p in named if isinstance(p, Parameter)))
        if text.startswith("!"):
            return Negated(self.register(text[1:].strip(), position))
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(
                self.register(first.strip(), position), self.register(second.strip(), position)
            )
        found = self.named(text) or self.number(text)
        if found is not None:
            return found
        if re.fullmatch(r"[\w$%.]+", text):
            if text.startswith("%") and not _SPECIAL.fullmatch(text):
                raise self.fail(position, f"register {text} is not declared")
            return Name(text)
        raise self.fail(position, f"`{text}` is no operand")

    def address(self, text: str, position: int) -> Address:
        if _INTEGER.fullmatch(text):
            return Address(None, int(text, 0))
        match = _ADDRESS.fullmatch(text)
        if not match or not match[1]:
            raise self.fail(position, f"[{text}] is no address")
        offset = int(match[3], 0) * (-1 if match[2] == "-" else 1) if match[3] else 0
        base = self.named(match[1])
        if base is None and match[1].startswith("%"):
            raise self.fail(position, f"register {match[1]} is not declared")
        return Address(base or Name(match[1]), offset)


def _parts(text: str) -> list[str]:
    """The operands of a list: what commas outside of braces and parentheses separate."""
    return [part for part in map(str.strip, _split(text)) if part]


def _split(text: str) -> Iterator[str]:
    if "{" not in text and "(" not in text:
        yield from text.split(",")
        return
    depth = start = 0
    for i, character in enumerate(text):
        if character in "({":
            depth += 1
        elif character in ")}":
            depth -= 1
        elif character == "," and not depth:
            yield text[start:i]
            start = i + 1
    yield text[start:]


@lru_cache(maxsize=512)
def parse(text: str) -> Program:
    """Parses a module of one entry, and inlines what it calls. Raises ParseError with the line and its text."""
    program = _Parser(text).parse()
    program.dynamic_start = SHARED_BASE + -(-program.static_shared_bytes // 16) * 16
    program.symbols = {
        name: program.dynamic_start if at < 0 else at for name, at in program.symbols.items()
    }
    return program
