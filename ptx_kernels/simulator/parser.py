"""PTX text -> a Program: declarations, instructions and labels. Knows syntax only, no meanings."""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

from .errors import ParseError

SHARED_BASE = 0x400  # where shared windows start; not 0, so that a null address is an error

#: bits -> register class; f32 and predicates are classes of their own
_CLASSES = (
    {"pred": "pred", "f32": "f32"}
    | {f"{kind}{bits}": f"b{bits}" for kind in "bus" for bits in (16, 32, 64)}
    | {"f16": "b16", "bf16": "b16"}
)
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


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
    """A label, a shared symbol, a kernel parameter or a special register."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Name | None
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Register, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p` of shfl."""

    first: Register
    second: Register


@dataclass(frozen=True)
class Negated:
    register: Register


Operand = Register | Immediate | Name | Address | Vector | Pair | Negated


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None  # predicate, and whether it is negated
    line: int
    text: str


@dataclass
class Program:
    name: str
    version: tuple[int, int]
    target: int
    params: tuple[str, ...] = ()
    registers: list[Register] = field(default_factory=list)
    symbols: dict[str, int] = field(default_factory=dict)  # shared symbol -> address
    static_shared_bytes: int = 0
    dynamic_start: int = SHARED_BASE  # address of dynamic shared memory
    required_block: tuple[int, int, int] | None = None
    max_threads: int | None = None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> index of the instruction after it


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"(?:\.visible\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAM = re.compile(r"\.param\s+\.u64\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?([\w$%]+)")
_DELIMITER = re.compile(r"[;{}]|(?<!:):(?!:)")
_LABEL = re.compile(r"[\w$%.]+")
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.[busf]+(\d+)\s+([\w$%]+)((?:\[\d*\])*)")
_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_ADDRESS = re.compile(r"([\w$%.]+?)?\s*(?:([+-])\s*(-?(?:0[xX][0-9a-fA-F]+|\d+)))?")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.lines = text.split("\n")
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.kernel = "?"
        self.names: dict[str, Register] = {}

    def fail(self, position: int, message: str) -> ParseError:
        line = self.line(position)
        shown = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        return ParseError(f"kernel {self.kernel}: {message}\n  line {line}: {shown}", line)

    def line(self, position: int) -> int:
        return bisect_left(self.newlines, position) + 1

    def parse(self) -> Program:
        entries = list(_ENTRY.finditer(self.text))
        if len(entries) != 1:
            raise ParseError(f"expected one .entry, found {len(entries)}")
        entry = entries[0]
        self.kernel = entry.group(1)
        program = Program(self.kernel, *self.header(self.text[: entry.start()]))
        program.params = self.params(entry)
        self.directives(entry, program)
        self.declarations(entry.start(), program)
        self.body(entry.end(), program)
        return program

    def header(self, text: str) -> tuple[tuple[int, int], int]:
        version = re.search(r"\.version\s+(\d+)\.(\d+)", text)
        target = re.search(r"\.target\s+sm_(\d+)a?\b", text)
        if not version or not target:
            raise self.fail(0, ".version and .target sm_NN must come first")
        if not re.search(r"\.address_size\s+64\b", text):
            raise self.fail(0, ".address_size 64 is missing")
        return (int(version[1]), int(version[2])), int(target[1])

    def params(self, entry: re.Match[str]) -> tuple[str, ...]:
        names = []
        for part in filter(str.strip, entry.group(2).split(",")):
            match = _PARAM.fullmatch(part.strip())
            if not match:
                raise self.fail(entry.start(2), f"parameter `{part.strip()}` is no .param .u64 pointer")
            names.append(match[1])
        if len(set(names)) != len(names):
            raise self.fail(entry.start(2), "two parameters have the same name")
        return tuple(names)

    def directives(self, entry: re.Match[str], program: Program) -> None:
        for name, values in re.findall(r"\.(\w+)\s+([\d,\s]+)", entry.group(3)):
            extents = [int(v) for v in values.split(",")]
            x, y, z = (*extents, 1, 1)[:3]
            if name == "reqntid":
                program.required_block = (x, y, z)
            elif name == "maxntid":
                program.max_threads = x * y * z
            elif name not in ("minnctapersm", "maxnreg"):
                raise self.fail(entry.start(3), f"unknown directive .{name}")

    def declarations(self, end: int, program: Program) -> None:
        """Shared variables at module scope."""
        for match in re.finditer(r"\.(?:extern|shared)\b[^;]*;", self.text[:end]):
            self.shared(match.group()[:-1], match.start(), program)
        stray = re.search(r"\.(?:func|global|const)\b", self.text[:end])
        if stray:
            raise self.fail(stray.start(), f"{stray.group()} is not supported")

    def body(self, start: int, program: Program) -> None:
        position, depth, braces = start, 1, 0  # position: where the current statement begins
        for match in _DELIMITER.finditer(self.text, start):
            mark, pending = match.group(), self.text[position : match.start()].strip()
            if mark == "{":
                if pending:
                    braces += 1  # a vector operand
                    continue
                depth += 1
            elif mark == "}":
                if braces:
                    braces -= 1
                    continue
                if pending:
                    raise self.fail(position, f"`{pending}` lacks its ;")
                depth -= 1
                if depth == 0:
                    self.finish(match.end(), program)
                    return
            elif mark == ":":
                if not _LABEL.fullmatch(pending):
                    raise self.fail(match.start(), f"`{pending}` is no label")
                if pending in program.labels:
                    raise self.fail(match.start(), f"label {pending} is defined twice")
                program.labels[pending] = len(program.instructions)
            elif pending:
                self.statement(pending, self.skip_space(position), program)
            position = match.end()
        raise self.fail(len(self.text.rstrip()) - 1, "the kernel's body lacks its }")

    def skip_space(self, position: int) -> int:
        while self.text[position].isspace():
            position += 1
        return position

    def finish(self, end: int, program: Program) -> None:
        if self.text[end:].strip():
            raise self.fail(self.skip_space(end), "text after the kernel's body")
        program.registers = sorted(self.names.values(), key=lambda r: r.index)

    def statement(self, text: str, position: int, program: Program) -> None:
        if text.startswith(".reg"):
            self.registers(text, position)
        elif re.match(r"\.(extern|shared)\b", text):
            self.shared(text, position, program)
        elif re.match(r"\.(loc|pragma)\b", text):
            pass
        elif text.startswith("."):
            raise self.fail(position, f"unknown directive {text.split()[0]}")
        else:
            program.instructions.append(self.instruction(text, position))

    def registers(self, text: str, position: int) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.+)", text, re.DOTALL)
        if not match or match[1] not in _CLASSES:
            raise self.fail(position, f"`{text}` declares no register class that the simulator has")
        for declared in match[2].split(","):
            several = re.fullmatch(r"([\w$%]+)\s*(?:<(\d+)>)?", declared.strip())
            if not several:
                raise self.fail(position, f"`{declared.strip()}` is no register declaration")
            name, count = several.groups()
            for register in [name] if count is None else [f"{name}{i}" for i in range(int(count))]:
                if register in self.names:
                    raise self.fail(position, f"register {register} is declared twice")
                self.names[register] = Register(register, len(self.names), _CLASSES[match[1]])

    def shared(self, text: str, position: int, program: Program) -> None:
        match = _SHARED.fullmatch(text.strip())
        if not match:
            raise self.fail(position, f"`{text}` is no .shared declaration")
        extern, align, bits, name, extents = match.groups()
        size = _SIZES[bits]
        alignment = int(align or size)
        if alignment & (alignment - 1):
            raise self.fail(position, f"alignment {alignment} is no power of two")
        if name in program.symbols:
            raise self.fail(position, f"{name} is declared twice")
        if extern:
            program.symbols[name] = -1  # dynamic: starts after the static variables, known at the end
            return
        for extent in re.findall(r"\[(\d*)\]", extents):
            if not extent:
                raise self.fail(position, f"{name} has no size")
            size *= int(extent)
        start = -(-program.static_shared_bytes // alignment) * alignment
        program.symbols[name] = SHARED_BASE + start
        program.static_shared_bytes = start + size

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
        parts = [p.strip() for p in re.split(r",(?![^{]*\})", rest)] if rest.strip() else []
        operands = tuple(self.operand(p, position) for p in parts)
        return Instruction(opcode, operands, guard, self.line(position), shown + ";")

    def register(self, name: str, position: int) -> Register:
        if name not in self.names:
            raise self.fail(position, f"register {name} is not declared")
        return self.names[name]

    def operand(self, text: str, position: int) -> Operand:
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self.register(p.strip(), position) for p in text[1:-1].split(",")))
        if text.startswith("[") and text.endswith("]"):
            return self.address(text[1:-1].strip(), position)
        if text.startswith("!"):
            return Negated(self.register(text[1:].strip(), position))
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(self.register(first.strip(), position), self.register(second.strip(), position))
        if text in self.names:
            return self.names[text]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(struct.unpack(">f", bytes.fromhex(text[2:]))[0], text, float_bits=True)
        if _INTEGER.fullmatch(text):
            return Immediate(int(text.rstrip("U"), 0 if "x" in text.lower() else 10), text)
        if _FLOAT.fullmatch(text):
            return Immediate(float(text), text)
        if re.fullmatch(r"[\w$%.]+", text):
            if text.startswith("%") and not re.match(r"%(tid|ntid|ctaid|nctaid|laneid|warpid|nwarpid)\b", text):
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
        base = self.names.get(match[1])
        if base is None and match[1].startswith("%"):
            raise self.fail(position, f"register {match[1]} is not declared")
        return Address(base or Name(match[1]), offset)


@lru_cache(maxsize=512)
def parse(text: str) -> Program:
    """Parses a module of one entry. Raises ParseError with the line and its text."""
    program = _Parser(text).parse()
    program.dynamic_start = SHARED_BASE + -(-program.static_shared_bytes // 16) * 16
    program.symbols = {name: program.dynamic_start if at < 0 else at for name, at in program.symbols.items()}
    return program
