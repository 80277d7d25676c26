"""Reads and writes the token mixer of each layer in GGUF metadata."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from jax_q4k.gguf import Fields

from ..architectures.base import Architecture, MixerKind

MAX_WIDTH = 64  # tokens of a convolution; far above any real model
# Limits for gated delta nets, whose state grows with the square of a head's size; tensors in the
# file do not bound it.
_MAX_HEADS, _MAX_HEAD_DIM = 4096, 512

_INTERVAL, _RECURRENT = "full_attention_interval", "attention.recurrent_layers"
_WIDTH, _CACHE = "ssm.conv_kernel", "shortconv.l_cache"


class Delta(NamedTuple):
    """Sizes of a gated delta net; see `jax_q4k.gated_delta_rule`."""

    key_heads: int
    value_heads: int
    head_dim: int  # of queries and keys
    width: int  # tokens that its convolution sees
    value_dim: int  # of values

    @property
    def keys(self) -> int:
        """Total elements of a token's keys, over all heads."""
        return self.key_heads * self.head_dim

    @property
    def values(self) -> int:
        """Total elements of a token's values, over all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution, over queries, keys and values."""
        return 2 * self.keys + self.values


def read(
    get: Fields,
    kind: Architecture,
    layers: int,
    blocks: int,
    kv_heads: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Returns the mixer fields of `Config`; raises GGUFError that names the invalid key.

    blocks: number of layers in the file. kv_heads: number of KV heads per layer; None if equal.
    """
    if kind.convolution:
        mixers: tuple[MixerKind, ...] = tuple(
            "attention" if count else "convolution" for count in kv_heads or (1,) * layers
        )
        width = get.integer(_CACHE, least=1, most=MAX_WIDTH)
        return {"mixers": mixers, "convolution_width": width}
    if kind.delta:
        return {"mixers": _delta_layers(get, layers, blocks), "delta": _delta(get)}
    return {}


def _delta_layers(get: Fields, layers: int, blocks: int) -> tuple[MixerKind, ...]:
    flags = get.value(_RECURRENT, None)
    if flags is None:
        interval = get.integer(_INTERVAL, 4, least=1, most=1 << 20)
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    else:
        if not isinstance(flags, np.ndarray) or flags.dtype != bool or flags.shape != (blocks,):
            get.fail(_RECURRENT, f"must hold a boolean for each of {blocks} layers")
        recurrent = flags[:layers].tolist()
    if all(recurrent):
        # The pages of attention layers define the capacity of the KV cache.
        problem = f"leaves none of {layers} layers with attention, which is not supported"
        get.fail(_INTERVAL if flags is None else _RECURRENT, problem)
    return tuple("delta" if delta else "attention" for delta in recurrent)


def _delta(get: Fields) -> Delta:
    count = functools.partial(get.integer, least=1, most=_MAX_HEADS)
    keys, values = "ssm.group_count", "ssm.time_step_rank"
    key_heads, value_heads = count(keys), count(values)
    head_dim = get.integer("ssm.state_size", least=1, most=_MAX_HEAD_DIM)
    if value_heads % key_heads:
        get.fail(values, f"{value_heads} must be a multiple of {keys}={key_heads}")
    most = _MAX_HEAD_DIM * value_heads
    inner = get.integer("ssm.inner_size", head_dim * value_heads, least=1, most=most)
    if inner % value_heads:
        get.fail("ssm.inner_size", f"{inner} must be a multiple of {values}={value_heads}")
    width = get.integer(_WIDTH, least=1, most=MAX_WIDTH)
    return Delta(key_heads, value_heads, head_dim, width, inner // value_heads)


def write(config: Any) -> dict[str, Any]:
    """Returns metadata of the mixer fields, the inverse of `read`; keys have no prefix."""
    if config.convolution_width:
        return {_CACHE: config.convolution_width}
    if (delta := config.delta) is None:
        return {}
    layers = [config.mixer_of(i) == "delta" for i in range(config.num_layers)]
    attention = [i + 1 for i, recurrent in enumerate(layers) if not recurrent]
    interval = attention[0] if attention else len(layers) + 1
    regular = layers == [(i + 1) % interval != 0 for i in range(len(layers))]
    return {
        (_INTERVAL if regular else _RECURRENT): interval if regular else np.array(layers),
        _WIDTH: delta.width,
        "ssm.state_size": delta.head_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.values,
    }
