"""Argument checks that the operations share.

A message contains the argument's name, its value and the rule.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels.limits import HEAD_DIMS, LATENT_DIMS

from .. import float_types
from ..arrays import QuantizedArray
from ..arrays.indexed import IndexedArray, Packed
from ..arrays.transposed import TransposedArray
from ..float_types import PAGE_DTYPES

#: Dtypes of activations and of KV-cache pages.
FLOAT32: tuple[np.dtype, ...] = (float_types.F32.dtype,)
FLOAT_DTYPES: tuple[np.dtype, ...] = tuple(of.dtype for of in float_types.FLOATS)
MIN_PAGE_SIZE = 16
_FLOAT32_TINY, _FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def float_array(name: str, x: Any, dtypes: tuple[np.dtype, ...] = FLOAT_DTYPES) -> jax.Array:
    """Returns `x` as an array of one of `dtypes`; raises TypeError otherwise."""
    x = value(x)
    if isinstance(x, QuantizedArray):
        raise TypeError(f"{name} is a {x!r}; it must be a float array")
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is of type {type(x).__name__}; it must be a float array"
        ) from error
    if array.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {_names(dtypes)}")
    return array


def float_dtype(name: str, dtype: Any, dtypes: tuple[np.dtype, ...] = FLOAT_DTYPES) -> np.dtype:
    """Returns `dtype` as one of `dtypes`; raises TypeError otherwise."""
    try:
        checked = None if dtype is None else jnp.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        checked = None
    if checked is None or checked not in dtypes:
        shown = repr(dtype) if checked is None else checked
        raise TypeError(f"{name}={shown} must be {_names(dtypes)}")
    return checked


def page_dtype(dtype: Any, name: str = "dtype") -> np.dtype:
    """Returns `dtype` as one of PAGE_DTYPES (KV-cache pages); raises TypeError otherwise."""
    return float_dtype(name, dtype, PAGE_DTYPES)


def int32_array(name: str, x: Any) -> jax.Array:
    """Returns integers `x` as an int32 array; values beyond int32 are clamped.

    Raises TypeError if `x` does not hold integers.
    """
    array = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold integers")
    has, fits = jnp.iinfo(array.dtype), jnp.iinfo(jnp.int32)
    if has.max > fits.max:  # conversion alone would wrap, 2^32 + 3 to 3
        array = array.clip(max(has.min, fits.min), fits.max)
    return jnp.asarray(array, jnp.int32)


def value(x: Any) -> Any:
    """Returns the value of a Flax NNX variable; returns anything else unchanged."""
    return x.get_value() if hasattr(type(x), "get_value") else x


def matrix(name: str, w: Any) -> QuantizedArray:
    """Returns `w` as a QuantizedArray with two axes."""
    w = quantized(name, value(w))
    if w.ndim != 2:
        rule = "it must have two axes (n, k); select one of a stack by index=, or use jax.vmap"
        raise ValueError(f"{name} has shape {w.shape}; {rule}")
    return w


def quantized(name: str, w: Any) -> QuantizedArray:
    """Returns `w` as a QuantizedArray with any number of axes."""
    if isinstance(w, TransposedArray):
        raise TypeError(f"{name} is a transposed view, {w!r}; it must be the array itself, (n, k)")
    if not isinstance(w, QuantizedArray):
        raise TypeError(f"{name} is a {type(w).__name__}; it must be a QuantizedArray")
    if (problem := w.plane_problem()) is not None:
        raise TypeError(f"{name}: {problem}")
    return w


def weight(name: str, w: Any, index: Any = None) -> Packed | jax.Array:
    """Returns `w` as a packed or float matrix (n, k).

    With `index`, `w` is a stack of matrices (layers, n, k), and the result is matrix `index`.
    """
    w = value(w)
    if isinstance(w, IndexedArray):  # already checked
        return w
    packed = isinstance(w, (QuantizedArray, TransposedArray))
    if index is not None:
        stack = quantized(name, w) if packed else float_array(name, w)
        if stack.ndim != 3 or not stack.shape[0]:
            rule = "with index= it must have three axes (layers, n, k), and a layer"
            raise ValueError(f"{name} has shape {stack.shape}; {rule}")
        which = _layer(index, stack.shape[0])
        if isinstance(stack, QuantizedArray):
            return IndexedArray(stack, which)
        return jax.lax.dynamic_index_in_dim(stack, which, keepdims=False)
    if packed:
        return matrix(name, w)
    checked = float_array(name, w)
    if checked.ndim != 2:
        raise ValueError(f"{name} has shape {checked.shape}; it must have two axes (n, k)")
    return checked


def weights(named: dict[str, Any], index: Any) -> dict[str, Any]:
    """Applies `weight` to each matrix; with `index`, all stacks must have equally many layers."""
    checked = {name: weight(name, w, index) for name, w in named.items()}
    if index is not None:
        (first, layers), *others = ((name, value(w).shape[0]) for name, w in named.items())
        for name, count in others:
            if count != layers:
                raise ValueError(f"{name} has {count} layers; {first} has {layers}")
    return checked


def _layer(index: Any, layers: int) -> jax.Array:
    """Returns a layer's index as an int32 scalar array.

    Raises IndexError if it is out of range and known at tracing.
    """
    index = value(index)
    array = int32_array("index", index)
    if array.ndim:
        rule = "it must be a scalar; jax.vmap takes several"
        raise ValueError(f"index has shape {array.shape}; {rule}")
    if is_concrete(index) and not -layers <= int(index) < layers:
        raise IndexError(f"index={int(index)} is out of range for {layers} layers")
    return array


def float32(name: str, x: Any, expected: tuple[int, ...], rule: str) -> jax.Array:
    """Returns `x` as a float32 array of shape `expected`; raises ValueError for another shape.

    `rule` describes the shape by the names of its axes, for the message.
    """
    array = float_array(name, x)
    same_shape(name, array, expected, rule)
    return array.astype(jnp.float32)


def same_shape(name: str, array: Any, expected: tuple[int, ...], rule: str) -> None:
    """Raises ValueError unless `array.shape == expected`.

    `rule` describes the shape by the names of its axes, for the message.
    """
    if tuple(array.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {rule} = {expected}")


def epsilon(name: str, eps: Any) -> float:
    """Returns a norm's epsilon as a float; ValueError unless finite in float32 and at least 0."""
    if eps is None:
        raise ValueError(f"{name}=None must be a number if there is a norm weight")
    value = number(name, eps)
    if not 0 <= value <= _FLOAT32_MAX:
        raise ValueError(f"{name}={value} must be finite in float32 and at least 0")
    return value


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float; ValueError unless it is positive and finite in float32."""
    checked = number(name, value)
    if not _FLOAT32_TINY <= checked <= _FLOAT32_MAX:
        raise ValueError(f"{name}={checked} must be positive and finite in float32")
    return checked


def number(name: str, value: Any) -> float:
    """Returns number `value` as a Python float.

    Raises TypeError for other types, and for a value that is not known at tracing.
    """
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except OverflowError:  # an integer beyond all floats
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):  # JAX's errors for traced values are TypeErrors
        pass
    raise TypeError(f"{name} is of type {type(value).__name__}; it must be a static number")


def integer(name: str, value: Any) -> int:
    """Returns integer `value` as a Python int.

    Raises TypeError for other types, and for a value that is not known at tracing.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is of type {type(value).__name__}; it must be a static integer")


