"""Decodes FP8 checkpoints of transformers and FBGEMM: `weight`, and a scale whose name begins so.

Sources: transformers' integrations/finegrained_fp8.py and integrations/fbgemm_fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....support.json_fields import JSONFields
from ..safetensors import Weights
from .base import PackedTensor, beside
from .scaled import scaled

FLOAT8 = ("F8_E4M3", "F8_E5M2")


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the FP8 weights; `weight_scale_inv` is the factor of the stored numbers."""
    block = block_of(settings, "weight_block_size")
    for name in [name for name, stored in weights.stored.items() if stored.dtype in FLOAT8]:
        older = f"{name}_scale"
        scale = older if older in weights.stored else f"{name}_scale_inv"
        further = beside(weights, name.rpartition(".")[0])
        yield scaled(weights, name, scale, block=block, further=further)


def block_of(settings: JSONFields, key: str) -> tuple[int, int] | None:
    """Returns the (rows, columns) of weights with one scale that a key gives; None if missing."""
    sizes = settings.array(key, None)
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        settings.fail(key, f"is {sizes!r:.100}, expected two positive integers")
    return sizes[0], sizes[1]
