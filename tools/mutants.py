"""Mutants: small bugs in a kernel's PTX, one at a time.

`tools.mutation` plants them, and the tests must find them.

A mutant changes, drops or adds one line of the body. Every operator below is a mistake that someone
writing or changing a kernel makes: a forgotten barrier, `<=` for `<`, a shift or mask that is off
by one, swapped operands, a loop that ends one iteration early, a wrong stride, an address computed
in 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LINE = re.compile(r"^(\s*)(@!?%\w+ )?([a-z][\w.:]*)\s+(.+);$")
_NUMBER = re.compile(r"-?\d+")
_OFFSET = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")


@dataclass(frozen=True)
class Mutant:
    """Replaces `line` (from 0) of the text, `before`, by `after`: several lines, one or none."""

    operator: str
    line: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        lines = text.split("\n")
        lines[self.line : self.line + 1] = [self.after] if self.after else []
        return "\n".join(lines)


@dataclass(frozen=True)
class _Line:
    """A parsed instruction of the text."""

    number: int
    text: str
    indent: str
    guard: str
    opcode: str
    operands: tuple[str, ...]

    def changed(
        self,
        *,
        guard: str | None = None,
        opcode: str | None = None,
        operands: list[str] | None = None,
    ) -> str:
        parts = list(self.operands) if operands is None else operands
        start = f"{self.indent}{self.guard if guard is None else guard}"
        return f"{start}{opcode or self.opcode} {', '.join(parts)};"

    def with_operand(self, index: int, value: str) -> str:
        operands = list(self.operands)
        operands[index] = value
        return self.changed(operands=operands)


def instructions(text: str) -> list[_Line]:
    """Returns the instructions between the declarations and the end of the body."""
    found = []
    for number, line in enumerate(text.split("\n")):
        match = _LINE.match(line)
        if match and not line.lstrip().startswith("."):
            indent, guard, opcode, operands = match.groups()
            parts = tuple(p.strip() for p in re.split(r",(?![^{\[]*[}\]])", operands))
            found.append(_Line(number, line, indent, guard or "", opcode, parts))
    return found


def _registers(operands: tuple[str, ...]) -> list[str]:
    return [name for operand in operands for name in re.findall(r"%\w+(?:\.\w+)?", operand)]


_WITHOUT_RESULT = ("st.", "red.", "bra", "bar.", "cp.", "mbarrier.", "fence", "membar")

_WITH_EFFECT = (*_WITHOUT_RESULT, "shfl.", "vote.", "atom.", "mma.", "ldmatrix.", "ld.param")

Operator = Callable[[_Line, "_Body"], Iterator[str]]


class _Body:
    """The full body, with the analyses that operators need."""

    def __init__(self, text: str) -> None:
        self.lines = instructions(text)
        self.definitions: dict[str, int] = {}
        for line in self.lines:
            if line.opcode.startswith(_WITHOUT_RESULT):
                continue
            for register in re.findall(r"%\w+", line.operands[0]):
                self.definitions[register] = self.definitions.get(register, 0) + 1
        self.unused = self._unused(text)
        self.loop_tests = self._loop_tests(text)
        self.steps = {
            line.operands[0]: int(line.operands[2])
            for line in self.lines
            if line.opcode in ("add.u32", "add.s32")
            and line.operands[0] == line.operands[1]
            and _NUMBER.fullmatch(line.operands[2])
        }

    def _unused(self, text: str) -> set[int]:
        """Returns line numbers of instructions whose results no later instruction reads.

        Results that only other such instructions read are included.
        """
        labels = self._labels(text)
        jumps = {
            line.number: labels[line.operands[-1]]
            for line in self.lines
            if line.operands[-1] in labels
        }
        readers: dict[str, list[int]] = {}
        for line in self.lines:
            has_effect = line.opcode.startswith(_WITH_EFFECT)
            for register in _registers(
                (line.guard, *(line.operands if has_effect else line.operands[1:]))
            ):
                readers.setdefault(register, []).append(line.number)

        def later(number: int) -> int:
            """Returns the first line that may run after this one.

            It is the target of the farthest jump back, if there is one.
            """
            start = number + 1
            while (
                back := min((to for at, to in jumps.items() if at >= start), default=start)
            ) < start:
                start = back
            return start

        dead = {line.number for line in self.lines if not line.opcode.startswith(_WITH_EFFECT)}
        candidates = [
            (line.number, later(line.number), _registers(line.operands[:1])) for line in self.lines
        ]
        changed = True
        while changed:
            used = {
                number
                for number, start, results in candidates
                if number in dead
                and any(
                    at >= start and at != number and at not in dead
                    for r in results
                    for at in readers.get(r, ())
                )
            }
            changed = bool(used)
            dead -= used
        return dead

    @staticmethod
    def _labels(text: str) -> dict[str, int]:
        return {
            m[1]: i
            for i, m in enumerate(re.match(r"^([\w$]+):$", s) for s in text.split("\n"))
            if m
        }

    def _loop_tests(self, text: str) -> set[int]:
        """Returns line numbers of the comparisons that the backward branches depend on."""
        labels = self._labels(text)
        tests = set()
        for at, line in enumerate(self.lines):
            if (
                line.opcode == "bra"
                and line.guard
                and labels.get(line.operands[0], line.number) < line.number
            ):
                predicate = line.guard.strip("@! ")
                for earlier in reversed(self.lines[:at]):
                    if earlier.operands[0] == predicate:
                        tests.add(earlier.number)
                        break
        return tests


_COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_NEIGHBOURS = (
    ("add.", "sub."),
    ("sub.", "add."),
    ("min.", "max."),
    ("max.", "min."),
    ("and.b", "or.b"),
    ("or.b", "and.b"),
    ("and.pred", "or.pred"),
    ("or.pred", "and.pred"),
    ("shr.s", "shr.u"),
    ("dp4a.u32.s32", "dp4a.s32.s32"),
    ("dp4a.s32.s32", "dp4a.u32.s32"),
    ("neg.f32", "abs.f32"),
    ("cvt.rni.", "cvt.rzi."),
    ("cvt.rn.f32.s32", "cvt.rn.f32.u32"),
    ("ex2.approx", "rcp.approx"),
    ("shfl.sync.bfly", "shfl.sync.down"),
    ("ld.shared.s8", "ld.shared.u8"),
    ("mul.rn.f32", "add.rn.f32"),
)
_ORDERED = (
    "sub.",
    "div.",
    "setp.lt",
    "setp.le",
    "setp.gt",
    "setp.ge",
    "selp.",
    "prmt.",
    "rem.",
    "shl.",
    "dp4a.u32.s32",
)


def drop_barrier(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(("bar.", "barrier.", "cp.async.wait", "membar", "fence.")):
        yield ""


def flip_comparison(line: _Line, body: _Body) -> Iterator[str]:
    parts = line.opcode.split(".")
    if parts[0] == "setp" and parts[1] in _COMPARISONS:
        yield line.changed(opcode=".".join(["setp", _COMPARISONS[parts[1]], *parts[2:]]))


def negate_guard(line: _Line, body: _Body) -> Iterator[str]:
    if line.guard:
        yield line.changed(
            guard=line.guard.replace("@!", "@")
            if "!" in line.guard
            else line.guard.replace("@", "@!")
        )


def drop_guard(line: _Line, body: _Body) -> Iterator[str]:
    if line.guard and not line.opcode.startswith("bra"):
        yield line.changed(guard="")


def change_shift(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(("shl.", "shr.")) and _NUMBER.fullmatch(line.operands[2]):
        amount = int(line.operands[2])
        yield line.with_operand(2, str(amount + 1))
        if amount:
            yield line.with_operand(2, str(amount - 1))


def change_mask(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(("and.b", "or.b", "xor.b")) and _NUMBER.fullmatch(line.operands[2]):
        mask = int(line.operands[2])
        if mask > 0:
            yield line.with_operand(2, str(mask >> 1))
            yield line.with_operand(2, str(mask & (mask - 1)))  # without its lowest bit


def swap_operands(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(_ORDERED) and len(line.operands) >= 3:
        target, a, b, *rest = line.operands
        registers = a.startswith("%") and b.startswith("%")
        if a != b and (registers or line.opcode.startswith(("sub.u32", "sub.s32"))):
            yield line.changed(operands=[target, b, a, *rest])


def shorten_loop(line: _Line, body: _Body) -> Iterator[str]:
    """Runs one iteration less: decreases the limit by the index's step."""
    if (
        line.number in body.loop_tests
        and len(line.operands) == 3
        and _NUMBER.fullmatch(line.operands[2])
    ):
        limit, step = int(line.operands[2]), body.steps.get(line.operands[1], 1)
        if limit > step:
            yield line.with_operand(2, str(limit - step))


