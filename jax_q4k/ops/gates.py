"""Activation functions of gated feed-forward networks, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

#: Upper limit of `swiglu_oai`'s gate, and limit of the magnitude of up.
LIMIT = 7.0


def silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU: gate * sigmoid(gate) * up."""
    return jax.nn.silu(gate) * up


def gelu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """GEGLU: GELU(gate) * up, approximated by tanh (https://arxiv.org/abs/1606.08415)."""
    return jax.nn.gelu(gate, approximate=True) * up


def swiglu_oai(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gpt-oss's SwiGLU: g * sigmoid(1.702 g) * (clip(up, -7, 7) + 1), g = min(gate, 7)."""
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


#: Name -> function of gate and up, which have the same shape.
ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": silu,
    "gelu": gelu,
    "swiglu_oai": swiglu_oai,
}


def check_activation(activation: Any) -> None:
    """Raises ValueError for a name that is not in ACTIVATION_FUNCTIONS."""
    if not isinstance(activation, str) or activation not in ACTIVATION_FUNCTIONS:
        known = ", ".join(ACTIVATION_FUNCTIONS)
        raise ValueError(f"activation={activation!r} must be one of {known}")
