"""Decodes MXFP4 experts as gpt-oss is released: `NAME_blocks` with `NAME_scales`.

Source: `convert_moe_packed_tensors` of transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....support.json_fields import JSONFields
from ..safetensors import Weights
from .base import PackedTensor
from .fp4 import fp4


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the stacks of experts' matrices."""
    for codes in [name for name in weights.stored if name.endswith("_blocks")]:
        name = codes.removesuffix("_blocks")
        yield fp4(weights, name, "MXFP4", codes, f"{name}_scales")
