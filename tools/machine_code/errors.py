"""Faults of executed machine code."""

from __future__ import annotations


class Fault(Exception):
    """Machine code did what hardware forbids or leaves undefined.

    The message ends with the instruction's address and text once the machine has added them.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{message}, at {place}" if place else message)
        self.message = message

    def at(self, place: str) -> Fault:
        """Returns the same fault with the place of the instruction."""
        return type(self)(self.message, place)


class OutOfBoundsFault(Fault):
    """An access outside of every buffer, or outside of the block's shared memory."""


class MisalignedFault(Fault):
    """An address that is not a multiple of the access's size."""


class UnwrittenFault(Fault):
    """A read of shared memory that nobody has written."""


class PendingCopyFault(Fault):
    """An access to shared memory that an asynchronous copy may still write, or an exit before."""


class AbsentLaneFault(Fault):
    """An instruction of a whole warp, or a shuffle, needs a lane that is elsewhere."""


class DeadlockFault(Fault):
    """All remaining threads wait."""


class UnknownInstructionFault(Fault):
    """An instruction, or a form of it, that the table does not have."""
