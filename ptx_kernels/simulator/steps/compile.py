"""Compiles a parsed program to basic blocks of steps, one step per instruction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ...ptx.instructions import CLUSTER_BARRIERS
from ..batch import Batch
from ..errors import ParseError, Trap
from ..frame import Frame, RegisterFile
from ..text.contraction import contracted
from ..text.parser import parse
from ..text.program import Immediate, Instruction, Name, Program, Register
from . import (  # noqa: F401  (they register what they compile)
    addresses,
    async_copy,
    clusters,
    compare,
    matrices,
    memory,
    moves,
    shuffle,
    votes,
)
from .meaning import compile_machine
from .operands import Operands
from .registry import compiles, handler
from .step import Run, Step, Wait
from .table import compile_row

_BLOCK_BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")
_CLUSTER_ARRIVALS = tuple(
    f"barrier.cluster.arrive{order}{aligned}"
    for order in ("", ".release")
    for aligned in ("", ".aligned")
)
_CLUSTER_WAITS = tuple(
    f"barrier.cluster.wait{order}{aligned}"
    for order in ("", ".acquire")
    for aligned in ("", ".aligned")
)
_BARRIERS = (*_BLOCK_BARRIERS, *_CLUSTER_WAITS)
_CONTROL = ("bra", "bra.uni", "ret", "ret.uni", "exit", *_BARRIERS)
#: Number of a cluster's only barrier.
CLUSTER = -1

Barrier = tuple[int, int | None]  # number, thread count (None: the full block or cluster)


@compiles("trap")
def compile_trap(operands: Operands, instruction: Instruction) -> Step:
    def run(batch: Batch, frame: Frame) -> None:
        what = "a trap: `trap` itself, or an indexed branch beyond its table"
        raise frame.fault(Trap, instruction, 0, what)

    return Step(run, (), ())


@dataclass
class Block:
    """Basic block: straight-line instructions, and how the block ends.

    Attributes:
      steps: (function, registers that are dead afterwards).
      end: `next`, `branch`, `exit` or `barrier`.
      guard: (the predicate's slot, whether it is negated); None if absent.
      wait: condition that lanes wait for before they run the block; None if absent.
      live_in: registers that may be read from the block's start on.
    """

    first: int
    steps: list[tuple[Run, tuple[int, ...]]] = field(default_factory=list)
    end: str = "next"
    guard: tuple[int, bool] | None = None
    target: int = -1
    instruction: Instruction | None = None
    barrier: Barrier = (0, None)
    wait: Wait | None = None
    size: int = 0
    writes: frozenset[int] = frozenset()
    live_in: frozenset[int] = frozenset()


@dataclass
class Compiled:
    """Compiled program: its basic blocks and register file.

    Attributes:
      synchronizes: whether threads may be ordered by other means than barriers.
    """

    program: Program
    file: RegisterFile
    blocks: list[Block]
    synchronizes: bool

    @property
    def name(self) -> str:
        return self.program.name


class _Compiler:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.operands = Operands(program)
        code = program.instructions
        if (
            not code
            or code[-1].guard
            or code[-1].opcode not in ("ret", "exit", "bra", "bra.uni", "ret.uni")
        ):
            raise ParseError(
                f"kernel {program.name}: control reaches the end of the body; a ret is missing"
            )
        self.block_at: dict[int, int] = {}  # first instruction -> block number

    def compile(self) -> Compiled:
        code = self.program.instructions
        self._check_cluster_barriers()
        steps = [None if i.opcode in _CONTROL else self._step(i) for i in code]
        leaders = sorted(self._leaders(steps))
        self.block_at = {first: number for number, first in enumerate(leaders)}
        ranges = zip(leaders, [*leaders[1:], len(code)], strict=True)
        compiled = [self._block(a, code[a:b], steps[a:b]) for a, b in ranges]
        self._liveness(compiled)
        return Compiled(
            self.program,
            RegisterFile(self.program.registers, self.operands.constants),
            [block for block, _ in compiled],
            max(self.program.cluster) > 1
            or any(step.synchronizes for step in steps if step is not None),
        )

    def _leaders(self, steps: list[Step | None]) -> set[int]:
        """Returns the indices of instructions that begin a basic block."""
        leaders = {0, *self.program.labels.values()}
        for i, instruction in enumerate(self.program.instructions):
            step = steps[i]
            if instruction.opcode in _CONTROL:
                leaders.add(i + 1)
            if instruction.opcode in _BARRIERS or (step is not None and step.wait is not None):
                leaders.add(i)  # lanes that arrive separately merge before it
        return {i for i in leaders if i < len(steps)}

    def _block(
        self, first: int, part: list[Instruction], given: list[Step | None]
    ) -> tuple[Block, list[Step]]:
        block = Block(first, size=len(part), instruction=part[-1])
        if given[0] is not None:
            block.wait = given[0].wait
        if part[-1].opcode in _CONTROL:
            self._terminator(block, part[-1])
        return block, [step for step in given if step is not None]

    def _terminator(self, block: Block, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode.split(".")[0], instruction.operands
        if instruction.guard:
            block.guard = instruction.guard[0].index, instruction.guard[1]
        if opcode == "bra":
            if (
                len(operands) != 1
                or not isinstance(operands[0], Name)
                or operands[0].name not in self.program.labels
            ):
                raise self.operands.error(
                    ParseError, instruction, "branches to no label of the kernel"
                )
            target = self.program.labels[operands[0].name]
            if target not in self.block_at:
                raise self.operands.error(
                    ParseError, instruction, "branches past the last instruction"
                )
            block.end, block.target = "branch", self.block_at[target]
        elif opcode in ("ret", "exit"):
            block.end = "exit"
        elif instruction.opcode in _CLUSTER_WAITS:
            block.end, block.barrier = "barrier", (CLUSTER, None)
        else:
            numbers = [
                o.value for o in operands if isinstance(o, Immediate) and isinstance(o.value, int)
            ]
            if (
                len(numbers) != len(operands)
                or len(numbers) not in (1, 2)
                or not 0 <= numbers[0] < 16
                or (len(numbers) == 2 and (numbers[1] <= 0 or numbers[1] % 32))
            ):
                raise self.operands.error(
                    ParseError,
                    instruction,
                    "takes a barrier 0 to 15 and optionally a number of threads, "
                    "a multiple of 32, as immediates",
                )
            block.end, block.barrier = (
                "barrier",
                (numbers[0], numbers[1] if len(numbers) == 2 else None),
            )

    def _check_cluster_barriers(self) -> None:
        """Raises unless each `barrier.cluster.arrive` directly precedes its wait.

        Accesses between arrival and wait would have no order here.
        """
        before: Instruction | None = None
        labelled = set(self.program.labels.values())
        for position, instruction in enumerate(self.program.instructions):
            arrived = before is not None and before.opcode in _CLUSTER_ARRIVALS
            waits = instruction.opcode in _CLUSTER_WAITS
            apart = position in labelled
            guarded = before is not None and before.guard != instruction.guard
            if waits != arrived or (waits and (apart or guarded)):
                what = (
                    "barrier.cluster.arrive must come right before barrier.cluster.wait: what lies "
                    "between is not simulated"
                )
                raise self.operands.error(ParseError, instruction, what)
            if waits or instruction.opcode in _CLUSTER_ARRIVALS:
                self.operands.needs(instruction, CLUSTER_BARRIERS)
                self.operands.count(instruction, 0)
            before = instruction

    def _step(self, instruction: Instruction) -> Step:
        if instruction.opcode in _CLUSTER_ARRIVALS:
            return Step(lambda batch, frame: None, (), ())
        step = compile_machine(self.operands, instruction)
        if step is None:
            step = (handler(instruction.opcode) or compile_row)(self.operands, instruction)
        guard = instruction.guard
        return step if guard is None else _guarded(step, *guard, instruction)

    def _liveness(self, compiled: list[tuple[Block, list[Step]]]) -> None:
        """Computes register liveness backward over the basic blocks.

        Sets the blocks' `live_in`, and the writes and dead registers of each step.
        """
        use, kill, after = [], [], []
        for number, (block, steps) in enumerate(compiled):
            used: set[int] = set() if block.guard is None else {block.guard[0]}
            killed: set[int] = set()
            for step in reversed(steps):
                if step.kills:
                    killed.update(step.writes)
                    used.difference_update(step.writes)
                used.update(step.reads)
            use.append(used)
            kill.append(killed)
            successors = [] if block.end == "exit" and block.guard is None else [number + 1]
            if block.end == "branch":
                successors = [block.target] + ([number + 1] if block.guard else [])
            after.append(successors)
        live: list[frozenset[int]] = [frozenset(u) for u in use]
        changed = True
        while changed:
            changed = False
            for number in reversed(range(len(compiled))):
                out = frozenset().union(*(live[s] for s in after[number]))
                new = frozenset(use[number]) | (out - kill[number])
                if new != live[number]:
                    live[number], changed = new, True
        for number, (block, steps) in enumerate(compiled):
            block.live_in = live[number]
            block.writes = frozenset().union(*(s.writes for s in steps))
            needed = set().union(*(live[s] for s in after[number]))
            if block.guard is not None:
                needed.add(block.guard[0])
            for step in reversed(steps):
                block.steps.append((step.run, tuple(sorted({*step.reads, *step.writes} - needed))))
                if step.kills:
                    needed.difference_update(step.writes)
                needed.update(step.reads)
            block.steps.reverse()


def _guarded(step: Step, predicate: Register, negated: bool, instruction: Instruction) -> Step:
    """Returns the step restricted to lanes whose predicate holds; others keep their registers."""
    slot, run, writes = predicate.index, step.run, step.writes

    def guarded(batch: Batch, frame: Frame) -> None:
        condition = frame.regs[slot]
        if condition is None:
            condition = frame.fetch(slot, instruction)
        if condition.size == 1:
            if bool(condition[0]) is not negated:
                run(batch, frame)
            return
        index = np.flatnonzero(~condition if negated else condition)
        if index.size == frame.count:
            run(batch, frame)
        elif index.size:
            some = frame.subset(index)
            run(batch, some)
            for register in writes:
                value = some.regs[register]
                assert value is not None
                frame.merge(register, index, value)

    return replace(step, run=guarded, reads=(*step.reads, slot), kills=False)


@lru_cache(maxsize=64)
def compile_text(text: str) -> Compiled:
    """Parses and compiles a module with one entry.

    Raises ParseError, UnknownInstruction or TypeMismatch.
    """
    return _Compiler(parse(text)).compile()


def compile_perturbed(text: str, generator: np.random.Generator) -> Compiled:
    """Compiles like `compile_text`, but contracts multiplications and additions at random.

    Operations that state a rounding are unchanged.
    """
    program = parse(text)
    changed = contracted(program, generator)
    return compile_text(text) if changed is program else _Compiler(changed).compile()
