"""Multiplies packed weight tiles by activations with mma, in int8 with scales or in f16.

For 16 weight rows, 8 activations and 32 columns, the integer product is one int8 mma, and two or
more float multiply-adds scale each exact sum. The f16 product, whose weights include the scales, is
two mma, which accumulate 256 columns before any float operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...formats.unpack.packed_tile import (
    UNITS,
    F16Tile,
    Int8Group,
    Int8Groups,
    Pair,
    ReadMinimums,
    TilePlane,
    minimum_type,
)
from ...formats.unpack.packed_words import Words
from ...ptx import Builder, Pointer, Value, Var, bf16, f16, f32, s8, s32, u32
from ..quantize_f16 import f16_scale
from ..quantize_q8_1 import GROUP
from .fragments import Accumulators, f16_activations, f16_weights, matrices_of, two_activations

#: 1.5 * 2^23 as bits. Adding an integer below 2^22 to the bits gives the float of the sum without a
#: conversion.
_MAGIC_BITS, _MAGIC = 0x4B400000, 12582912.0


Tile = Sequence[TilePlane]  # 16 weight rows of 256 columns


class Products(Protocol):
    """Interface of a multiplier: totals += weight tiles . activations.

    `activations` are planes u8 (rows, pitch) in shared memory.
    """

    def add(self, tiles: Sequence[Tile], unit: Value, activations: Sequence[Pointer]) -> None:
        """Emits the products of the 64 columns of unit `unit`."""

    def finish(self, tiles: Sequence[Tile], activations: Sequence[Pointer]) -> None:
        """Emits what remains after the last unit of 256 columns."""


def pair_pitch(rows: int) -> int:
    """Returns the pitch in bytes from group to group of pairs (scale, scale * sum).

    A group has a pair for each of `rows` activations.
    """
    return rows * 8 + 32


class IntegerProducts:
    """Multiplies 8-bit quants by q8_1 activations: values s8, pairs f32 (8 groups, `pair_pitch`).

    The accumulator starts at a magic number, so that the integer result s of mma is obtained as the
    float magic + s. Multiplied by scale, minus magic * scale, it is s * scale rounded once, because
    magic * scale is exact.
    """

    def __init__(
        self,
        k: Builder,
        int8_groups: Int8Groups,
        read_minimums: ReadMinimums | None,
        totals: Accumulators,
    ) -> None:
        self._k, self._int8_groups, self._totals = k, int8_groups, totals
        self._read_minimums = read_minimums
        self._magic = [k.const(s32, _MAGIC_BITS)] * 4

    def add(self, tiles: Sequence[Tile], unit: Value, activations: Sequence[Pointer]) -> None:
        values, pairs = self._shaped(activations)
        weights = [self._int8_groups(self._k, tile, unit) for tile in tiles]
        for groups in zip(*weights, strict=True):
            self._add_group(groups, values, pairs)

    def _shaped(self, activations: Sequence[Pointer]) -> tuple[Pointer, Pointer]:
        values, pairs = activations
        return values, pairs.reshape(UNITS * 2, pair_pitch(values.shape[0]))

    def _add_group(self, groups: Sequence[Int8Group], values: Pointer, pairs: Pointer) -> None:
        k, totals, index = self._k, self._totals, groups[0].index
        parts = [_parts(group) for group in groups]
        fragments = two_activations(k, values).at(index * GROUP)
        pairs = pairs.at(index, k.lane_id % 4 * 16).cast(f32)
        for i in range(len(totals[0])):
            if i % 2 == 0:
                words = matrices_of(k, fragments.at(i * 8 * values.shape[1]), len(totals[0]) - i)
            b = words[i % 2 * 2 : i % 2 * 2 + 2]
            scale_0, sum_0, scale_1, sum_1 = pairs.load(16 * i, vector=4)
            scales = scale_0, scale_1
            for group, tile_parts, total in zip(groups, parts, totals, strict=True):
                for part in tile_parts:
                    products = k.mma(part.a, b[part.columns], self._magic, group.type, s8)
                    for j, product in enumerate(products):
                        scale, less = part.scale[j // 2], part.less[j // 2]
                        if group.wide:  # magic * scale could be infinite
                            exact = (product.bits(f32) - _MAGIC) * scales[j % 2]
                            k.accumulate(total[i][j], exact, scale)
                        else:
                            scaled = k.fma(product.bits(f32), scale, less)
                            k.accumulate(total[i][j], scaled, scales[j % 2])
                if group.offsets is not None and group.minimums is None:
                    for j in range(4):
                        k.accumulate(total[i][j], group.offsets[j // 2], (sum_0, sum_1)[j % 2])

    def finish(self, tiles: Sequence[Tile], activations: Sequence[Pointer]) -> None:
        """Emits totals += factor * minimums . sums over the eight groups of 32 columns.

        This is exact except for mma's own rounding. A sum is represented by three bf16: its upper,
        middle and lower 8 bits; or by two f16, of 22 bits in all, which share a power of two with
        the other groups' sums.
        """
        if self._read_minimums is None:
            return
        k, (_, pairs) = self._k, self._shaped(activations)
        minimums = [self._read_minimums(k, tile) for tile in tiles]
        sums = pairs.at(k.lane_id % 4, k.lane_id // 4 * 8 + 4).cast(f32)
        zeros, none = [k.const(f32, 0.0)] * 4, k.const(u32, 0)
        for i in range(len(self._totals[0])):
            places = [group * pairs.shape[1] // 4 + 16 * i for group in (0, 4)]
            if minimum_type(k) is f16:
                b, scales = _f16_parts(k, [sums.load(place) for place in places])
                for tile, total in zip(minimums, self._totals, strict=True):
                    for j, product in enumerate(k.mma(tile.words, b, zeros, f16)):
                        k.accumulate(total[i][j], tile.factor[j // 2] * scales[j % 2], product)
                continue
            parts = [_bf16_parts(sums.load(place)) for place in places]
            b = [k.permute(upper, middle, 0x7632) for upper, middle, _ in parts]
            lower = [k.permute(lower, none, 0x7632) for _, _, lower in parts]
            for tile, total in zip(minimums, self._totals, strict=True):
                products = k.mma(tile.words, lower, zeros, bf16)
                for j, product in enumerate(k.mma(tile.words, b, products, bf16)):
                    k.accumulate(total[i][j], tile.factor[j // 2], product)


def _bf16_parts(value: Value) -> tuple[Value, Value, Value]:
    """Splits an f32 into three f32 (as u32), each a bf16 followed by zeros."""
    upper = value.bits(u32) & 0xFFFF0000
    rest = value - upper.bits(f32)
    middle = rest.bits(u32) & 0xFFFF0000
    return upper, middle, (rest - middle.bits(f32)).bits(u32)


def _f16_parts(k: Builder, sums: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Splits a column's sums, of which each of four lanes has two, into f16 (high, low).

    Returns both pairs, divided by a power of two, and that of the columns of the lane's results.
    """
    largest = k.warp_max(k.maximum(*(k.abs(each) for each in sums)), lanes=4)
    inverse, scale = f16_scale(k, largest)
    scaled = [each * inverse for each in sums]
    pairs = [k.pair(each, each - each.to(f16).to(f32), f16) for each in scaled]
    return pairs, [k.shuffle(scale, k.lane_id % 4 * 8 + 4 * column) for column in range(2)]