def count(name: str, value: Any) -> int:
    """Returns `value` as a Python int; raises ValueError if it is negative."""
    checked = integer(name, value)
    if checked < 0:
        raise ValueError(f"{name}={checked} must not be negative")
    return checked


def flag(name: str, value: Any) -> bool:
    """Returns True or False as a bool; raises TypeError for other types."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be True or False")
    return bool(value)


def window(value: Any) -> int | None:
    """Returns a sliding window in tokens as an int, which must be a positive int32.

    None means no window.
    """
    if value is None:
        return None
    checked = integer("window", value)
    if not 1 <= checked < 1 << 31:
        raise ValueError(f"window={checked} must be a positive int32")
    return checked


def pages(
    k_pages: Any, v_pages: Any, k_scales: Any = None, v_scales: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Checks and returns the pages of a KV cache, and their scales if they are int8.

    Pages are (num_pages, num_kv_heads, page_size, head_dim) of one of PAGE_DTYPES.
    """
    k_pages, v_pages = _keys_and_values("k_pages", k_pages, "v_pages", v_pages, _PAGE_AXES)
    _page_axes(k_pages)
    scales = _scales("k_pages", k_pages, {"k_scales": k_scales, "v_scales": v_scales})
    return k_pages, v_pages, scales["k_scales"], scales["v_scales"]


