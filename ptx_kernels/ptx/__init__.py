"""The kernel language: Python that writes PTX text."""
from .errors import KernelError
from .instructions import INSTRUCTIONS, Instruction
from .module import Buffer, Kernel
from .types import bf16, f16, f32, pred, s8, s16, s32, s64, u8, u16, u32, u64

__all__ = ["INSTRUCTIONS", "Buffer", "Instruction", "Kernel", "KernelError", "bf16", "f16", "f32", "pred", "s8",
           "s16", "s32", "s64", "u8", "u16", "u32", "u64"]
