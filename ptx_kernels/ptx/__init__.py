"""Kernel language: Python functions that write PTX text with a `Builder`."""

from .arguments import Group
from .builder import Builder
from .errors import KernelError
from .instructions import INSTRUCTIONS, Instruction
from .kernel_function import kernel
from .lane_partition import LanePartition
from .module import MAX_CLUSTER, Buffer, Kernel
from .pointer import Pointer
from .prefetch import Prefetch, layer_index
from .split import half_of_warps
from .types import bf16, e4m3, f16, f32, pred, s8, s16, s32, s64, u8, u16, u32, u64
from .values import Value, Var, all_of
from .warp import WARP

__all__ = [
    "INSTRUCTIONS",
    "MAX_CLUSTER",
    "WARP",
    "Buffer",
    "Builder",
    "Group",
    "Instruction",
    "Kernel",
    "KernelError",
    "LanePartition",
    "Pointer",
    "Prefetch",
    "Value",
    "Var",
    "all_of",
    "bf16",
    "e4m3",
    "f16",
    "f32",
    "half_of_warps",
    "kernel",
    "layer_index",
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