class _Part(NamedTuple):
    """A product with one scale: operand A, its columns of B, the scale, and -magic * scale."""

    a: Words
    columns: slice
    scale: Pair
    less: Pair


def _parts(group: Int8Group) -> list[_Part]:
    count = len(group.scales)  # of 32 / count columns each
    found = [
        (
            group.words[p * 4 // count : (p + 1) * 4 // count],
            slice(p * 2 // count, (p + 1) * 2 // count),
            scale,
        )
        for p, scale in enumerate(group.scales)
    ]
    if group.minimums is not None and group.offsets is not None:
        found.append((group.minimums, slice(0, 2), group.offsets))
    return [_Part(*part, (part[2][0] * -_MAGIC, part[2][1] * -_MAGIC)) for part in found]


class F16Products:
    """Multiplies scaled f16 weights by f16 activations.

    `activations`: values f16, in the order of `f16_weights`, means of groups as f16 (high, low),
    scales f32. mma alone accumulates 256 columns. Then totals += (scale * sums + offset * minimums
    . means) * the activations' scale.
    """

    def __init__(self, k: Builder, weights: F16Tile, totals: Accumulators) -> None:
        self._k, self._weights, self._totals = k, weights, totals
        self._sums = [[[k.var(f32, 0.0) for _ in range(4)] for _ in tile] for tile in totals]
        self._zeros = [k.const(f32, 0.0)] * 4

    def add(self, tiles: Sequence[Tile], unit: Value, activations: Sequence[Pointer]) -> None:
        k, values = self._k, activations[0]
        for groups in zip(*(self._weights.groups(k, tile, unit) for tile in tiles), strict=True):
            weights = [f16_weights(k, group) for group in groups]
            fragments = f16_activations(k, values, groups[0].index)
            for i in range(len(self._sums[0])):
                words = k.ldmatrix(fragments.at(i * 8 * values.shape[1]))
                for step in range(2):  # of 16 columns
                    for tile, a in zip(self._sums, weights, strict=True):
                        self._multiply(a[step], words[2 * step : 2 * step + 2], tile[i])

    def _multiply(self, a: Words, b: Words, sums: Sequence[Var]) -> None:
        for total, product in zip(sums, self._k.mma(a, b, sums, f16), strict=True):
            total.set(product)

    def finish(self, tiles: Sequence[Tile], activations: Sequence[Pointer]) -> None:
        k, (_, means, scales) = self._k, activations
        blocks = [self._weights.scales(k, tile) for tile in tiles]
        fragments, pairs = two_activations(k, means), scales.cast(f32).at(k.lane_id % 4 * 2)
        for i in range(len(self._sums[0])):
            if i % 2 == 0 and blocks[0].offset is not None:
                words = matrices_of(k, fragments.at(i * 8 * means.shape[1]), len(self._sums[0]) - i)
            both = pairs.load(8 * i, vector=2)
            for block, tile, total in zip(blocks, self._sums, self._totals, strict=True):
                scaled: list[Value] = [s * block.scale[j // 2] for j, s in enumerate(tile[i])]
                if block.offset is not None:
                    low = k.mma(block.minimums, words[i % 2 * 2 : i % 2 * 2 + 2], self._zeros, f16)
                    scaled = [k.fma(m, block.offset[j // 2], scaled[j]) for j, m in enumerate(low)]
                for j, value in enumerate(scaled):
                    k.accumulate(total[i][j], value, both[j % 2])
                    tile[i][j].set(0.0)
