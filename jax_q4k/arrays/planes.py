"""Builds QuantizedArrays from mappings of plane names to arrays, as restored from checkpoints."""

from __future__ import annotations

from typing import Any

import jax

from ptx_kernels import formats

from .plane_names import format_of
from .quantized_array import QuantizedArray


def from_planes(tree: Any) -> Any:
    """Replaces each mapping of planes by name, such as {"block": b}, by a QuantizedArray.

    A checkpoint restored without a target holds packed weights as such mappings. The names and
    widths of the uint8 planes (..., n, k / block, bytes) determine the format. Other mappings and
    leaves stay as they are. Planes may be anything with a shape and a dtype, such as
    ShapeDtypeStructs.
    """
    return jax.tree.map(_packed, tree, is_leaf=lambda node: format_of(node) is not None)


def _packed(node: Any) -> Any:
    name = format_of(node)
    if name is None:
        return node
    block = formats.get(name)
    planes = [node[plane.name] for plane in block.planes]
    *leading, blocks, _ = planes[0].shape
    return QuantizedArray(name, (*leading, blocks * block.block_size), planes)
