"""ggml's block formats, one module each: byte layout, planes, decoder.

Block formats are looked up by ggml's name: `get("Q4_K")`. F32, F16 and BF16 tensors have no blocks
and are not listed here.
"""

from __future__ import annotations

from . import q4_0, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from .base import BlockFormat, Plane

_FORMATS = {
    module.FORMAT.name: module.FORMAT for module in (q4_0, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k)
}

__all__ = ["BlockFormat", "Plane", "get", "names"]


def names() -> tuple[str, ...]:
    """The names of all block formats: ("Q4_0", ...)."""
    return tuple(_FORMATS)


def get(name: str) -> BlockFormat:
    """The block format of that name; ValueError listing the known ones otherwise."""
    try:
        return _FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"format={name!r} must be one of {', '.join(_FORMATS)}") from None
