"""The kernel language: Python that writes PTX text."""

from .builder import WARP, Builder, kernel
from .dealt import Dealt
from .errors import KernelError
from .instructions import INSTRUCTIONS, Instruction
from .module import Buffer, Kernel
from .types import bf16, e4m3, f16, f32, pred, s8, s16, s32, s64, u8, u16, u32, u64
from .values import Pointer, Value, Var, all_of

__all__ = [
    "INSTRUCTIONS",
    "WARP",
    "Buffer",
    "Builder",
    "Dealt",
    "Instruction",
    "Kernel",
    "KernelError",
    "Pointer",
    "Value",
    "Var",
    "all_of",
    "bf16",
    "e4m3",
    "f16",
    "f32",
    "kernel",
    "pred",
    "s8",
    "s16",
    "s32",
    "s64",
    "u8",
    "u16",
    "u32",
    "u64",
]