def latent_pages(
    k_pages: Any, k_scales: Any = None, v_scales: Any = None
) -> tuple[jax.Array, None, jax.Array | None, None]:
    """Checks pages of a latent cache (MLA), whose rows hold key and value; otherwise like `pages`.

    Returns None for the values' pages and scales.
    """
    k_pages = _keys("k_pages", k_pages, _PAGE_AXES, LATENT_DIMS)
    _page_axes(k_pages)
    if v_scales is not None:
        raise TypeError("v_scales belongs to v_pages, which is None")
    return k_pages, None, _scales("k_pages", k_pages, {"k_scales": k_scales})["k_scales"], None


_PAGE_AXES = "(num_pages, num_kv_heads, page_size, head_dim)"


def _page_axes(k_pages: jax.Array) -> None:
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    if num_pages < 1 or num_kv_heads < 1:
        raise ValueError(f"k_pages has shape {k_pages.shape}; no axis may be empty")
    if page_size < MIN_PAGE_SIZE or page_size % MIN_PAGE_SIZE:
        raise ValueError(f"page_size={page_size} must be a multiple of {MIN_PAGE_SIZE}")


def value_dim(value: Any, head_dim: int) -> int:
    """Returns the number of values at the start of a latent cache's row, a multiple of 32."""
    checked = integer("value_dim", value)
    if checked not in LATENT_DIMS or checked > head_dim:
        raise ValueError(
            f"value_dim={checked} must be a multiple of {LATENT_DIMS[0]}, at most "
            f"head_dim={head_dim}"
        )
    return checked


