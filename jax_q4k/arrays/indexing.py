"""Checks NumPy indices of packed arrays, which can be indexed along all axes but the last."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def leading(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Checks `index` for an array of this shape; returns the index of all axes but the last.

    Accepts integers, slices, integer arrays, None (a new axis) and one Ellipsis; the last axis
    accepts only `:`. Raises IndexError for too many indices and for an index out of range,
    TypeError for other types.
    """
    parts = index if isinstance(index, tuple) else (index,)
    checked: list[Any] = []
    axis, last = 0, len(shape) - 1
    for part in _without_ellipsis(parts, shape):
        if axis > last or (axis == last and not _is_all(part)):
            raise IndexError(f"index {part!r} for shape {shape}: the last axis, {last}, is packed")
        if part is None:
            checked.append(None)
            continue
        if axis < last:
            checked.append(_checked(part, axis, shape[axis]))
        axis += 1
    return tuple(checked)


def _without_ellipsis(parts: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the index with its Ellipsis replaced by full slices."""
    where = [i for i, part in enumerate(parts) if part is Ellipsis]
    indexed = sum(part is not None and part is not Ellipsis for part in parts)
    if len(where) > 1:
        raise IndexError(f"an index can have one Ellipsis, not {len(where)}")
    if indexed > len(shape):
        raise IndexError(f"{indexed} indices for shape {shape}, which has {len(shape)} axes")
    if not where:
        return parts
    (at,) = where
    return (*parts[:at], *[slice(None)] * (len(shape) - indexed), *parts[at + 1 :])


def _is_all(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _checked(part: Any, axis: int, size: int) -> Any:
    if isinstance(part, slice):
        return part
    if isinstance(part, (int, np.integer)) and not isinstance(part, bool):
        if not -size <= part < size:  # jax.numpy would clamp
            raise IndexError(f"index {part} is out of range for axis {axis} of size {size}")
        return int(part)
    values = part if isinstance(part, jax.core.Tracer) else np.asarray(part)
    if not np.issubdtype(values.dtype, np.integer):
        shown = repr(part) if values.ndim == 0 else f"of dtype {values.dtype}"
        raise TypeError(
            f"index {shown} of axis {axis} must be an integer, a slice or an integer array"
        )
    if isinstance(values, np.ndarray) and ((values < -size) | (values >= size)).any():
        raise IndexError(
            f"an index of axis {axis} is out of range for size {size}: "
            f"{values.min()} to {values.max()}"
        )
    return part
