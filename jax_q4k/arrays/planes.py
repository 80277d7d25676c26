"""Packed weights from their planes by name, as checkpoints without a target give them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ptx_kernels import formats

from .quantized_array import QuantizedArray


def from_planes(tree: Any) -> Any:
    """The same tree with a QuantizedArray for each mapping of planes by name, such as {"block": b}.

    Names and widths of uint8 planes (..., n, k / block, bytes) tell the format. A checkpoint that
    is restored without a target holds packed weights as such mappings; other mappings, and what is
    no mapping, stay. Planes may be anything with a shape and a dtype, such as ShapeDtypeStructs.
    """
    return jax.tree.map(_packed, tree, is_leaf=lambda node: _format(node) is not None)


@functools.cache
def _formats() -> dict[frozenset[tuple[str, int]], str]:
    """(name, bytes per block) of all planes -> format: no two formats have the same."""
    return {
        frozenset((plane.name, plane.bytes_per_block) for plane in formats.get(name).planes): name
        for name in formats.names()
    }


def _format(node: Any) -> str | None:
    """The format that a mapping holds the planes of; None: it is something else."""
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
