"""Converts tensors and metadata of legacy GGUF files to the current layout.

DeepSeek's `attn_kv_b` holds, for each head, the transposed `attn_k_b` and then `attn_v_b`.
Qwen3-Next's `ssm_in` holds, for each key head, rows of queries, keys and values (`attn_qkv`) and
then rows of gates (`attn_gate`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from gguf.constants import GGMLQuantizationType

from jax_q4k import GGUFError, QuantizedArray, gguf

from ..config import Config, attention_fields
from ..config.tensors import expected_tensors, float_array

_NAME = re.compile(r"(blk\.\d+\.)(attn_kv_b|ssm_in)\.weight")

#: Function from a legacy tensor to a current one.
Part: TypeAlias = Callable[[Any], Any]


def parts_of(config: Config, name: str) -> dict[str, Part]:
    """Returns the current tensors that a legacy tensor holds, by name, with their extractors.

    {} if the tensor is not legacy.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return {}
    layer, short = match.groups()
    if short == "attn_kv_b" and config.latent is not None:
        parts = {"attn_k_b": _key, "attn_v_b": _value}
    elif short == "ssm_in" and config.delta is not None:
        parts = {"attn_qkv": _qkv, "attn_gate": _gate}
    else:
        return {}
    return {f"{layer}{part}.weight": functools.partial(f, config) for part, f in parts.items()}


def described(
    config: Config, tensors: Mapping[str, gguf.TensorInfo], file: str
) -> dict[str, gguf.TensorInfo]:
    """Returns a file's tensors with current names, types and shapes; their offsets are invalid.

    Raises GGUFError if a legacy tensor has another shape, or the file also holds a part of it.
    """
    expected, found = expected_tensors(config), {}
    for name, info in tensors.items():
        parts = parts_of(config, name)
        if not parts:
            found[name] = info
            continue
        if present := [part for part in parts if part in tensors]:
            raise GGUFError(file, f"tensor {name!r}", f"is present in addition to {present[0]!r}")
        if not all(part in expected for part in parts):  # in a layer of another kind
            raise GGUFError(file, f"tensor {name!r}", "is not part of this layer")
        if info.shape != (full := _fused_shape(config, name)):
            problem = f"has shape {info.shape}, expected {full}"
            raise GGUFError(file, f"tensor {name!r}", problem)
        for part in parts:
            turned = part.endswith("attn_k_b.weight") and info.type.name not in gguf.PLAIN
            kind = GGMLQuantizationType.F32 if turned else info.type
            shape = expected[part].shape
            found[part] = dataclasses.replace(info, name=part, shape=shape, type=kind)
    return found


def current_tensors(config: Config, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Converts legacy tensors to current ones; returns all tensors by their current names.

    A packed `attn_k_b` becomes float32, because its blocks run along the other axis.
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = parts_of(config, name)
        found |= {part: take(tensor) for part, take in parts.items()} if parts else {name: tensor}
    return found


def current_metadata(config: Config, metadata: Mapping[str, Any]) -> gguf.Metadata:
    """Returns metadata with legacy keys of attention heads replaced by the current ones."""
    found, prefix = gguf.Metadata(metadata), metadata["general.architecture"]
    if config.latent is not None and f"{prefix}.{attention_fields.LATENT_KEY}" not in found:
        for key, value in attention_fields.write(config).items():
            found[f"{prefix}.{key}"] = value
    return found


def _fused_shape(config: Config, name: str) -> tuple[int, int]:
    """Returns the shape of a legacy tensor."""
    if config.latent is not None:
        of_head = config.head_dim - config.rope_dim + config.latent.value_dim
        return config.num_heads * of_head, config.latent.rank
    assert config.delta is not None, name
    return config.delta.channels + config.delta.values, config.hidden_size


def _rows(tensor: Any, heads: int, take: Callable[[Any], Any]) -> Any:
    """Applies `take` to the tensor, or each of its planes, as (heads, rows of a head, ...)."""

    def of_array(array: Any) -> jax.Array:
        return take(jnp.asarray(array).reshape(heads, -1, *array.shape[1:]))

    if not isinstance(tensor, QuantizedArray):
        return of_array(tensor)
    planes = [of_array(plane) for plane in tensor.planes]
    # Planes are (rows ..., blocks, bytes of a block); the number of columns does not change.
    return QuantizedArray(tensor.format, (*planes[0].shape[:-2], tensor.shape[-1]), planes)


def _key(config: Config, fused: Any) -> jax.Array:
    part = config.head_dim - config.rope_dim
    key = _rows(fused, config.num_heads, lambda x: x[:, :part])
    return jnp.swapaxes(float_array(key) if isinstance(key, QuantizedArray) else key, 1, 2)


def _value(config: Config, fused: Any) -> Any:
    part = config.head_dim - config.rope_dim
    return _rows(fused, config.num_heads, lambda x: x[:, part:])


def _qkv(config: Config, fused: Any) -> Any:
    delta = config.delta
    assert delta is not None
    dim, ends = delta.head_dim, 2 * delta.head_dim + delta.values // delta.key_heads

    def take(x: jax.Array) -> jax.Array:
        parts = x[:, :dim], x[:, dim : 2 * dim], x[:, 2 * dim : ends]
        return jnp.concatenate([part.reshape(-1, *x.shape[2:]) for part in parts])

    return _rows(fused, delta.key_heads, take)


def _gate(config: Config, fused: Any) -> Any:
    delta = config.delta
    assert delta is not None
    rows = delta.values // delta.key_heads
    return _rows(fused, delta.key_heads, lambda x: x[:, -rows:].reshape(-1, *x.shape[2:]))
