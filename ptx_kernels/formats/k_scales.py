"""The 12 bytes of eight 6-bit (scale, min) pairs that Q4_K and Q5_K share.

Source: ggml, `get_scale_min_k4`. With s the 12 bytes, sub-blocks 0 to 3 lie in the low six bits of
s[j] (scale) and s[4 + j] (min); sub-block 4 + j has its low four bits in the nibbles of s[8 + j] and
its high two in the top bits of s[j] (scale) and s[4 + j] (min).
"""

from __future__ import annotations

from typing import Any


def unpack(scales: Any, xp: Any) -> tuple[Any, Any]:
    """uint8 (..., 12) -> scales and mins, each uint8 (..., 8) with values 0 to 63."""
    first, second, third = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = xp.concatenate([first & 63, (third & 0xF) | ((first >> 6) << 4)], axis=-1)
    minimum = xp.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scale, minimum
