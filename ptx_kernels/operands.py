"""Random operands for any kernel, chosen by its buffers' names and types: sane scales, ids and
pages in range."""

from __future__ import annotations

import math

import numpy as np

from . import formats
from .ptx import Buffer, Kernel
from .ptx.instructions import f32_to_bf16


def random_blocks(format: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Packed blocks as a file holds them, uint8 (*shape, block_bytes): random quants, small
    positive scales."""
    block = formats.get(format)
    raw = rng.integers(0, 256, (*shape, block.block_bytes), np.uint8)
    for field in block.half_fields:
        scales = rng.uniform(0.001, 0.01, (*shape, 1)).astype(np.float16)
        raw[..., block.offset(field) : block.offset(field) + 2] = scales.view(np.uint8)
    return raw


def random_planes(
    format: str, n: int, blocks: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Planes of a packed (n, blocks * block_size) matrix."""
    return tuple(
        map(
            np.ascontiguousarray, formats.get(format).split(random_blocks(format, (n, blocks), rng))
        )
    )


def _matrices(planes: list[Buffer]) -> list[tuple[str, list[Buffer]]]:
    """The packed matrices that the planes make up, in order: format and planes each, whose names
    may have a prefix.
    """
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


def _integers(buffer: Buffer, buffers: dict[str, Buffer], rng: np.random.Generator) -> np.ndarray:
    """What an integer buffer's name asks for; KeyError for a name without a rule."""
    if buffer.name == "ids":
        vocab = next(b.shape[0] for b in buffers.values() if b.type.name == "u8")
        ids = rng.integers(0, vocab, buffer.shape)
        return np.concatenate([[vocab, -1], ids[2:]]) if ids.size > 2 else ids
    if buffer.name == "indices":  # candidates of a vocabulary
        return rng.permutation(math.prod(buffer.shape)).reshape(buffer.shape)
    num_pages, _, page_size, _ = buffers["k_pages"].shape
    if buffer.name == "slot_mapping":
        slots = num_pages * page_size
        mapping = rng.permutation(slots)[: buffer.shape[0]]
        return np.concatenate([[-1, slots], mapping[2:]]) if mapping.size > 2 else mapping
    if buffer.name == "block_tables":
        entries = math.prod(buffer.shape)
        pages = rng.permutation(max(num_pages, entries)) % num_pages
        return pages[:entries].reshape(buffer.shape)
    if buffer.name == "context_lens":
        tables = buffers.get(
            "block_tables"
        )  # without them the pages are contiguous, one per sequence
        capacity = page_size * (
            tables.shape[1] if tables is not None else num_pages // buffer.shape[0]
        )
        lengths = rng.integers(1, capacity + 1, buffer.shape)
        lengths[0] = capacity
        lengths[1:2] = 0
        return lengths
    raise KeyError(buffer.name)


def random_operands(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """One array per operand of `kernel`, in order; bf16 as uint16 bits.

    Integers are what their names mean: `ids` and `slot_mapping` hold a few out of range,
    `block_tables` sends no two sequences to one page, `context_lens` starts with a full and an
    empty sequence where there are several.
    """
    rng = np.random.default_rng(seed)
    buffers = {b.name: b for b in kernel.buffers}
    packed = [b for b in kernel.operands if b.type.name == "u8"]
    planes: dict[str, np.ndarray] = {}
    for format, own in _matrices(packed):
        n, blocks, _ = own[0].shape
        arrays = random_planes(format, n, blocks, rng)
        planes |= {b.name: array for b, array in zip(own, arrays, strict=True)}

    def make(buffer: Buffer) -> np.ndarray:
        if buffer.name in planes:
            return planes[buffer.name]
        if buffer.type.name == "e4m3":  # 0x7f and 0xff are NaN
            return (
                rng.integers(0, 0x7F, buffer.shape, np.uint8)
                | rng.integers(0, 2, buffer.shape, np.uint8) << 7
            )
        if buffer.type.name == "s32":
            return _integers(buffer, buffers, rng).astype(np.int32)
        if buffer.type.name == "s8":
            return rng.integers(-127, 128, buffer.shape, np.int8)
        values = rng.standard_normal(buffer.shape, np.float32)
        if buffer.name in ("k_scales", "v_scales"):
            return np.abs(values) / 100
        if buffer.name == "marks":  # (highest score, sum of weights)
            return np.abs(values) + np.float32(1)
        return (
            f32_to_bf16(values) if buffer.type.name == "bf16" else values.astype(buffer.type.dtype)
        )

    return [make(buffer) for buffer in kernel.operands]
