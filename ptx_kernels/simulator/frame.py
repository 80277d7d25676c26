"""Registers of a group of lanes that execute together (a frame).

A register holds one value per lane, shape (lanes,), or shape (1,) if all lanes agree. Loop
counters, pointers and constants then cost almost nothing. Register arrays are never modified in
place, so they can be shared. `Frame.regs[i] is None` means that the frame has no value: the
register is not written yet, dead, or still with the parent frame.
"""

from __future__ import annotations

import numpy as np

from .errors import SimulationError, UninitializedRead
from .layout import WARP, Layout
from .text.program import Instruction, Register


class RegisterFile:
    """Initial contents of a frame: a program's registers, then its constants."""

    def __init__(self, registers: list[Register], constants: list[np.ndarray]) -> None:
        self.registers = registers
        self.initial: list[np.ndarray | None] = [None] * len(registers) + list(constants)


class Frame:
    """Lanes that execute together: all lanes of a layout (the root), or a subset.

    A subset has copies of the registers that it used.

    Attributes:
      lanes: lane numbers of the layout, ascending; None for the root, which holds every lane.
      index: the same lanes as positions in the parent frame.
      regs: register values, then the program's constants.
      part: registers that only some lanes have written: (value, written mask).
      dirty: registers written since the parent's copy was taken.
    """

    __slots__ = (
        "count",
        "dirty",
        "file",
        "index",
        "lanes",
        "layout",
        "parent",
        "part",
        "regs",
        "_whole",
    )

    def __init__(
        self,
        layout: Layout,
        file: RegisterFile,
        parent: Frame | None = None,
        index: np.ndarray | None = None,
    ) -> None:
        self.layout, self.file = layout, file
        self.parent, self.index = parent, index
        self.count = layout.lanes if index is None else index.size
        self.lanes: np.ndarray | None = (
            index if parent is None or parent.lanes is None else parent.lanes[index]
        )
        self.regs: list[np.ndarray | None] = list(file.initial)
        self.part: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.dirty: set[int] = set()
        self._whole: bool | None = None

    def subset(self, index: np.ndarray) -> Frame:
        return Frame(self.layout, self.file, self, index)

    @property
    def all_lanes(self) -> np.ndarray:
        return self.layout.lane_numbers if self.lanes is None else self.lanes

    @property
    def whole_warps(self) -> bool:
        """Whether the frame has all 32 lanes of each of its warps."""
        if self._whole is None:
            lanes = self.all_lanes
            self._whole = bool(
                lanes.size % WARP == 0
                and (lanes[::WARP] % WARP == 0).all()
                and (lanes[WARP - 1 :: WARP] - lanes[::WARP] == WARP - 1).all()
            )
        return self._whole

    def of_lanes(self, values: np.ndarray) -> np.ndarray:
        """Returns this frame's part of a per-lane array of the layout, shape (lanes,) or (1,)."""
        return values if self.lanes is None or values.size == 1 else values[self.lanes]

    def peek(self, register: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns a register's value and the mask of lanes that have written it.

        The mask is None if all lanes have written it. The result is (None, None) if none has.
        """
        value = self.regs[register]
        if value is not None:
            return value, None
        if register in self.part:
            return self.part[register]
        if self.parent is None:
            return None, None
        value, written = self.parent.peek(register)
        if value is None:
            return None, None
        if value.size > 1:
            value = value[self.index]
        if written is not None:
            written = written[self.index]
            if not written.all():
                self.part[register] = value, written
                return value, written
        self.regs[register] = value
        return value, None

    def fetch(self, register: int, instruction: Instruction) -> np.ndarray:
        """Returns a register's value for all lanes of the frame; raises if a lane has none."""
        value, written = self.peek(register)
        if value is not None and written is None:
            return value
        position = 0 if written is None else int(np.argmin(written))
        raise self.fault(
            UninitializedRead,
            instruction,
            position,
            f"register {self.file.registers[register].name} was never written",
        )

    def merge(self, register: int, index: np.ndarray, new: np.ndarray) -> None:
        """Writes `new` to a register of the lanes at positions `index`."""
        value, written = self.peek(register)
        if index.size == self.count:
            value, written = new, None
        elif value is None:
            value = np.zeros(self.count, new.dtype)
            value[index] = new
            written = np.zeros(self.count, np.bool_)
            written[index] = True
        else:
            value = np.array(np.broadcast_to(value, self.count))
            value[index] = new
            if written is not None:
                written = written.copy()
                written[index] = True
                if written.all():
                    written = None
        self.dirty.add(register)
        if written is None:
            self.regs[register] = value
            self.part.pop(register, None)
        else:
            self.regs[register] = None
            self.part[register] = value, written

    def flush(self, live: frozenset[int]) -> None:
        """Copies written registers that are still live back to the parent."""
        if self.parent is None:
            return
        assert self.index is not None
        for register in self.dirty & live:
            value = self.regs[register]
            if value is not None:
                self.parent.merge(register, self.index, value)
            elif register in self.part:
                value, written = self.part[register]
                self.parent.merge(register, self.index[written], value[written])
        self.dirty.clear()

    def fault(
        self, error: type[SimulationError], instruction: Instruction, position: int, what: str
    ) -> SimulationError:
        """Returns an error for the lane at this position in the frame."""
        return self.layout.fault(error, instruction, int(self.all_lanes[position]), what)
