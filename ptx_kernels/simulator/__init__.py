"""Runs PTX text on NumPy: lanes in lockstep, every memory access checked."""

from .errors import (
    BarrierDivergence,
    Deadlock,
    EarlyExit,
    LaunchError,
    Misaligned,
    NonCoherentRead,
    OutOfBounds,
    ParseError,
    ReadOnlyWrite,
    SharedRace,
    ShuffleError,
    SimulationError,
    StepLimit,
    TypeMismatch,
    UninitializedRead,
    UnknownInstruction,
    UnwrittenOutput,
)
from .launch import Statistics, launch, run
from .memory import DeviceBuffer

__all__ = [
    "BarrierDivergence",
    "Deadlock",
    "DeviceBuffer",
    "EarlyExit",
    "LaunchError",
    "Misaligned",
    "NonCoherentRead",
    "OutOfBounds",
    "ParseError",
    "ReadOnlyWrite",
    "SharedRace",
    "ShuffleError",
    "SimulationError",
    "Statistics",
    "StepLimit",
    "TypeMismatch",
    "UninitializedRead",
    "UnknownInstruction",
    "UnwrittenOutput",
    "launch",
    "run",
]
