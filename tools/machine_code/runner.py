"""Runs a machine's warps: the loop over instructions, and the order of threads.

Every thread has its own counter. Threads with the lowest one go on together, so that all blocks
pass an instruction at once; or, with a random generator, some warps of any place of the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .control import CONTROL, release
from .errors import DeadlockFault, Fault
from .machine import Machine
from .state import DONE, RUNS, Mask
from .table import compiled

STEPS = 50_000_000
_NOWHERE = 1 << 30


class Runner:
    """Runs a machine's clusters, with one program of steps for all of them.

    Args:
      rng: makes the order of warps random.
    """

    def __init__(self, machine: Machine, rng: np.random.Generator | None = None) -> None:
        self._machine, self._rng = machine, rng
        self._state = machine.state
        self._program: list[Any] = [None] * len(machine.code.instructions)
        self._steps = 0
        self.executed: set[str] = set()

    def run(self, clusters: np.ndarray) -> None:
        """Runs clusters of blocks: (clusters, blocks of a cluster) numbers.

        Raises:
          Fault: with the address and the text of the instruction.
        """
        self._machine.begin(clusters)
        with np.errstate(all="ignore"):
            self._run_all()

    def _run_all(self) -> None:
        while True:
            running = self._state.waits == RUNS
            if not running.any():
                if (self._state.waits == DONE).all():
                    self._machine.copies.check_exit()
                    return
                if not release(self._machine):
                    raise DeadlockFault("the remaining threads wait for each other", self._places())
                continue
            self._go_on(running)

    def _go_on(self, running: np.ndarray) -> None:
        """Chooses threads at one place, and runs them until others are there or they part."""
        counter = self._state.counter
        if self._rng is None:
            least = counter.min(where=running, initial=_NOWHERE)
            chosen = running & (counter == least)
            others = counter.min(where=running & ~chosen, initial=_NOWHERE)
            self._run(int(least), chosen, int(others), STEPS)
            return
        lane, warp = divmod(int(self._rng.choice(np.flatnonzero(running))), self._state.warps)
        chosen = running & (counter == counter[lane, warp])
        some = self._rng.random(self._state.warps) < self._rng.choice((0.2, 0.7, 1.0))
        some[warp] = True
        self._run(int(counter[lane, warp]), chosen & some, _NOWHERE, int(self._rng.integers(1, 60)))

    def _run(self, at: int, chosen: np.ndarray, others: int, limit: int) -> None:
        came: Mask = None if chosen.all() else chosen
        try:
            for _ in range(limit):
                self._steps += 1
                guard, step, control = self._program[at] or self._compile(at)
                mask = came
                if guard is not None:
                    mask = self._guarded(guard(), came)
                if mask is not None and not mask.any():
                    at += 1
                elif control:
                    next_ = step(mask, came, at)
                    if next_ < 0:
                        return
                    at = next_
                else:
                    step(mask)
                    at += 1
                if at >= others or self._steps > STEPS:
                    break
        except Fault as fault:
            raise fault.at(self._place(at)) from fault
        if self._steps > STEPS:
            raise DeadlockFault(f"more than {STEPS} steps", self._place(at))
        self._state.counter[chosen] = at

    @staticmethod
    def _guarded(guard: np.ndarray, came: Mask) -> Mask:
        if guard.all():
            return came
        if came is None:
            return guard if guard.shape[0] > 1 else np.broadcast_to(guard, (32, guard.shape[1]))
        return came & guard

    def _compile(self, at: int) -> tuple[Any, Any, bool]:
        instruction = self._machine.code.instructions[at]
        control = instruction.name in CONTROL
        guard = (
            None
            if instruction.guard is None
            else self._machine.operands.predicate(instruction.guard)
        )
        if control:
            step: Any = CONTROL[instruction.name](instruction, self._machine)
        else:
            step = compiled(instruction, self._machine)
        self.executed.add(".".join((instruction.name, *instruction.modifiers)))
        self._program[at] = guard, step, control
        return guard, step, control

    def _place(self, at: int) -> str:
        instruction = self._machine.code.instructions[at]
        return f"{instruction.address:#06x}: {instruction.text}"

    def _places(self) -> str:
        left = self._state.counter[self._state.waits != DONE]
        return "; ".join(self._place(max(0, at - 1)) for at in np.unique(left)[:4].tolist())