def contiguous(
    k: Any, v: Any, k_scales: Any = None, v_scales: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Checks and returns a contiguous KV cache, and its scales if it is int8.

    Keys and values are (batch, num_kv_heads, capacity, head_dim) of one of PAGE_DTYPES.
    """
    k, v = _keys_and_values("k", k, "v", v, "(batch, num_kv_heads, capacity, head_dim)")
    if k.shape[1] < 1 or k.shape[2] < 1:
        raise ValueError(f"k has shape {k.shape}; only the batch may be empty")
    scales = _scales("k", k, {"k_scales": k_scales, "v_scales": v_scales})
    return k, v, scales["k_scales"], scales["v_scales"]


def _keys_and_values(
    k_name: str, k: Any, v_name: str, v: Any, axes: str
) -> tuple[jax.Array, jax.Array]:
    k, v = _keys(k_name, k, axes, HEAD_DIMS), float_array(v_name, v, PAGE_DTYPES)
    same_shape(v_name, v, k.shape, f"the shape of {k_name}")
    if v.dtype != k.dtype:
        raise TypeError(f"{v_name} has dtype {v.dtype}; it must be that of {k_name}, {k.dtype}")
    return k, v


def _keys(name: str, k: Any, axes: str, head_dims: tuple[int, ...]) -> jax.Array:
    k = float_array(name, k, PAGE_DTYPES)
    if k.ndim != 4:
        raise ValueError(f"{name} has shape {k.shape}; it must be {axes}")
    if k.shape[-1] not in head_dims:
        raise ValueError(f"head_dim={k.shape[-1]} must be one of {', '.join(map(str, head_dims))}")
    return k


def _scales(name: str, rows: jax.Array, scales_of: dict[str, Any]) -> dict[str, jax.Array | None]:
    """Checks and returns scales by name, those of int8 keys or values `rows`.

    Each must be None if `rows` are not int8.
    """
    if rows.dtype != jnp.int8:
        for scales_name, scales in scales_of.items():
            if scales is not None:
                raise TypeError(f"{scales_name} belongs to int8 {name}, which is {rows.dtype}")
        return scales_of
    for scales_name, scales in scales_of.items():
        if scales is None:
            raise TypeError(f"int8 {name} needs {scales_name}, float32 of shape {rows.shape[:3]}")
        scales_of[scales_name] = checked = float_array(scales_name, scales, FLOAT32)
        same_shape(scales_name, checked, rows.shape[:3], f"the shape of {name} without head_dim")
    return scales_of


def query(q: Any, axis: str, count: int | None, head_dim: int) -> jax.Array:
    """Checks and returns queries: a float array (count, num_heads, head_dim).

    A `count` of None allows any. `axis` names the first axis in messages.
    """
    q = float_array("q", q)
    _heads_of_queries(q, q.shape, axis, count, head_dim)
    return q


def queries(q: Any, head_dim: int) -> jax.Array:
    """Checks and returns queries.

    They are floats (batch, num_heads, head_dim) or (batch, time, num_heads, head_dim).
    """
    q = float_array("q", q)
    of_tokens = q.shape if q.ndim != 4 else (q.shape[0], *q.shape[2:])
    _heads_of_queries(q, of_tokens, "batch", None, head_dim)
    return q


def _heads_of_queries(
    q: jax.Array, shape: tuple[int, ...], axis: str, count: int | None, head_dim: int
) -> None:
    """Raises ValueError unless `shape` is (count, num_heads, head_dim).

    `shape` is q's shape without the time axis. `axis` names the first axis in messages, and `count`
    is its size; None allows any.
    """
    if len(shape) != 3 or shape[-1] != head_dim or count not in (None, shape[0]):
        first = axis if count is None else f"{axis}={count}"
        raise ValueError(
            f"q has shape {q.shape}; it must be ({first}, num_heads, head_dim={head_dim})"
        )
    if shape[1] < 1:
        raise ValueError(f"q has shape {q.shape}; num_heads=0 must be positive")


def v_heads(num_v_heads: int, num_k_heads: int) -> int:
    """Returns num_v_heads; ValueError unless a multiple of num_k_heads (of a gated delta net)."""
    if num_v_heads < 1 or num_v_heads % num_k_heads:
        raise ValueError(
            f"num_v_heads={num_v_heads} must be a multiple of num_k_heads={num_k_heads}"
        )
    return num_v_heads


def sinks(logits: Any, num_heads: int) -> jax.Array | None:
    """Returns attention sinks as float32 (num_heads,), None if absent."""
    if logits is None:
        return None
    logits = float_array("sinks", logits).astype(jnp.float32)
    same_shape("sinks", logits, (num_heads,), "(num_heads,)")
    return logits


def new_tokens(
    rows: dict[str, Any], slot_mapping: Any, pages: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """Checks the new tokens' keys and values (`rows`, by name) and their slots in the pages.

    Returns keys and values as float32 (tokens, num_kv_heads, head_dim), slots as int32 (tokens,) or
    (groups, tokens / groups).
    """
    slot_mapping = slots(slot_mapping, pages)
    expected = (slot_mapping.size, pages.shape[1], pages.shape[3])
    rule = "(tokens, num_kv_heads, head_dim)"
    return [float32(name, x, expected, rule) for name, x in rows.items()], slot_mapping


def slots(slot_mapping: Any, pages: jax.Array) -> jax.Array:
    """Returns the new tokens' slots as int32 (tokens,) or (groups, tokens / groups)."""
    slot_mapping = int32_array("slot_mapping", slot_mapping)
    if slot_mapping.ndim not in (1, 2):
        shapes = "(tokens,) or (groups, tokens / groups)"
        raise ValueError(f"slot_mapping has shape {slot_mapping.shape}; it must be {shapes}")
    if slot_mapping.ndim == 2:
        page_groups("slot_mapping", slot_mapping, pages)
    return slot_mapping


def page_groups(name: str, ids: jax.Array, pages: jax.Array) -> int:
    """Returns the number of groups of ids (groups, ...); it must divide the number of pages."""
    groups = ids.shape[0]
    if not groups or pages.shape[0] % groups:
        raise ValueError(
            f"{name} has shape {ids.shape}; num_pages={pages.shape[0]} must be a multiple of its "
            "groups"
        )
    return groups


def is_concrete(*arrays: Any) -> bool:
    """Returns whether all arrays have values that Python can read, so none is a tracer."""
    return not any(isinstance(a, jax.core.Tracer) for a in arrays)


def _names(dtypes: tuple[np.dtype, ...]) -> str:
    return ("one of " if len(dtypes) > 1 else "") + ", ".join(str(d) for d in dtypes)
