"""Shapes that an operation states, instead of tracing its reference, are the reference's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k.ops.op import OPS

from .random_weights import random_weights

W, DOWN = random_weights("Q4_K", 256, 256), random_weights("Q6_K", 24, 256)
X, NORM = jnp.ones((3, 256)), jnp.ones(256)
Q, PAGES = jnp.ones((3, 8, 32)), jnp.ones((4, 2, 16, 32), jnp.bfloat16)
INT8 = PAGES.astype(jnp.int8), PAGES.astype(jnp.int8)
SCALES = dict(zip(("k_scales", "v_scales"), [jnp.ones((4, 2, 16))] * 2, strict=True))
SLOTS, TABLES = jnp.arange(3), jnp.zeros((3, 1), jnp.int32)
ATTENTION = Q, PAGES, PAGES, TABLES, jnp.ones(3, jnp.int32)

CALLS = {
    "linear": lambda: jq.qkv_matmul(X, (W, DOWN), norm_weight=NORM, eps=1e-5),
    "gated": lambda: jq.gated_matmul(X.astype(jnp.bfloat16), W, W),
    "mlp": lambda: jq.mlp(X, W, W, DOWN),
    "rope_append": lambda: jq.rope_append(
        Q, Q[:, :2], Q[:, :2], *INT8, SLOTS, Q[:, 0, :8], Q[:, 0, :8], interleaved=True, **SCALES
    ),
    "append_kv": lambda: jq.append_kv(PAGES, PAGES, Q[:, :2], Q[:, :2], SLOTS),
    "paged_attention": lambda: jq.paged_attention(*ATTENTION),
    "paged_attention_matmul": lambda: jq.paged_attention_matmul(*ATTENTION, W),
    "embedding": lambda: jq.embedding(SLOTS, W, jnp.float16),
}


@pytest.mark.parametrize("name", CALLS)
def test_are_the_references(name):
    equations = jax.make_jaxpr(CALLS[name])().jaxpr.eqns
    (equation,) = (e for e in equations if e.primitive in OPS)
    op, params = OPS[equation.primitive], dict(equation.params)
    tree, _ = params.pop("tree"), params.pop("implementation")
    leaves = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    found = jax.eval_shape(
        functools.partial(op.reference, **params), *jax.tree.unflatten(tree, leaves)
    )
    want = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found)]
    assert [(v.aval.shape, v.aval.dtype) for v in equation.outvars] == want
