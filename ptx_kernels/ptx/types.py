"""Value types of the kernel language and their representation in the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Type:
    """A PTX fundamental type.

    Registers are untyped bits except for f32 and predicates, so that one register serves as u32,
    s32 or b32.

    Attributes:
      name: PTX spelling without the dot (`f32`, `u64`, ...).
      size: bytes in memory (0 for predicates, which are not stored).
      register: PTX register class that holds a value of this type.
      dtype: NumPy dtype of the value. bf16, e4m3 (which NumPy lacks) and pairs are stored as bits.
    """

    name: str
    size: int
    register: str
    dtype: np.dtype

    def __repr__(self) -> str:
        return self.name

    @property
    def is_integer(self) -> bool:
        return self.name[0] in "us" and self.name[1:].isdigit()

    @property
    def is_signed(self) -> bool:
        return self.name[0] == "s"


pred = Type("pred", 0, "pred", np.dtype(np.bool_))
u8 = Type("u8", 1, "b16", np.dtype(np.uint8))
s8 = Type("s8", 1, "b16", np.dtype(np.int8))
u16 = Type("u16", 2, "b16", np.dtype(np.uint16))
s16 = Type("s16", 2, "b16", np.dtype(np.int16))
u32 = Type("u32", 4, "b32", np.dtype(np.uint32))
s32 = Type("s32", 4, "b32", np.dtype(np.int32))
u64 = Type("u64", 8, "b64", np.dtype(np.uint64))
s64 = Type("s64", 8, "b64", np.dtype(np.int64))
f16 = Type("f16", 2, "b16", np.dtype(np.float16))
bf16 = Type("bf16", 2, "b16", np.dtype(np.uint16))
f16x2 = Type("f16x2", 4, "b32", np.dtype(np.uint32))
bf16x2 = Type("bf16x2", 4, "b32", np.dtype(np.uint32))
#: For buffers only: loaded as bytes of u32, because no instruction takes one.
e4m3 = Type("e4m3", 1, "b16", np.dtype(np.uint8))
f32 = Type("f32", 4, "f32", np.dtype(np.float32))

#: Types of registers and memory; pairs (f16x2) exist only in opcodes.
TYPES: dict[str, Type] = {
    t.name: t for t in (pred, u8, s8, u16, s16, u32, s32, u64, s64, f16, bf16, f32)
}

#: NumPy dtype of each register class; f32 registers hold floats, the rest hold bits.
REGISTER_DTYPES: dict[str, np.dtype] = {
    "pred": np.dtype(np.bool_),
    "b16": np.dtype(np.uint16),
    "b32": np.dtype(np.uint32),
    "b64": np.dtype(np.uint64),
    "f32": np.dtype(np.float32),
}
