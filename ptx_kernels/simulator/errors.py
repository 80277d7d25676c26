"""Errors of a simulated launch.

Each message names kernel, line, thread block, thread and address.
"""

from __future__ import annotations

from collections.abc import Mapping


class SimulationError(RuntimeError):
    """A kernel did something that a GPU would crash on, leave undefined or silently get wrong.

    Attributes:
      line: number of the PTX line, from 1; None if no single line is at fault.
      source: `file:line` of the Python that wrote that line, and of its caller, if the kernel
        records it.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.source: str | None = None

    def locate(self, lines: Mapping[int, tuple[tuple[str, int], ...]]) -> None:
        """Sets `source` by looking up the PTX line in a kernel's line table."""
        self.source = None if self.line is None else source_of(lines, self.line)

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.source is None else f"{message}\n  written by {self.source}"


def source_of(lines: Mapping[int, tuple[tuple[str, int], ...]], line: int) -> str | None:
    """Returns `file:line` of the Python that wrote a PTX line, and of the kernel's call to it.

    None if the line is not in the table.
    """
    return (
        ", called at ".join(f"{file}:{number}" for file, number in lines[line])
        if line in lines
        else None
    )


class ParseError(SimulationError):
    """Text that the simulator cannot read as PTX: wrong syntax, names or declarations."""


class UnknownInstruction(ParseError):
    """An opcode that is neither in the instruction table nor implemented by the machine."""


class TypeMismatch(ParseError):
    """An operand whose register class or kind does not fit the instruction."""


class LaunchError(SimulationError):
    """Buffers or geometry that do not fit the kernel's parameters and limits."""


class OutOfBounds(SimulationError):
    """An address outside all buffers, or beyond the thread block's shared memory."""


class Misaligned(SimulationError):
    """An address that is not a multiple of the access size."""


class UninitializedRead(SimulationError):
    """A register, shared byte or output byte that is read before it is written."""


class UnwrittenOutput(SimulationError):
    """Bytes of an `out` buffer that the kernel never wrote."""


class ReadOnlyWrite(SimulationError):
    """A store to a buffer that the kernel declared as input."""


class NonCoherentRead(SimulationError):
    """`ld.global.nc` from a buffer that the kernel writes."""


class SharedRace(SimulationError):
    """Two lanes access the same shared bytes concurrently, and one of them writes."""


class GlobalRace(SimulationError):
    """Two lanes, of one thread block or of two, access the same global bytes concurrently.

    At least one of them writes.
    """


class BarrierDivergence(SimulationError):
    """`bar.sync` that only part of a warp reaches."""


class EarlyExit(SimulationError):
    """A thread exited before a barrier that other threads of its thread block wait at."""


class Deadlock(SimulationError):
    """Threads wait at a barrier that the others never reach."""


class AbsentBlock(SimulationError):
    """An access to shared memory of a thread block that may not have started or may have exited."""


class ShuffleError(SimulationError):
    """A warp instruction whose membermask or source lane does not match the executing lanes."""


class WarpDivergence(SimulationError):
    """`mma` or `ldmatrix` that only part of a warp executes."""


class AsyncPending(SimulationError):
    """Shared memory accessed while an asynchronous copy into it may still be in flight."""


class MissingProxyFence(SimulationError):
    """Shared bytes used by threads, then by a bulk copy, without `fence.proxy.async` between."""


class MbarrierMisuse(SimulationError):
    """An mbarrier that was not initialized, or that counts more than its phase expects."""


class StepLimit(SimulationError):
    """A launch that exceeds the limit of basic blocks, probably because of an infinite loop."""


class Trap(SimulationError):
    """A `trap`, or an indexed branch (`brx.idx`) beyond its table of targets."""
