"""Builds formats that kernels read in groups of eight weights: IQ codebook formats and others.

A group is 8 adjacent weights: int8 bytes and a scale. Its reader uses small loads. They are slower
than wide loads, but fast enough for formats that few tensors of a file use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...ptx import Builder, Pointer, Value, f16, f32, s32, u8, u16, u32
from ...ptx.types import Type
from ..base import BlockFormat, FormatTuning
from . import codebooks
from .packed_block import DequantizedRun
from .packed_row import Run, Share, Tile, signed_run
from .packed_words import Words, signed_byte_floats

EIGHT = 8
_LOADS: dict[int, Type] = {1: u8, 2: u16, 4: u32}


class Get(Protocol):
    """Function that reads a little-endian number of 1, 2 or 4 bytes of a quantization block.

    The number is aligned to its size. `offset` counts bytes from the block's start in the plane
    called `plane`.
    """

    def __call__(self, plane: str, offset: Any, nbytes: int) -> Any: ...


@dataclass(frozen=True)
class Reader:
    """Functions that emit the loading and unpacking of a group of eight weights.

    Attributes:
      planes: names of the planes.
      load: starts the loads of the numbers that encode group `i` (u32) of a block.
      unpack: converts these numbers to two words of int8 and a scale, s32 or f32, or None for 1.
      load_d: starts the load of the quantization block's factor d.
      d: converts the result of `load_d` to the factor, f32.
    """

    planes: Sequence[str]
    load: Callable[[Builder, Get, Value], Any]
    unpack: Callable[[Builder, Any], tuple[Words, Value | None]]
    load_d: Callable[[Get], Any]
    d: Callable[[Builder, Any], Value]


def _getter(planes: Sequence[str], pointers: Sequence[Pointer]) -> Get:
    """Returns a `Get` that reads the quantization block at `pointers` (u8, one per plane)."""

    def get(plane: str, offset: Any, nbytes: int) -> Value:
        type_ = _LOADS[nbytes]
        pointer = pointers[planes.index(plane)]
        if isinstance(offset, int):
            return pointer.at(offset).cast(type_).load().to(u32)
        return pointer.reshape(1 << 20).at(offset).cast(type_).load().to(u32)

    return get


class EightsRow:
    """Reads a lane's share of packed rows: adjacent groups of eight, split evenly over the lanes.

    See `packed_row.PackedRow`.
    """

    reader: Reader
    block_size: int

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats = k, share.floats
        count = self.block_size // EIGHT // share.lanes
        self._first = share.part * count
        self.value_base = self._first * EIGHT
        self.runs: Sequence[tuple[int, int]] = tuple((EIGHT * i, EIGHT) for i in range(count))
        self._blocks = planes[0].shape[1]
        self._sizes = [plane.shape[2] for plane in planes]
        self._planes = [plane.at(share.row, share.block).moving() for plane in planes]

    def load(self, row: int, block: int) -> tuple[list[Any], Any]:
        k, at = self._k, row * self._blocks + block
        get = _getter(
            self.reader.planes,
            [p.at(at * size) for p, size in zip(self._planes, self._sizes, strict=True)],
        )
        eights = [self.reader.load(k, get, self._first + i) for i in range(len(self.runs))]
        return eights, self.reader.load_d(get)

    def unpack(self, loaded: tuple[list[Any], Any]) -> Tile:
        k, (eights, d) = self._k, loaded
        runs: list[Run] = []
        for numbers in eights:
            words, scale = self.reader.unpack(k, numbers)
            runs.append(signed_run(k, words, scale, floats=self._floats))
        return Tile(runs, self.reader.d(k, d), signed=True)

    def advance(self, blocks: int) -> None:
        for plane, size in zip(self._planes, self._sizes, strict=True):
            plane.advance(blocks * size)


def block_format(
    reader: Reader,
    *,
    name: str,
    block_size: int = 256,
    struct: tuple[tuple[str, int], ...],
    layout: tuple[tuple[str, tuple[str, ...]], ...],
    f16_fields: tuple[str, ...],
    weights: Callable[[Any, Any], Any],
    quant_bits: int,
    spread_fields: tuple[str, ...] = (),
) -> BlockFormat:
    """Returns the `BlockFormat` of a format that kernels read in groups of eight.

    The format has no tensor-core kernel.
    """

    def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
        get = _getter(reader.planes, planes)
        d = reader.d(k, reader.load_d(get))
        runs = []
        for i in range(4):
            words, scale = reader.unpack(k, reader.load(k, get, part * 4 + i))
            factor = d if scale is None else d * scale.to(f32)
            values = [factor * value for value in signed_byte_floats(k, words)]
            runs.append(DequantizedRun(part * 32 + EIGHT * i, values))
        return runs

    return BlockFormat(
        name=name,
        block_size=block_size,
        block_bytes=sum(size for _, size in struct),
        struct=struct,
        layout=layout,
        f16_fields=f16_fields,
        spread_fields=spread_fields,
        weights=weights,
        quant_bits=quant_bits,
        row=type("PackedRow", (EightsRow,), {"reader": reader, "block_size": block_size}),
        dequantize=dequantize,
        dequantize_threads=block_size // 32,
        int8_tile=None,
        tuning=FormatTuning(gemv_lanes=32, gemv_fewest_lanes=32),
    )


# --- codebooks ---


@dataclass(frozen=True)
class Numbers:
    """Codes of a group of eight weights of a codebook format, in NumPy, JAX or a kernel (u32).

    Attributes:
      entries: codebook index of eight magnitudes, or two indices of four magnitudes each.
      scale: the group's scale is 2 * scale + 1.
      signs: bit i is set if weight i is negative; None if the codebook has signs.
      lowered: 1 if the weights are lowered by an eighth, 0 if they are raised; None for formats
        without this shift.
    """

    entries: tuple[Any, ...]
    scale: Any
    signs: Any = None
    lowered: Any = None


def even_signs(seven: Any) -> Any:
    """Returns eight sign bits from seven: bit 7 makes the number of set bits even."""
    folded = seven ^ (seven >> 4)
    folded = folded ^ (folded >> 2)
    folded = folded ^ (folded >> 1)
    return seven | ((folded & 1) << 7)


def array_get(fields: Any, layout: Sequence[tuple[str, Sequence[str]]], xp: Any) -> Get:
    """Returns a `Get` on arrays: offsets (groups,) -> uint32 (..., blocks, groups), all blocks."""
    planes = {
        name: xp.concatenate([fields[field] for field in inside], axis=-1)
        for name, inside in layout
    }

    def get(plane: str, offset: Any, nbytes: int) -> Any:
        data = planes[plane]
        total = data[..., offset].astype(np.uint32)
        for byte in range(1, nbytes):
            total = total | (data[..., offset + byte].astype(np.uint32) << np.uint32(8 * byte))
        return total

    return get


def code_book_format(
    numbers: Callable[[Get, Any], Numbers],
    d: Callable[[Get], Any],
    *,
    name: str,
    unit: float,
    struct: tuple[tuple[str, int], ...],
    layout: tuple[tuple[str, tuple[str, ...]], ...],
    quant_bits: int,
    book: str | None = None,
    raised: bool = False,
    spread_fields: tuple[str, ...] = (),
) -> BlockFormat:
    """Returns a codebook format's `BlockFormat`: weight = unit * d * (2 * scale + 1) * magnitude.

    Args:
      numbers: returns the codes of group `i` of a quantization block, for arrays and kernels alike.
      d: returns the 16 bits of a block's f16 d.
      book: format that owns the codebook; None means this one.
      raised: the codebook has signs, and weights are an eighth above or below its values.
    """
    book = book or name
    planes = [plane for plane, _ in layout]
    f16_fields = () if spread_fields else ("d",)
    byte_unit = unit / 8 if raised else unit  # bytes are then eight times the weights

    def weights(field: Any, xp: Any) -> Any:
        get = array_get(field, layout, xp)
        eights = np.arange(32, dtype=np.uint32)
        found = numbers(get, eights)
        table = xp.asarray(codebooks.entries(book).astype(np.float32))
        values = xp.concatenate([table[at.astype(np.int32)] for at in found.entries], axis=-1)
        if found.signs is not None:
            bits = (found.signs[..., None] >> np.arange(8, dtype=np.uint32)) & 1
            values = xp.where(bits == 1, -values, values)
        if found.lowered is not None:
            eighth = xp.where(found.lowered == 1, np.float32(-0.125), np.float32(0.125))
            values = values + eighth[..., None]
        bits16 = d(lambda plane, offset, nbytes: get(plane, np.array([offset]), nbytes))
        factor = bits16.astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(unit)
        scale = factor * (2 * found.scale + 1).astype(np.float32)
        values = scale[..., None] * values
        return values.reshape(*values.shape[:-2], 256)

    def unpack(k: Builder, found: Numbers) -> tuple[Words, Value]:
        scale, count = (found.scale * 2 + 1).bits(s32), len(codebooks.entries(book))
        if raised:
            # 128 + 8 * entry, then plus or minus one: no byte carries into the next
            table = k.table(f"{book.lower()}_raised", codebooks.words(book, 8, 128))
            step = k.select(found.lowered == 0, k.const(u32, 0x01010101), 0xFEFEFEFF)
            pair = (
                table.reshape(len(codebooks.entries(book)), 2).at(found.entries[0]).load(vector=2)
            )
            return [(word + step) ^ 0x80808080 for word in pair], scale
        table = k.table(book.lower(), codebooks.words(book))
        if len(found.entries) == 1:
            loaded = list(table.reshape(count, 2).at(found.entries[0]).load(vector=2))
        else:
            loaded = [table.reshape(count, 1).at(at).load() for at in found.entries]
        return [_signed(word, found.signs >> 4 * i) for i, word in enumerate(loaded)], scale

    def factor(k: Builder, bits16: Value) -> Value:
        return f16_factor(k, bits16) * byte_unit

    reader = Reader(planes, lambda k, get, i: numbers(get, i), unpack, d, factor)
    return block_format(
        reader,
        name=name,
        struct=struct,
        layout=layout,
        f16_fields=f16_fields,
        weights=weights,
        quant_bits=quant_bits,
        spread_fields=spread_fields,
    )


def _signed(word: Value, signs: Value) -> Value:
    """Emits the negation of those of four positive bytes whose bit of `signs` (0 to 3) is set."""
    # moves bit i of four to bit 8 * i
    ones = ((signs & 15) * 0x00204081) & 0x01010101
    return (word ^ (ones * 255)) + ones


def f16_factor(k: Builder, bits16: Value) -> Value:
    """Emits the conversion of the 16 bits of an f16 to f32; used as a `Reader.d`."""
    value: Value = bits16.to(u16).bits(f16).to(f32)
    return value


def less_one(words: Words) -> Words:
    """Emits the subtraction of 1 from bytes of 0 to 2, as int8; no byte borrows from the next."""
    return [((word | 0x80808080) - 0x01010101) ^ 0x80808080 for word in words]