def change_offset(line: _Line, body: _Body) -> Iterator[str]:
    """Moves an access by one element, or (for strides) rows apart by one more byte."""
    if line.opcode.startswith(("ld.global", "ld.shared", "st.global", "st.shared")):
        for index, operand in enumerate(line.operands):
            if match := _OFFSET.fullmatch(operand):
                vector = re.search(r"\.v(\d)", line.opcode)
                size = (
                    int(re.sub(r"\D", "", line.opcode.rsplit(".", 1)[1]))
                    // 8
                    * int(vector[1] if vector else 1)
                )
                yield line.with_operand(index, f"[{match[1]}+{int(match[2] or 0) + size}]")
                if match[2] and int(match[2]):
                    yield line.with_operand(index, f"[{match[1]}]")


def change_stride(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(("mad.", "mul.lo", "mul.wide")) and _NUMBER.fullmatch(
        line.operands[2]
    ):
        stride = int(line.operands[2])
        yield line.with_operand(2, str(stride * 2))
        yield line.with_operand(2, str(stride + 4))


def drop_rounding(line: _Line, body: _Body) -> Iterator[str]:
    """Removes the rounding of an operation, which ptxas may then contract to an fma."""
    if re.match(r"(add|sub|mul)\.rn\.f32$", line.opcode):
        yield line.changed(opcode=line.opcode.replace(".rn", ""))


def change_constant(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(
        ("ld.", "st.", "bra", "bar", "and.b", "shl.", "shr.", "mad.", "mul.lo", "mul.wide")
    ):
        return
    for index, operand in enumerate(line.operands[1:], start=1):
        if re.fullmatch(r"0[fF][0-9A-F]{8}", operand):
            yield line.with_operand(
                index, "0f3F800000" if operand[2:] == "00000000" else "0f00000000"
            )
        elif _NUMBER.fullmatch(operand) and line.opcode.startswith(
            ("mov.", "add.", "sub.", "setp.", "selp.", "min.", "max.")
        ):
            value = int(operand)  # the largest u32 has no successor
            yield line.with_operand(index, str(value - 1 if value == 2**32 - 1 else value + 1))
        elif line.opcode.startswith("shfl.") and index == 2 and int(operand) > 0:
            yield line.with_operand(index, str(int(operand) >> 1 or 2))


def replace_opcode(line: _Line, body: _Body) -> Iterator[str]:
    for old, new in _NEIGHBOURS:
        if line.opcode.startswith(old):
            yield line.changed(opcode=new + line.opcode[len(old) :])
            return


def delete_update(line: _Line, body: _Body) -> Iterator[str]:
    """Drops an update of a register that other instructions also write.

    If it is the only one, any run would notice.
    """
    if body.definitions.get(line.operands[0], 0) > 1 and not line.opcode.startswith(
        _WITHOUT_RESULT
    ):
        yield ""


def delete_store(line: _Line, body: _Body) -> Iterator[str]:
    if line.opcode.startswith(("st.", "red.", "atom.", "cp.async.c")):
        yield ""


def narrow_address(line: _Line, body: _Body) -> Iterator[str]:
    if re.match(r"(mad\.wide|mad\.lo\.[us]64|add\.[us]64)", line.opcode):
        register = line.operands[0]
        yield f"{line.text}\n{line.indent}and.b64 {register}, {register}, 4294967295;"


OPERATORS: dict[str, Operator] = {
    operator.__name__.replace("_", "-"): operator
    for operator in (
        drop_barrier,
        flip_comparison,
        negate_guard,
        drop_guard,
        change_shift,
        change_mask,
        swap_operands,
        shorten_loop,
        change_offset,
        change_stride,
        drop_rounding,
        change_constant,
        replace_opcode,
        delete_update,
        delete_store,
        narrow_address,
    )
}


def mutants(text: str) -> dict[str, list[Mutant]]:
    """Returns operator -> its mutants of this text, in the text's order.

    Instructions with unused results are skipped.
    """
    body = _Body(text)
    return {
        name: [
            Mutant(name, line.number, line.text, after)
            for line in body.lines
            if line.number not in body.unused
            for after in operator(line, body)
            if after != line.text
        ]
        for name, operator in OPERATORS.items()
    }


# --- equivalent mutants ---

_OF_INDICES = "mov add sub mul mad and or xor not shl shr selp setp min max div rem cvt bfe bfi"
_INDEX_ARITHMETIC = tuple(f"{name}." for name in _OF_INDICES.split())
_CLASSES = {"%p": "pred", "%r": "b32", "%rd": "b64"}


def probe(text: str, mutant: Mutant) -> str | None:
    """Returns a kernel without parameters that traps if the mutant changes a number in any thread.

    A number counts if anything but index arithmetic uses it. Index arithmetic depends only on the
    thread's position in the grid.

    Returns None if the mutated instruction is not index arithmetic: one run then proves nothing.
    """
    lines = instructions(text)
    writers: dict[str, list[_Line]] = {}
    for line in lines:
        if not line.opcode.startswith(_WITHOUT_RESULT):
            for register in _registers(line.operands[:1]):
                writers.setdefault(register, []).append(line)
    index = _index_arithmetic(lines, writers)
    after = instructions(mutant.after)
    if mutant.line not in index or len(after) != 1 or after[0].guard:
        return None
    target, sources = after[0].operands[0], _registers(after[0].operands[1:])
    if target != index[mutant.line].operands[0] or not all(
        _is_index(s, index, writers) for s in sources
    ):
        return None
    results = {line.operands[0] for line in index.values()}
    used = {
        r
        for line in lines
        if line.number not in index
        for r in _registers((line.guard, *line.operands))
    }

    # recomputes what depends on the mutated instruction as %changed_...
    changed, again = {target}, []
    for number in sorted(index):
        line = after[0] if number == mutant.line else index[number]
        if number == mutant.line or changed.intersection(_registers(line.operands[1:])):
            changed.add(line.operands[0])
            again.append(
                line.changed(operands=[_renamed(operand, changed) for operand in line.operands])
            )
    declared = [f"  .reg .{_CLASSES[_kind(r)]} {_renamed(r, changed)};" for r in sorted(changed)]
    checks = []
    for register in sorted(changed & used & results):
        cls = _CLASSES[_kind(register)]
        differ = "xor.pred" if cls == "pred" else f"setp.ne.{cls}"
        checks += [
            f"  {differ} %differs, {register}, {_renamed(register, changed)};",
            "  @%differs trap;",
        ]
    all_lines = text.split("\n")
    header = "\n".join(all_lines[: lines[0].number])
    header = re.sub(r"(\.entry \w+)\([^)]*\)", r"\1()", header)
    body = [
        *declared,
        "  .reg .pred %differs;",
        *(index[n].text for n in sorted(index)),
        *again,
        *checks,
    ]
    return "\n".join([header, *body, "  ret;", "}", ""])


def _kind(register: str) -> str:
    match = re.match(r"%[a-z]+", register)
    return match[0] if match else ""


def _renamed(operand: str, changed: set[str]) -> str:
    return f"%changed_{operand[1:]}" if operand in changed else operand


def _is_index(register: str, index: dict[int, _Line], writers: dict[str, list[_Line]]) -> bool:
    """Returns whether it is a special register, or the result of index arithmetic."""
    return "." in register or (
        len(writers.get(register, ())) == 1 and writers[register][0].number in index
    )


def _index_arithmetic(lines: list[_Line], writers: dict[str, list[_Line]]) -> dict[int, _Line]:
    """Returns line number -> instructions that are the only writers of their register.

    Their operands are immediates and other such registers.
    """
    index: dict[int, _Line] = {}
    for line in lines:  # a register is written before it is read
        results = _registers(line.operands[:1])
        if (
            line.opcode.startswith(_INDEX_ARITHMETIC)
            and not line.guard
            and len(results) == 1
            and _kind(results[0]) in _CLASSES
            and len(writers[results[0]]) == 1
            and all(_is_index(r, index, writers) for r in _registers(line.operands[1:]))
        ):
            index[line.number] = line
    return index
