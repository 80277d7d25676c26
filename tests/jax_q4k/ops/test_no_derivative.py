"""Differentiating through an operation without a derivative raises an error that names it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq

from .random_weights import random_weights

NEW = jnp.ones((2, 1, 32))  # (tokens or batch, heads, head_dim)
PAGES = jnp.zeros((2, 1, 16, 32))
SLOTS, LENGTHS, TABLES = jnp.arange(2), jnp.array([3, 4]), jnp.array([[0], [1]])
ANGLES = jnp.ones((2, 16))
W = random_weights("Q8_0", 32, 32)

#: Name in the error -> function from a float array through the operation to a float.
CALLS = {
    "paged_attention": (
        "paged_attention",
        lambda x: jq.paged_attention(x, PAGES, PAGES, TABLES, LENGTHS).sum(),
    ),
    "paged_attention-pages": (
        "paged_attention",
        lambda x: jq.paged_attention(NEW, PAGES + x.sum(), PAGES, TABLES, LENGTHS).sum(),
    ),
    "paged_attention_matmul": (
        "paged_attention_matmul",
        lambda x: jq.paged_attention_matmul(
            x, PAGES, PAGES, TABLES, LENGTHS, random_weights("Q8_0", 3, 32)
        ).sum(),
    ),
    "gated_delta_step": (
        "gated_delta_step",
        lambda x: jq.gated_delta_step(
            *(x[:, 0, :12], x[:, 0, :4], x[:, 0, :1], x[:, 0, :1]),
            *(jnp.zeros((2, 2, 12)), jnp.zeros((2, 1, 4, 4)), SLOTS),
            **{"conv_weight": jnp.ones((12, 2)), "dt_bias": jnp.ones(1), "decay": -jnp.ones(1)},
            **{"norm_weight": jnp.ones(4), "eps": 1e-6},
        )[0].sum(),
    ),
    "paged_attention-latent": (
        "paged_attention",
        lambda x: jq.paged_attention(x, PAGES, None, TABLES, LENGTHS, value_dim=32).sum(),
    ),
    "attention": ("paged_attention", lambda x: jq.attention(x, PAGES, PAGES, LENGTHS).sum()),
    "append_kv": ("append_kv", lambda x: jq.append_kv(PAGES, PAGES, x, NEW, SLOTS)[0].sum()),
    "append_kv-latent": (
        "append_kv",
        lambda x: jq.append_kv(PAGES, None, x, None, SLOTS)[0].sum(),
    ),
    "rope_append": (
        "rope_append",
        lambda x: jq.rope_append(
            x, NEW, NEW, PAGES, PAGES, SLOTS, ANGLES, ANGLES, interleaved=True
        )[0].sum(),
    ),
    "qkv_rope_append": (
        "qkv_rope_append",
        lambda x: jq.qkv_rope_append(
            x[:, 0], [W] * 3, PAGES, PAGES, SLOTS, ANGLES, ANGLES, interleaved=True
        )[0].sum(),
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    "transform", [jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))], ids=["grad", "jvp", "jit"]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_derivative_is_refused_by_name(call, transform):
    name, function = CALLS[call]
    with pytest.raises(NotImplementedError, match=f"{name} has no derivative"):
        transform(function)(NEW)


@pytest.mark.parametrize("call", CALLS)
def test_gradients_may_be_kept_out(call):
    _, function = CALLS[call]
    gradient = jax.grad(lambda x: (2 * x).sum() + function(jax.lax.stop_gradient(x)))(NEW)
    np.testing.assert_array_equal(gradient, np.full(NEW.shape, 2.0))
