"""Random operands for any kernel, by its buffers' types and the names that families know.

Scales are sane; ids and pages are in range.
"""

from __future__ import annotations

import numpy as np

from .. import formats
from ..ptx import Buffer, Kernel
from ..ptx.instructions import f32_to_bf16
from . import FAMILIES
from .family import RandomValues

#: By name, what families say of their buffers.
_NAMED: dict[str, RandomValues] = {
    name: values for family in FAMILIES.values() for name, values in family.operands.items()
}


def random_blocks(format: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Packed blocks as in a file, uint8 (*shape, block_bytes): random quants, small scales > 0."""
    block = formats.get(format)
    raw = rng.integers(0, 256, (*shape, block.block_bytes), np.uint8)
    for field in block.scale_fields:
        block.store_scale(raw, field, rng.uniform(0.001, 0.01, shape))
    return raw


def random_planes(format: str, *shape: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Planes (*shape, bytes) of a packed matrix, shape (n, blocks), or of a stack."""
    planes = formats.get(format).split(random_blocks(format, shape, rng))
    return tuple(map(np.ascontiguousarray, planes))


def _matrices(planes: list[Buffer]) -> list[tuple[str, list[Buffer]]]:
    """Packed matrices of the planes in order: format and planes, whose names may have a prefix."""
    found = []
    known = sorted((formats.get(name) for name in formats.names()), key=lambda f: -len(f.planes))
    while planes:
        for block in known:
            own = planes[: len(block.planes)]
            given = [
                (b.name.endswith(p.name), b.shape[-1])
                for b, p in zip(own, block.planes, strict=False)
            ]
            if given == [(True, p.bytes_per_block) for p in block.planes]:
                break
        else:
            raise ValueError(f"no format has the planes {[(b.name, b.shape[-1]) for b in planes]}")
        found.append((block.name, own))
        planes = planes[len(own) :]
    return found


def random_operands(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """One array per operand of `kernel`, in order; bf16 as uint16 bits.

    Integers are what their names mean, some of them out of range; KeyError for a name that no
    family knows.
    """
    rng = np.random.default_rng(seed)
    buffers = {b.name: b for b in kernel.buffers}
    packed = [b for b in kernel.operands if b.type.name == "u8" and not b.ahead]
    planes: dict[str, np.ndarray] = {}
    for format, own in _matrices(packed):
        arrays = random_planes(format, *own[0].shape[:-1], rng=rng)
        planes |= {b.name: array for b, array in zip(own, arrays, strict=True)}

    def make(buffer: Buffer) -> np.ndarray:
        if buffer.name in planes:
            return planes[buffer.name]
        if buffer.ahead:
            return np.zeros(buffer.shape, buffer.type.dtype)  # nobody reads them
        if buffer.name.endswith("index"):  # of a stack (`input_planes`)
            layers = packed[0].shape[0]
            return rng.integers(-layers, layers, buffer.shape, np.int32)
        if buffer.type.name == "s32" or buffer.name in _NAMED:
            values = _NAMED[buffer.name](buffer, buffers, rng)
            return values.astype(buffer.type.dtype)
        if buffer.type.name == "e4m3":  # 0x7f and 0xff are NaN
            magnitudes = rng.integers(0, 0x7F, buffer.shape, np.uint8)
            return magnitudes | rng.integers(0, 2, buffer.shape, np.uint8) << 7
        if buffer.type.name == "s8":
            return rng.integers(-127, 128, buffer.shape, np.int8)
        floats = rng.standard_normal(buffer.shape, np.float32)
        if buffer.type.name == "bf16":
            return f32_to_bf16(floats)
        return floats.astype(buffer.type.dtype)

    return [make(buffer) for buffer in kernel.operands]
