"""Errors of a run; every message names kernel, line, block, thread and address."""

from __future__ import annotations

from collections.abc import Mapping


class SimulationError(RuntimeError):
    """A kernel did something that a GPU would crash on, leave undefined or silently get wrong.

    Attributes:
      line: number of the PTX line, from 1; None where no single line is at fault.
      source: `file:line` of the Python that wrote that line, and of its call, where the kernel
        knows it.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.source: str | None = None

    def locate(self, lines: Mapping[int, tuple[tuple[str, int], ...]]) -> None:
        """Looks the PTX line up in a kernel's table of lines."""
        self.source = None if self.line is None else source_of(lines, self.line)

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.source is None else f"{message}\n  written by {self.source}"


def source_of(lines: Mapping[int, tuple[tuple[str, int], ...]], line: int) -> str | None:
    """The line of Python that wrote a PTX line, and the kernel's line that called it."""
    return (
        ", called at ".join(f"{file}:{number}" for file, number in lines[line])
        if line in lines
        else None
    )


class ParseError(SimulationError):
    """The text is no PTX that the simulator knows: syntax, names, declarations."""


class UnknownInstruction(ParseError):
    """An opcode that is neither in the instruction table nor defined by the machine."""


class TypeMismatch(ParseError):
    """An operand whose register class or kind does not fit the instruction."""


class LaunchError(SimulationError):
    """Buffers or geometry that do not fit the kernel's parameters and limits."""


class OutOfBounds(SimulationError):
    """An address outside of every buffer, or beyond the block's shared memory."""


class Misaligned(SimulationError):
    """An address that is no multiple of the access size."""


class UninitializedRead(SimulationError):
    """A register, shared byte or output byte read before anyone wrote it."""


class UnwrittenOutput(SimulationError):
    """The kernel ended and bytes of an `out` buffer were never written."""


class ReadOnlyWrite(SimulationError):
    """A store to a buffer that the kernel declared as input."""


class NonCoherentRead(SimulationError):
    """`ld.global.nc` from a buffer that the kernel writes."""


class SharedRace(SimulationError):
    """Two lanes touch the same shared bytes concurrently, and one of them writes."""


class GlobalRace(SimulationError):
    """Two lanes touch the same global bytes concurrently, and one of them writes.

    They are of one block or of two.
    """


class BarrierDivergence(SimulationError):
    """`bar.sync` reached by a part of a warp."""


class EarlyExit(SimulationError):
    """A thread exited before a barrier that other threads of its block wait at."""


class Deadlock(SimulationError):
    """Threads wait at a barrier that the others never reach."""


class AbsentBlock(SimulationError):
    """Shared memory of another block that may not have started yet, or may have exited."""


class ShuffleError(SimulationError):
    """A warp instruction whose membermask or source lane does not match the executing lanes."""


class WarpDivergence(SimulationError):
    """`mma` or `ldmatrix` executed by a part of a warp."""


class AsyncPending(SimulationError):
    """Shared memory read or written while an asynchronous copy into it may still be under way."""


class MissingProxyFence(SimulationError):
    """Shared bytes that threads access and then a bulk copy, without fence.proxy.async between."""


class MbarrierMisuse(SimulationError):
    """An mbarrier that was never initialized, or that counts more than its phase expects."""


class StepLimit(SimulationError):
    """The launch ran more basic blocks than allowed: most likely a loop that never ends."""


class Trap(SimulationError):
    """`trap` was reached, or an indexed branch (`brx.idx`) beyond its table of targets."""
