"""Builds QuantizedArrays from mappings of plane names to arrays, as restored from checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ptx_kernels import formats

from .quantized_array import QuantizedArray


def from_planes(tree: Any) -> Any:
    """Replaces each mapping of planes by name, such as {"block": b}, by a QuantizedArray.

    A checkpoint restored without a target holds packed weights as such mappings. The names and
    widths of the uint8 planes (..., n, k / block, bytes) determine the format. Other mappings and
    leaves stay as they are. Planes may be anything with a shape and a dtype, such as
    ShapeDtypeStructs.
    """
    return jax.tree.map(_packed, tree, is_leaf=lambda node: _format(node) is not None)


@functools.cache
def _formats() -> dict[frozenset[tuple[str, int]], str]:
    """Maps each format's set of planes (name, bytes per block) to the format's name.

    No two formats have the same set.
    """
    return {
        frozenset((plane.name, plane.bytes_per_block) for plane in formats.get(name).planes): name
        for name in formats.names()
    }


def _format(node: Any) -> str | None:
    """Returns the name of the format whose planes a mapping holds; None for any other node."""
    if not isinstance(node, Mapping) or not node:
        return None
    leading = set()
    for data in node.values():
        shape = getattr(data, "shape", None)
        if shape is None or len(shape) < 2 or getattr(data, "dtype", None) != np.uint8:
            return None
        leading.add(tuple(shape[:-1]))
    if len(leading) != 1:
        return None
    return _formats().get(frozenset((name, data.shape[-1]) for name, data in node.items()))


def _packed(node: Any) -> Any:
    name = _format(node)
    if name is None:
        return node
    block = formats.get(name)
    planes = [node[plane.name] for plane in block.planes]
    *leading, blocks, _ = planes[0].shape
    return QuantizedArray(name, (*leading, blocks * block.block_size), planes)
