"""Parks lanes until the condition holds that their instruction waits for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .batch import Batch
from .errors import Deadlock, SimulationError
from .frame import Frame
from .steps.compile import Block
from .steps.step import Wait


class Parking:
    """Parked lanes, by the basic block whose first instruction waits.

    Args:
      go: called with a basic block's number and the lanes that continue there.
    """

    def __init__(
        self, batch: Batch, blocks: list[Block], go: Callable[[int, np.ndarray], None]
    ) -> None:
        self.batch, self.blocks, self.go = batch, blocks, go
        self.parked: dict[int, list[np.ndarray]] = {}

    def park(self, wait: Wait, number: int, frame: Frame) -> bool:
        """Parks the lanes whose condition does not hold; returns False if all lanes pass."""
        passes = wait.passes(self.batch, frame)
        if passes.all():
            return False
        frame.flush(self.blocks[number].live_in)
        lanes = frame.all_lanes
        self.parked.setdefault(number, []).append(lanes[~passes])
        if passes.any():
            self.go(number, lanes[passes])
        return True

    def release(self) -> bool:
        """Releases lanes whose condition holds, if needed after copies arrive.

        Returns False if no lane continues.
        """
        if self._let_go():
            return True
        awaited: set[int] = set()
        for number, parts in self.parked.items():
            awaited.update(self._wait(number).awaited(self.batch, self._gather(parts)))
        for deliver in self.batch.deliveries:
            deliver(awaited)
        return self._let_go()

    def fail(self) -> bool:
        """Releases lanes whose waiting instruction may run although its condition does not hold.

        Returns False if no lane continues.
        """
        for number, parts in self.parked.items():
            if self._wait(number).can_fail:
                self._wait(number).give_up(self.batch, self._gather(parts).all_lanes)
        return self._let_go()

    def _let_go(self) -> bool:
        """Releases lanes whose condition holds; returns False if no lane continues."""
        gone = False
        for number, parts in list(self.parked.items()):
            frame = self._gather(parts)
            passes, lanes = self._wait(number).passes(self.batch, frame), frame.all_lanes
            if passes.any():
                self.go(number, lanes[passes])
                gone = True
            self.parked[number] = [lanes[~passes]]
        self.parked = {number: parts for number, parts in self.parked.items() if parts[0].size}
        return gone

    def _gather(self, parts: list[np.ndarray]) -> Frame:
        return gather(self.batch, parts)

    def _wait(self, number: int) -> Wait:
        wait = self.blocks[number].wait
        assert wait is not None
        return wait

    def stuck(self) -> SimulationError:
        number, (lanes, *_) = min(self.parked.items())
        wait, frame = self._wait(number), self._gather([lanes])
        told = f"waits for {wait.describe(self.batch, frame)} that nobody completes"
        return frame.fault(Deadlock, wait.instruction, 0, told)


def gather(batch: Batch, parts: list[np.ndarray]) -> Frame:
    """Returns the frame of all lanes in `parts`."""
    lanes = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
    return batch.root if lanes.size == batch.layout.lanes else batch.root.subset(lanes)
