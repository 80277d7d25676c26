"""Policies of `jax.checkpoint`: which results are saved for the backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq

W = jq.quantize(np.random.default_rng(0).standard_normal((256, 256), np.float32) / 16, "Q4_K")
X = jnp.ones((3, 256))


def products(policy: Any) -> int:
    """Counts products in the gradient of two layers."""

    def loss(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(jq.matmul(x, W))
        return jnp.sum(x)

    return str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(X)).count(
        "packed_matmul["
    )


def test_products_are_kept() -> None:
    """Two products forward, two backward; without the policy the forward pass is recomputed."""
    saveable = jq.checkpoint_policies.products_saveable
    both = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, saveable
    )
    assert products(saveable) == products(both) == 4
    assert products(jax.checkpoint_policies.dots_saveable) > 4
