"""Parses the syntax of PTX text into functions, variables and instructions.

It does not know the meaning of instructions.
"""

from __future__ import annotations

import re
from functools import lru_cache

from ...ptx.instructions import CLUSTERS
from ..address_space import SHARED_BASE
from ..errors import ParseError
from .declarations import Declarations
from .inline import inline
from .program import Function, Instruction, Name, Program
from .scopes import Scopes
from .source import Source, parts

_HEADER = re.compile(r"\.(?:version|target|address_size)\b[^\n]*")
_FUNCTION = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*"
    r"(?:\(([^)]*)\))?([^{;]*)([{;])"
)
_DELIMITER = re.compile(r"[;{}]|(?<!:):(?!:)")
_LABEL = re.compile(r"[\w$%.]+")


class _Parser:
    def __init__(self, text: str) -> None:
        self.source = Source(text)
        self.text, self.fail = self.source.text, self.source.fail
        self.functions: dict[str, Function] = {}
        entries = [m for m in _FUNCTION.finditer(self.text) if m[1] == "entry"]
        if len(entries) != 1:
            raise ParseError(f"expected one .entry, found {len(entries)}")
        self.source.kernel = entries[0][3]
        header = self.header(self.text[: entries[0].start()])
        self.program = Program(self.source.kernel, *header)
        self.scopes = Scopes(self.source)  # scopes of the current function
        self.declarations = Declarations(self.scopes, self.program)

    # --- the module ---

    def parse(self) -> Program:
        position = self.source.skip_space(0)
        while position < len(self.text):
            position = self.source.skip_space(self.module_statement(position))
        inline(self.program, self.functions)
        return self.program

    def header(self, text: str) -> tuple[tuple[int, int], int]:
        version = re.search(r"\.version\s+(\d+)\.(\d+)", text)
        target = re.search(r"\.target\s+sm_(\d+)[af]?\b", text)
        if not version or not target:
            raise self.fail(0, ".version and .target sm_NN must come first")
        if not re.search(r"\.address_size\s+64\b", text):
            raise self.fail(0, ".address_size 64 is missing")
        return (int(version[1]), int(version[2])), int(target[1])

    def module_statement(self, position: int) -> int:
        """Parses the header line, function or variable at `position`.

        Returns the position after it.
        """
        if header := _HEADER.match(self.text, position):
            return header.end()
        if function := _FUNCTION.match(self.text, position):
            return self.function(function)
        end = self.text.find(";", position)
        statement = self.text[position:end] if end >= 0 else ""
        if re.match(r"(?:\.\w+\s+)*\.(?:shared|const|global)\b", statement):
            self.declarations.variable(statement, position)
        elif not statement.startswith(".pragma"):
            raise self.fail(
                position, "no declaration that the simulator knows, outside of every function"
            )
        return end + 1

    def function(self, match: re.Match[str]) -> int:
        kind, results, name, parameters, directives, opening = match.groups()
        if opening == ";":
            return match.end()  # a prototype; calls of functions without a body are refused
        function, declared = Function(name), self.declarations
        self.functions[name] = function
        self.scopes.blocks, declared.count = [{}], 0
        if kind == "entry":
            program, position = self.program, match.start(4)
            program.params = declared.entry_parameters(parameters or "", position)
            for parameter in program.params:
                self.scopes.declare(parameter.name, Name(parameter.name), position)
            self.directives(directives, match.start(5))
        else:
            start = match.start()
            given = [parts(results or ""), parts(parameters or "")]
            function.results, function.parameters = (
                tuple(declared.parameter(p, start) for p in texts) for texts in given
            )
        return self.body(match.end(), function)

    def directives(self, text: str, position: int) -> None:
        program = self.program
        for name, values in re.findall(r"\.(\w+)\s+([\d,\s]+)", text):
            extents = [int(v) for v in values.split(",")]
            x, y, z = (*extents, 1, 1)[:3]
            if name == "reqntid":
                program.required_block = (x, y, z)
            elif name == "maxntid":
                program.max_threads = x * y * z
            elif name == "reqnctapercluster":
                if program.version < CLUSTERS[0] or program.target < CLUSTERS[1]:
                    raise self.fail(position, "clusters need PTX 7.8 and sm_90")
                program.cluster = (x, y, z)
            elif name not in ("minnctapersm", "maxnreg"):
                raise self.fail(position, f"unknown directive .{name}")

    # --- a body ---

    def body(self, start: int, function: Function) -> int:
        """Parses up to the function's closing brace; returns the position after it."""
        position = start  # start of the current statement
        braces = 0  # open vector operands
        label = ""
        for match in _DELIMITER.finditer(self.text, start):
            mark, pending = match.group(), self.text[position : match.start()].strip()
            if mark == "{":
                if pending:
                    braces += 1
                    continue
                self.scopes.blocks.append({})
            elif mark == "}":
                if braces:
                    braces -= 1
                    continue
                if pending:
                    raise self.fail(position, f"`{pending}` lacks its ;")
                self.scopes.blocks.pop()
                if not self.scopes.blocks:
                    return match.end()
            elif mark == ":":
                if not _LABEL.fullmatch(pending):
                    raise self.fail(match.start(), f"`{pending}` is no label")
                if pending in function.labels:
                    raise self.fail(match.start(), f"label {pending} is defined twice")
                label = pending
                self.scopes.declare(label, Name(label), match.start())
                function.labels[label] = len(function.instructions)
            elif pending.startswith(".branchtargets"):
                function.tables[label] = tuple(parts(pending.removeprefix(".branchtargets")))
            elif pending:
                self.statement(pending, self.source.skip_space(position), function)
            position = match.end()
        raise self.fail(len(self.text.rstrip()) - 1, "the kernel's body lacks its }")

    def statement(self, text: str, position: int, function: Function) -> None:
        if text.startswith(".reg"):
            self.declarations.registers(text, position, function)
        elif text.startswith(".param"):
            self.declarations.parameter(text, position)
        elif re.match(r"\.(extern|shared|local|const|global)\b", text):
            self.declarations.variable(text, position)
        elif re.match(r"\.(loc|pragma)\b", text):
            pass
        elif text.startswith("."):
            raise self.fail(position, f"unknown directive {text.split()[0]}")
        else:
            function.instructions.append(self.instruction(text, position))

    def instruction(self, text: str, position: int) -> Instruction:
        shown = " ".join(text.split())
        guard = None
        match = re.match(r"@(!?)\s*([\w$%.]+)\s+", text)
        if match:
            guard = (self.scopes.register(match[2], position), bool(match[1]))
            if guard[0].cls != "pred":
                raise self.fail(position, f"{match[2]} guards an instruction but is no predicate")
            text = text[match.end() :]
        opcode, rest = re.split(r"\s+", text + " ", maxsplit=1)
        operands = tuple(self.scopes.operand(p, position) for p in parts(rest))
        return Instruction(opcode, operands, guard, self.source.line(position), shown + ";")


@lru_cache(maxsize=64)
def parse(text: str) -> Program:
    """Parses a module with one entry, and inlines the functions it calls.

    Raises:
      ParseError: its message has the number and the text of the line.
    """
    program = _Parser(text).parse()
    program.dynamic_start = SHARED_BASE + -(-program.static_shared_bytes // 16) * 16
    program.symbols = {
        name: program.dynamic_start if at < 0 else at for name, at in program.symbols.items()
    }
    return program
