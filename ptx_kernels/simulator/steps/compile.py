"""A parsed program -> basic blocks of Python closures, one per instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from ..batch import shared_name
from ..errors import ParseError, Trap
from ..frame import Frame
from ..hopper.bulk_copy import compile_copy
from ..hopper.mbarrier import Wait, compile_mbarrier, waits
from ..perturbation import contracted
from ..text.parser import parse
from ..text.program import Immediate, Instruction, Name, Program, Register
from .atomics import compile_atomic
from .compare import compile_setp
from .fences import compile_fence
from .loads_stores import compile_address_conversion, compile_load, compile_store
from .mma import compile_ldmatrix, compile_mma
from .moves import compile_move
from .operands import Operands, Step
from .table import compile_row
from .warp import (
    compile_active_mask,
    compile_match,
    compile_redux,
    compile_shuffle,
    compile_vote,
    compile_warp_barrier,
)

Handler = Callable[[Operands, Instruction], Step]


def compile_trap(operands: Operands, instruction: Instruction) -> Step:
    def run(frame: Frame) -> None:
        raise frame.fault(
            Trap, instruction, 0, "a trap: `trap` itself, or an indexed branch beyond its table"
        )

    return Step(run, (), ())


#: first word of the opcode -> what compiles it; everything else is a row of the instruction table
HANDLERS: dict[str, Handler] = {
    "ld": compile_load,
    "st": compile_store,
    "cvta": compile_address_conversion,
    "setp": compile_setp,
    "match": compile_match,
    "redux": compile_redux,
    "trap": compile_trap,
    "mov": compile_move,
    "shfl": compile_shuffle,
    "vote": compile_vote,
    "activemask": compile_active_mask,
    "mma": compile_mma,
    "ldmatrix": compile_ldmatrix,
    "cp": compile_copy,
    "mbarrier": compile_mbarrier,
    "atom": compile_atomic,
    "red": compile_atomic,
    "membar": compile_fence,
    "fence": compile_fence,
}
_BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")
_SYNCHRONIZING = ("atom.", "cp.async.bulk.", "fence.", "mbarrier.", "membar.")
_ORDERED = {"acquire", "release", "acq_rel"}
_CONTROL = ("bra", "bra.uni", "ret", "ret.uni", "exit", *_BARRIERS)


@dataclass
class Block:
    """Instructions that run without a branch, then how the block ends.

    Attributes:
      steps: (closure, registers that nobody reads afterwards).
      end: `next`, `branch`, `exit` or `barrier`; guard is the predicate's slot and whether it is
        negated.
      wait: what lanes have to wait for before they run the block, if anything.
      live_in: registers that may be read from the block's start on.
    """

    first: int
    steps: list[tuple[Callable[[Frame], None], tuple[int, ...]]] = field(default_factory=list)
    end: str = "next"
    guard: tuple[int, bool] | None = None
    target: int = -1
    instruction: Instruction | None = None
    barrier: tuple[int, int | None] = (0, None)  # number, thread count
    wait: Wait | None = None
    size: int = 0
    writes: frozenset[int] = frozenset()
    live_in: frozenset[int] = frozenset()


@dataclass
class Compiled:
    name: str
    registers: list[Register]
    constants: list[np.ndarray]
    blocks: list[Block]
    program: Program

    @cached_property
    def synchronizes(self) -> bool:
        """Whether threads may be in order otherwise than by barriers."""
        return any(
            i.opcode.startswith(_SYNCHRONIZING) or not _ORDERED.isdisjoint(i.opcode.split("."))
            for i in self.program.instructions
        )

    def shared_name(self, offset: int) -> str:
        return shared_name(self.program.symbols, offset)


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
        leaders = sorted(self._leaders())
        self.block_at = {first: number for number, first in enumerate(leaders)}
        parts = [code[a:b] for a, b in zip(leaders, [*leaders[1:], len(code)], strict=True)]
        compiled = [self._block(first, part) for first, part in zip(leaders, parts, strict=True)]
        self._liveness(compiled)
        return Compiled(
            self.program.name,
            self.program.registers,
            self.operands.constants,
            [block for block, _ in compiled],
            self.program,
        )

    def _leaders(self) -> set[int]:
        code = self.program.instructions
        leaders = {0, *self.program.labels.values()}
        for i, instruction in enumerate(code):
            if instruction.opcode in _CONTROL:
                leaders.add(i + 1)
            if instruction.opcode in _BARRIERS or waits(instruction):
                leaders.add(i)  # lanes that come separately join first
        return {i for i in leaders if i < len(code)}

    def _block(self, first: int, part: list[Instruction]) -> tuple[Block, list[Step]]:
        block = Block(first, size=len(part), instruction=part[-1])
        steps = [self._step(i) for i in part if i.opcode not in _CONTROL]
        if waits(part[0]):
            block.wait = Wait(self.operands, part[0])
        if part[-1].opcode in _CONTROL:
            self._terminator(block, part[-1])
        return block, steps

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
                    "takes a barrier 0 to 15 and optionally a number of threads, a multiple of 32, as immediates",
                )
            block.end, block.barrier = (
                "barrier",
                (numbers[0], numbers[1] if len(numbers) == 2 else None),
            )

    def _step(self, instruction: Instruction) -> Step:
        if instruction.opcode == "bar.warp.sync":
            step = compile_warp_barrier(self.operands, instruction)
        else:
            step = HANDLERS.get(instruction.opcode.split(".")[0], compile_row)(
                self.operands, instruction
            )
        return (
            step if instruction.guard is None else _guarded(step, *instruction.guard, instruction)
        )

    def _liveness(self, compiled: list[tuple[Block, list[Step]]]) -> None:
        """Backward data flow over the blocks; fills live_in, writes and the steps with their dead
        registers.
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
    """The step for the lanes whose predicate holds; the others keep their registers."""
    slot, run, writes = predicate.index, step.run, step.writes

    def guarded(frame: Frame) -> None:
        condition = frame.regs[slot]
        if condition is None:
            condition = frame.fetch(slot, instruction)
        if condition.size == 1:
            if bool(condition[0]) is not negated:
                run(frame)
            return
        index = np.flatnonzero(~condition if negated else condition)
        if index.size == frame.count:
            run(frame)
        elif index.size:
            some = frame.subset(index)
            run(some)
            for register in writes:
                value = some.regs[register]
                assert value is not None
                frame.merge(register, index, value)

    return Step(guarded, (*step.reads, slot), writes, kills=False)


@lru_cache(maxsize=512)
def compile_text(text: str) -> Compiled:
    """Parses and compiles a module of one entry; raises ParseError, UnknownInstruction or
    TypeMismatch.
    """
    return _Compiler(parse(text)).compile()


def compile_perturbed(text: str, generator: np.random.Generator) -> Compiled:
    """As `compile_text`, with multiplications and additions that state no rounding contracted at
    random.
    """
    program = parse(text)
    changed = contracted(program, generator)
    return compile_text(text) if changed is program else _Compiler(changed).compile()
