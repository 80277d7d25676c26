"""Reads XLA:GPU's dump of a compiled program: launches in order, and those in CUDA graphs.

It combines three texts: `*.thunk_sequence_after_thunk_passes.txt` (one line per thunk, nested by
indentation), `*.thunk_metadata.txt` (thunk -> HLO instruction) and the optimized HLO (instruction
-> shapes, target).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

#: Thunks that hold other thunks and launch nothing themselves.
CONTAINERS = (
    *("kCommandBuffer", "kWhile", "kConditional", "kSequential"),
    *("kDynamicSliceFusion", "kAsyncStart", "kAsyncDone"),
)
#: Containers that represent one instruction, that of the launch inside.
_WRAPPERS = ("kDynamicSliceFusion", "kAsyncStart")

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="(?P<target>[^"]*)"')
_OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)\s*\[.*?\]\s*(?P<rest>.*?)\s*$")
_KERNEL = re.compile(
    r"^(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<block>[\d, ]+)\]"
    r"\s+shared_memory: (?P<shared>\d+)"
)
_METADATA = re.compile(
    r'thunk_metadata \{\s*thunk_info \{\s*(?:profile_annotation: "(?P<name>[^"]*)"\s*)?'
    r"(?:thunk_id: (?P<id>\d+)\s*)?\}"
    r'\s*thunk_kind: "(?P<kind>\w+)"'
)


@dataclass(frozen=True)
class Array:
    """An array that an instruction returns: XLA's name of its type (`f32`) and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction.

    `target` is that of a custom call; `op_name` is the JAX operation it came from, if known.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    target: str | None
    op_name: str


@dataclass(frozen=True)
class Thunk:
    """One step of the compiled program; `parents` contain it, the outermost first.

    `grid`, `block` and `shared_bytes` are those of a kernel, else None; `name` is the kernel's
    entry or the kind.
    """

    id: int
    kind: str
    name: str
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    shared_bytes: int | None = None
    parents: tuple[Thunk, ...] = field(default=(), repr=False)
    instruction: Instruction | None = None

    def is_in(self, kind: str) -> bool:
        return any(parent.kind == kind for parent in self.parents)


def parse_hlo(text: str) -> dict[str, Instruction]:
    """Parses every instruction of an HLO module's text, by name, which is unique in a module."""
    found = {}
    for line in text.splitlines():
        if not (match := _INSTRUCTION.match(line)):
            continue
        results = tuple(
            Array(shape["dtype"], tuple(int(d) for d in shape["dims"].split(",") if d))
            for shape in _SHAPE.finditer(match["shape"])
        )
        target, op_name = _TARGET.search(line), _OP_NAME.search(line)
        found[match["name"]] = Instruction(
            match["name"],
            match["opcode"],
            results,
            target["target"] if target else None,
            op_name["name"] if op_name else "",
        )
    return found


def parse_thunks(sequence: str, metadata: str, hlo: str) -> tuple[Thunk, ...]:
    """Parses all thunks in launch order, containers before their contents.

    Raises:
      ValueError: a line that looks like a thunk and cannot be read, or a launch without an HLO
        instruction.
    """
    instructions = parse_hlo(hlo)
    names = {
        int(m["id"] or 0): m["name"]
        for m in _METADATA.finditer(metadata)
        if m["kind"] not in CONTAINERS or m["kind"] in _WRAPPERS
    }
    thunks: list[Thunk] = []
    open_: list[tuple[int, Thunk]] = []  # (indentation, container) around the current line
    for line in sequence.splitlines():
        if not (match := _THUNK.match(line)):
            if re.match(r"\s*\d+:", line):
                raise ValueError(f"cannot read the thunk {line!r}")
            continue  # "condition:", "body:"
        indent, kind, id_ = len(match["indent"]), match["kind"], int(match["id"])
        while open_ and open_[-1][0] >= indent:
            open_.pop()
        instruction = instructions.get(names.get(id_) or "")
        if instruction is None:
            containers = (parent.instruction for _, parent in reversed(open_))
            instruction = next(filter(None, containers), None)
        if instruction is None and kind not in CONTAINERS:
            raise ValueError(f"no HLO instruction for the thunk {line!r} ({names.get(id_)!r})")
        kernel = _KERNEL.match(match["rest"])
        thunk = Thunk(
            id_,
            kind,
            kernel["name"] if kernel else kind,
            _numbers(kernel["grid"]) if kernel else None,
            _numbers(kernel["block"]) if kernel else None,
            int(kernel["shared"]) if kernel else None,
            tuple(container for _, container in open_),
            instruction,
        )
        thunks.append(thunk)
        if kind in CONTAINERS:
            open_.append((indent, thunk))
    return tuple(thunks)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
