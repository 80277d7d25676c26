"""Parses machine code (SASS) and finds its loops, instruction mix and loads in flight.

A kernel's speed limit is visible here without running it: how many instructions its hot loop spends
per byte of weights, how wide its loads are, and how many of them are in flight.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import disk_cache
from .ptxas import find_tool


@dataclass(frozen=True)
class SassInstruction:
    """One instruction, for example `@!P0 LDG.E.128.CONSTANT R4, desc[UR6][R2.64]`.

    Attributes:
      address: byte offset in the function.
      predicate: the guard (`@!P0`), or an empty string.
      opcode: opcode with its modifiers (`LDG.E.128.CONSTANT`).
      operands: operands as printed.
      target: address of the branch target, if it is a branch.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    target: int | None = None

    @property
    def name(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def category(self) -> str:
        return classify(self.opcode, self.operands)


# The first row whose pattern matches an opcode's full name decides. U and V are prefixes of an
# operation's uniform and video forms.
_CATEGORIES: tuple[tuple[str, str], ...] = (
    ("dp4a", r"IDP"),
    ("mma", r"[HIQDOB]G?MMA|UTC\w*MMA"),
    ("store global", r"STG|ST|REDG?|ATOMG?"),
    ("async copy", r"LDGSTS|LDGDEPBAR|UBLKCP|UBLKPF|UTMA\w+|SYNCS|ARRIVES"),
    ("shared", r"LDS|STS|LDSM|STSM|ATOMS|MOVM"),
    ("local", r"LDL|STL"),
    ("shuffle", r"SHFL|VOTEU?|C?REDUX|MATCH"),
    ("conversion", r"U?(I2FP?|F2IP?|F2F|F2FP|I2I|I2IP)|FRND"),
    (
        "float",
        r"U?F(ADD|MUL|FMA|SETP?|SEL|MNMX3?|SWZADD|CHK)2?|MUFU|H(ADD2|MUL2|FMA2|SETP?2|MNMX2)"
        r"|D(ADD|MUL|FMA|SETP)",
    ),
    (
        "integer",
        r"[UV]?(I?(ADD|MUL|MAD|ABS|MNMX|SETP?|SCADD)\d?|LOP3?|SHF|SHL|SHR|LEA|PRMT|SEL|POPC|FLO|BREV"
        r"|BMSK|SGXT|IADDMNMX|ABSDIFF4?)",
    ),
    (
        "control",
        r"BRA|BRX|JMP|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BAR|WARPSYNC|DEPBAR|MEMBAR|ERRBAR|YIELD|NOP"
        r"|NANOSLEEP|CCTL|FENCE|ACQBULK|PREEXIT|UCGABAR\w*|BMOV|WARPGROUP\w*|ELECT",
    ),
)
_COMPILED = tuple((category, re.compile(pattern)) for category, pattern in _CATEGORIES)

CATEGORIES = (
    "load global 128",
    "load global 64",
    "load global 32",
    "load global narrow",
    *(category for category, _ in _CATEGORIES),
    "other",
)


def load_bits(opcode: str) -> int:
    """Returns the bits per lane of a load or store: `LDG.E.128` -> 128, `LDG.E.U8` -> 8.

    The default is 32.
    """
    match = re.search(r"\.(?:[US])?(8|16|32|64|128|256)(?=\.|$)", opcode)
    return int(match.group(1)) if match else 32


def classify(opcode: str, operands: str = "") -> str:
    """Returns the category of an instruction, one of `CATEGORIES`."""
    name = opcode.split(".", 1)[0]
    if name in ("LDG", "LD"):
        bits = load_bits(opcode)
        return "load global narrow" if bits < 32 else f"load global {min(bits, 128)}"
    if opcode == "IMAD.MOV.U32" or name == "HFMA2" and re.match(r"R\d+, -RZ, RZ, ", operands):
        return "other"  # a move or a constant in another form
    if opcode.startswith("HADD2.F32"):
        return "conversion"  # f16 to f32
    return next((category for category, pattern in _COMPILED if pattern.fullmatch(name)), "other")


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_BRANCHES = ("BRA", "JMP")


def parse(listing: str) -> tuple[SassInstruction, ...]:
    """Parses an `nvdisasm -c` listing to instructions."""
    rows: list[tuple[int, str, str, str]] = []
    labels: dict[str, int] = {}
    pending: list[str] = []
    for line in listing.splitlines():
        if match := _LABEL.match(line.strip()):
            pending.append(match.group(1))
        elif match := _LINE.search(line):
            address = int(match.group(1), 16)
            labels.update(dict.fromkeys(pending, address))
            pending = []
            rows.append((address, match.group(2) or "", match.group(3), match.group(4)))

    def target(opcode: str, operands: str) -> int | None:
        label = re.search(r"\((\.L_\w+)\)", operands)
        return labels.get(label.group(1)) if label and opcode.split(".")[0] in _BRANCHES else None

    return tuple(
        SassInstruction(address, predicate, opcode, operands, target(opcode, operands))
        for address, predicate, opcode, operands in rows
    )


@functools.lru_cache(maxsize=32)
def disassemble_all(cubin: bytes) -> dict[str, tuple[SassInstruction, ...]]:
    """Returns the instructions of each function of a cubin, by function name.

    Raises:
      ToolNotFoundError: nvdisasm is not installed.
    """
    _, *parts = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", listing(cubin), flags=re.MULTILINE)
    return {name: parse(part) for name, part in zip(parts[::2], parts[1::2], strict=True)}


def listing(cubin: bytes) -> str:
    """Returns the output of `nvdisasm -c`.

    Raises:
      ToolNotFoundError: nvdisasm is not installed.
    """
    tool = find_tool("nvdisasm")
    printed, _ = disk_cache.cached(tool, "-c", cubin, lambda: (_run_nvdisasm(cubin), b""))
    return printed


def _run_nvdisasm(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(prefix="ptx_kernels-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(find_tool("nvdisasm")), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassemble(cubin: bytes) -> tuple[SassInstruction, ...]:
    """Returns the instructions of a cubin with one function.

    Raises:
      ToolNotFoundError: nvdisasm is not installed.
    """
    (instructions,) = disassemble_all(cubin).values()
    return instructions


@dataclass(frozen=True)
class Loop:
    """A natural loop: its instructions in address order, which need not be contiguous."""

    instructions: tuple[SassInstruction, ...]

    def __len__(self) -> int:
        return len(self.instructions)

    def mix(self) -> dict[str, int]:
        """Returns the number of instructions per category, most first, without NOPs."""
        return dict(Counter(i.category for i in self.instructions if i.name != "NOP").most_common())

    def count(self, category: str) -> int:
        return self.mix().get(category, 0)

    def issued(self) -> int:
        """Returns the number of instructions that take an issue slot."""
        return sum(self.mix().values())

    def outstanding(
        self, wanted: Callable[[SassInstruction], bool] = lambda instruction: True
    ) -> Outstanding:
        """Returns the most `wanted` global loads in flight per lane, in steady state.

        Walks the body twice in address order. A load is in flight until an instruction names one of
        the registers it fills. Loads that a loop issues for its next iteration count too.
        """
        under_way: dict[range, int] = {}  # registers of a load -> its bits
        most = Outstanding(0, 0, 0)
        for instruction in self.instructions * 2:
            named = registers(instruction.operands)
            under_way = {r: bits for r, bits in under_way.items() if not named & set(r)}
            loads = instruction.category.startswith("load global") and wanted(instruction)
            if loads and (place := filled(instruction)):
                under_way[place] = load_bits(instruction.opcode)
                bits = list(under_way.values())
                now = (bits.count(128), len(bits), sum(bits) // 8)
                most = Outstanding(*map(max, most, now))
        return most

    def load_to_use(
        self, wanted: Callable[[SassInstruction], bool] = lambda instruction: True
    ) -> float | None:
        """Returns the least fraction of an iteration from a `wanted` load to its first use.

        The order is that of addresses, and wraps around if the use is in the next iteration. The
        result is None if there is no such load.
        """
        code = [i for i in self.instructions if i.name != "NOP"]
        least = instructions_to_use(code, wanted)
        return None if least is None else least / len(code)

    def loads_in_flight(self) -> int:
        """Returns the maximum of 16-byte global loads in flight per lane."""
        return self.outstanding().wide


def instructions_to_use(
    code: Sequence[SassInstruction], wanted: Callable[[SassInstruction], bool]
) -> int | None:
    """Returns the fewest instructions of a loop from a `wanted` global load to its first use.

    The order is that of addresses, and wraps around the loop. The result is all instructions if
    nothing uses the value, and None if there is no such load.
    """
    named = [registers(i.operands) for i in code]
    found = []
    for at, load in enumerate(code):
        if load.category.startswith("load global") and wanted(load):
            place = set(filled(load))
            behind = (*named[at + 1 :], *named[:at])
            first = (n for n, operands in enumerate(behind) if place & operands)
            found.append(next(first, len(code)))
    return min(found, default=None)


class Outstanding(NamedTuple):
    """Maximum global loads in flight per lane: 16-byte loads, all loads, and their bytes.

    Each figure is a maximum of its own.
    """

    wide: int
    loads: int
    nbytes: int


def registers(operands: str) -> set[int]:
    """Returns the numbers of the registers in an operand list; of a wide register, the first."""
    return {int(n) for n in re.findall(r"(?<![\w])R(\d+)", operands)}


def filled(load: SassInstruction) -> range:
    """Returns the numbers of the registers that a load fills; none if it discards the value."""
    target = re.match(r"R(\d+),", load.operands)
    first = int(target.group(1)) if target else 0
    return range(first, first + -(-load_bits(load.opcode) // 32)) if target else range(0)


def _ends_block(instruction: SassInstruction) -> bool:
    return instruction.name in (*_BRANCHES, "EXIT", "RET", "BRX")


def _falls_through(instruction: SassInstruction) -> bool:
    if not _ends_block(instruction) or instruction.predicate:
        return True
    # `BRA.U UP0, label` and `BRA.DIV UR4, label` have their condition before the label
    return instruction.name in _BRANCHES and "," in instruction.operands


def _flow(code: Sequence[SassInstruction]) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Splits code into basic blocks; returns their (first, one past last) and their successors.

    Branches to code that was removed (`ways_through`) have no successor.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    starts = {0}
    for i, instruction in enumerate(code):
        if instruction.target in index:
            starts.add(index[instruction.target])
        if _ends_block(instruction) and i + 1 < len(code):
            starts.add(i + 1)
    order = sorted(starts)
    blocks = list(zip(order, [*order[1:], len(code)], strict=True))
    number = {first: b for b, (first, _) in enumerate(blocks)}
    successors: list[set[int]] = []
    for b, (_, end) in enumerate(blocks):
        last = code[end - 1]
        following = {b + 1} if _falls_through(last) and b + 1 < len(blocks) else set()
        if last.target in index:
            following.add(number[index[last.target]])
        successors.append(following)
    return blocks, successors


def _dominators(successors: Sequence[set[int]]) -> dict[int, set[int]]:
    """Returns the dominators of every block reachable from block 0, itself included."""
    reachable, stack = {0}, [0]
    while stack:
        for b in successors[stack.pop()] - reachable:
            reachable.add(b)
            stack.append(b)
    predecessors = {b: {a for a in reachable if b in successors[a]} for b in reachable}
    dominators = {b: set(reachable) for b in reachable}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for b in sorted(reachable - {0}):
            new = {b} | set.intersection(*(dominators[a] for a in predecessors[b]))
            if new != dominators[b]:
                dominators[b], changed = new, True
    return dominators


def _bodies(code: Sequence[SassInstruction]) -> tuple[list[tuple[int, int]], dict[int, set[int]]]:
    """Returns the basic blocks of `_flow`, and {head: blocks} of each natural loop.

    A backward jump alone is not a loop: ptxas moves unlikely blocks past the end of the code, and
    they jump back. A loop is an edge to a block that dominates its source, with every block that
    reaches the source without passing the dominating block.
    """
    blocks, successors = _flow(code)
    dominators = _dominators(successors)
    bodies: dict[int, set[int]] = {}
    for source in dominators:
        for head in successors[source] & dominators[source]:
            body, stack = {head, source}, [source] if source != head else []
            while stack:
                b = stack.pop()
                before = {a for a in dominators if b in successors[a]} - body
                body |= before
                stack.extend(before)
            bodies.setdefault(head, set()).update(body)
    return blocks, bodies


def innermost_loops(code: Sequence[SassInstruction]) -> list[Loop]:
    """Returns the natural loops that contain no other loop, in address order."""
    if not code:
        return []
    blocks, bodies = _bodies(code)
    inner = [
        body
        for head, body in bodies.items()
        if not any(other <= body for h, other in bodies.items() if h != head)
    ]
    return [
        Loop(tuple(i for b in sorted(body) for i in code[blocks[b][0] : blocks[b][1]]))
        for body in inner
    ]


def enclosing_loop(code: Sequence[SassInstruction], loop: Loop) -> Loop | None:
    """Returns the smallest natural loop that contains `loop` and more code; None if absent."""
    blocks, bodies = _bodies(code)
    first = {i.address for i in loop.instructions}
    wider = [
        Loop(tuple(i for b in sorted(body) for i in code[blocks[b][0] : blocks[b][1]]))
        for body in bodies.values()
    ]
    holding = [
        w for w in wider if len(w) > len(loop) and first <= {i.address for i in w.instructions}
    ]
    return min(holding, key=len, default=None)


def ways_through(code: Sequence[SassInstruction], loop: Loop) -> list[SassInstruction]:
    """Returns the code without parts that run only on paths around `loop`.

    An example is the code of thread blocks with other work. Called functions stay.
    """
    blocks, successors = _flow(code)
    inside = {i.address for i in loop.instructions}
    held = {b for b, (first, _) in enumerate(blocks) if code[first].address in inside}

    def reached(starts: set[int], following: Callable[[int], set[int]]) -> set[int]:
        found, stack = set(starts), list(starts)
        while stack:
            new = following(stack.pop()) - found
            found |= new
            stack.extend(new)
        return found

    def before(b: int) -> set[int]:
        return {a for a, following in enumerate(successors) if b in following}

    past = reached({0}, lambda b: successors[b]) - (
        reached(held, lambda b: successors[b]) | reached(held, before)
    )
    return [i for b, (first, end) in enumerate(blocks) if b not in past for i in code[first:end]]


def hot_loop(code: Sequence[SassInstruction]) -> Loop | None:
    """Returns the innermost loop that does the kernel's work, or None if there is no loop.

    It is the loop with the most dot-product instructions (dp4a and mma); then the most 16-byte
    global loads; then the most instructions. ptxas unrolls a loop and leaves a remainder loop,
    which has fewer.
    """

    def work(loop: Loop) -> tuple[int, int, int]:
        return loop.count("dp4a") + loop.count("mma"), loop.count("load global 128"), len(loop)

    return max(innermost_loops(code), key=work, default=None)
