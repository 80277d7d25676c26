"""Finds the format of planes by their names and widths."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ptx_kernels import formats


@functools.cache
def _formats() -> dict[frozenset[tuple[str, int]], str]:
    """Maps each format's set of planes (name, bytes per block) to the format's name.

    No two formats have the same set.
    """
    return {
        frozenset((plane.name, plane.bytes_per_block) for plane in formats.get(name).planes): name
        for name in formats.names()
    }


def format_of(node: Any) -> str | None:
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
