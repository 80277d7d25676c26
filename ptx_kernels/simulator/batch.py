"""Batch: thread blocks that are simulated together, with their registers and memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .frame import Frame, RegisterFile
from .layout import Layout
from .memory.buffers import Buffers
from .memory.cluster_memory import ClusterMemory
from .memory.context import Context
from .memory.generic_memory import GenericMemory
from .memory.global_memory import GlobalMemory
from .memory.local_memory import LocalMemory
from .memory.shared_memory import SharedMemory
from .text.program import Program

State = TypeVar("State")


class Batch:
    """State of the thread blocks of the grid that are simulated together.

    Attributes:
      root: the frame of all lanes.
      exited: threads that have returned, shape (lanes,).
      spaces: the memory for each state space of loads, stores and atomics.
      deliveries: functions called with the indices of the mbarriers that parked lanes wait for,
        once no other lane can run.
      at_end: functions called when all threads have exited.
    """

    def __init__(
        self,
        program: Program,
        file: RegisterFile,
        layout: Layout,
        buffers: Buffers,
        parameters: Sequence[np.ndarray],
        shared_bytes: int,
        context: Context,
        *,
        synchronizes: bool,
    ) -> None:
        self.program, self.layout, self.parameters = program, layout, parameters
        self.happens_before, self.freedom = context.happens_before, context.freedom
        self.memory = GlobalMemory(buffers, context)
        self.shared = SharedMemory(
            program, layout, shared_bytes, context, synchronizes=synchronizes
        )
        self.cluster = ClusterMemory(self.shared, layout, self.happens_before)
        self.local = LocalMemory(layout.lanes, program.local_bytes)
        generic = GenericMemory(self.memory, self.shared, self.local)
        self.spaces: dict[str, Any] = {
            "global": self.memory,
            "const": self.memory,
            "shared": self.shared,
            "shared::cluster": self.cluster,
            "local": self.local,
            "generic": generic,
        }
        self.root = Frame(layout, file)
        self.exited = np.zeros(layout.lanes, np.bool_)
        self.deliveries: list[Callable[[set[int]], None]] = []
        self.at_end: list[Callable[[], None]] = [self.cluster.check_exits]
        self._states: dict[Callable[[Batch], Any], Any] = {}

    def state(self, kind: Callable[[Batch], State]) -> State:
        """Returns the batch's object of type `kind`, created on first use.

        It holds state that only some instructions need.
        """
        found: State | None = self._states.get(kind)
        if found is None:
            found = self._states[kind] = kind(self)
        return found
