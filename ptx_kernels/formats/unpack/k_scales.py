"""Unpacks eight 6-bit (scale, min) pairs from 12 bytes, for Q4_K and Q5_K.

Source: ggml, `get_scale_min_k4`. Let s be the 12 bytes. Sub-blocks 0 to 3 are in the low six bits
of s[j] (scale) and s[4 + j] (min). Sub-block 4 + j has its low four bits in the nibbles of s[8 + j]
and its high two in the top bits of s[j] (scale) and s[4 + j] (min).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ptx import Builder, Value, u32
from ..base import f16_array


def unpack(scales: Any, xp: Any) -> tuple[Any, Any]:
    """Unpacks uint8 (..., 12) to scales and mins, each uint8 (..., 8) with values 0 to 63."""
    first, second, third = (scales[..., None, i : i + 4] for i in (0, 4, 8))
    last = xp.arange(2)[:, None] == 1
    scale = xp.where(last, (third & 0xF) | ((first >> 6) << 4), first & 63)
    minimum = xp.where(last, (third >> 4) | ((second >> 6) << 4), second & 63)
    shape = *scales.shape[:-1], 8
    return scale.reshape(shape), minimum.reshape(shape)


def weights(field: Mapping[str, Any], quants: Any, xp: Any) -> Any:
    """Returns d * scale[s] * q - dmin * min[s] for quants q (..., 8, 32), as float32 (..., 256)."""
    scale, minimum = unpack(field["scales"], xp)
    step = f16_array(field["d"]) * scale.astype(np.float32)
    low = f16_array(field["dmin"]) * minimum.astype(np.float32)
    values = step[..., None] * quants.astype(np.float32) - low[..., None]
    return values.reshape(*values.shape[:-2], 256)


class PairReader:
    """Emits reads of scale and min of sub-blocks 2 * group and 2 * group + 1 from the block header.

    The bit positions depend only on the lane. Shifts and masks are computed once, and a read is two
    shifts and two masks with no select. If `share` is passed, it is the lane's index among the
    `shares` lanes of a group. Lanes 0 and 1 then read the min of sub-block 2 * group + share, and
    the others read zero.
    """

    def __init__(
        self, k: Builder, group: Value, share: Value | None = None, shares: int = 2
    ) -> None:
        upper = group >= 2  # sub-blocks 4 to 7, whose bits are scattered
        none, two = k.const(u32, 0), k.const(u32, 2)
        shift = (group & 1) << 4
        self._shift = shift  # shift of the third word, for scales
        self._joined_shift = shift + k.select(upper, two, 0)  # shift of the first word, for scales
        self._third_mask = k.select(upper, k.const(u32, 0x0F0F), 0)
        self._joined_mask = k.select(upper, k.const(u32, 0x3030), 0x3F3F)
        step = none if share is None else (share & 1) << 3
        self._min_shift = shift + step + 4
        self._min_joined_shift = self._joined_shift + step
        width: Value | int = 0xFFFF if share is None else 0xFF
        if share is not None and shares > 2:
            width = k.select(share < 2, k.const(u32, 0xFF), 0)
        self._min_third_mask = self._third_mask & width
        self._min_joined_mask = self._joined_mask & width
        self._whole = share is None

    def read(self, words: Sequence[Value]) -> tuple[Value, list[Value]]:
        """Returns (scales of both sub-blocks in bytes 0 and 1 of a u32, [mins]).

        `words`: the header's three u32 of scales and mins.
        """
        first, second, third = words
        scales = ((third >> self._shift) & self._third_mask) | (
            (first >> self._joined_shift) & self._joined_mask
        )
        mins = ((third >> self._min_shift) & self._min_third_mask) | (
            (second >> self._min_joined_shift) & self._min_joined_mask
        )
        return scales, [mins & 0xFF, mins >> 8] if self._whole else [mins]


def minimums_of(words: Sequence[Value], group: Value) -> tuple[Value, Value]:
    """Emits the mins of sub-blocks `group` (below 4) and group + 4 from the header's three u32."""
    _, second, third = words
    shift = group << 3
    return (second >> shift) & 63, ((third >> (shift + 4)) & 0x0F) | (
        (second >> (shift + 2)) & 0x30
    )
