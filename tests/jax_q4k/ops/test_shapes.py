"""The shapes that an operation declares equal those from tracing its reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k.ops.draw import DrawParameters, draw
from jax_q4k.ops.op import OPS
from jax_q4k.ops.prefetch import without_prefetch

from .random_weights import random_weights

W, DOWN = random_weights("Q4_K", 256, 256), random_weights("Q6_K", 24, 256)
DOWN2 = random_weights("Q6_K", 64, 256)
X, NORM = jnp.ones((3, 256)), jnp.ones(256)
Q, PAGES = jnp.ones((3, 8, 32)), jnp.ones((4, 2, 16, 32), jnp.bfloat16)
LATENT = jnp.ones((4, 1, 16, 64), jnp.bfloat16)
INT8 = PAGES.astype(jnp.int8), PAGES.astype(jnp.int8)
SCALES = dict(zip(("k_scales", "v_scales"), [jnp.ones((4, 2, 16))] * 2, strict=True))
CHOSEN = jnp.zeros((3, 1), jnp.int32)
SLOTS, TABLES = jnp.arange(3), jnp.zeros((3, 1), jnp.int32)
DRAWS = jnp.ones(3), SLOTS, jnp.ones(3), jnp.ones(3)  # temperature, top_k, top_p, min_p
ATTENTION = Q, PAGES, PAGES, TABLES, jnp.ones(3, jnp.int32)

HALF = X.astype(jnp.bfloat16)
PROMPT = jnp.ones((2, 5, 4, 32))
GATES, STATE = jnp.ones((2, 5, 4)), jnp.ones((2, 4, 32, 16))


def passed_back():
    """A product and its transpose."""
    y, back = jax.vjp(lambda x: jq.matmul(x, DOWN), HALF)
    return back(y)


CALLS = {
    "rms_norm": lambda: jq.rms_norm(HALF, NORM, eps=1e-5),
    "rotate": lambda: jq.rotate(Q, Q[:, 0, :8], Q[:, 0, :8], interleaved=False),
    "causal_attention": lambda: jq.causal_attention(
        PROMPT, PROMPT[:, :, :2], PROMPT[:, :, :2], jnp.array([5, 3])
    ),
    "gated_delta_rule": lambda: jq.gated_delta_rule(
        PROMPT[:, :, :2], PROMPT[:, :, :2], PROMPT[..., :16], -GATES, GATES, STATE
    ),
    "gated_delta_rule in chunks": lambda: jq.gated_delta_rule(
        *(jnp.tile(x, (1, 20, 1, 1)) for x in (PROMPT[:, :, :2], PROMPT[:, :, :2])),
        jnp.tile(PROMPT[..., :16], (1, 20, 1, 1)),
        *(jnp.tile(x, (1, 20, 1)) for x in (-GATES, GATES)),
        STATE,
    ),
    "gated_delta_step": lambda: jq.gated_delta_step(
        *(jnp.ones((2, n)) for n in (192, 64, 4, 4)),
        *(jnp.ones((2, 3, 192)), STATE, jnp.array([0, -1])),
        **{"conv_weight": jnp.ones((192, 3)), "dt_bias": jnp.ones(4), "decay": -jnp.ones(4)},
        **{"norm_weight": jnp.ones(16), "eps": 1e-6},
    ),
    "packed_matmul": lambda: jq.matmul(HALF, DOWN),
    "transposed": passed_back,
    "stack": lambda: jq.matmul(HALF, DOWN[None], index=0),
    "linear of a stack": lambda: jq.matmul(X, W[None], index=0, bias=NORM),
    "float_matmul": lambda: jq.matmul(HALF, jnp.ones((24, 256))),
    "dequantize": lambda: jq.dequantize(DOWN, jnp.float16),
    "quantize": lambda: jq.quantize(HALF * 2, "Q6_K"),
    "quantize with an importance": lambda: jq.quantize(HALF * 2, "Q8_0", NORM),
    "quantize_q8_1": lambda: jq.quantize_q8_1(HALF),
    "argmax": lambda: jq.argmax(HALF),
    "top_k": lambda: jq.top_k(HALF, 7),
    "draw": lambda: draw(X, DrawParameters(SLOTS.astype(jnp.uint32), *DRAWS, SLOTS)),
    "float_embedding": lambda: jq.embedding(SLOTS, X, jnp.float16),
    "linear": lambda: jq.qkv_matmul(X, (W, DOWN), norm_weight=NORM, eps=1e-5),
    "gated": lambda: jq.gated_matmul(X.astype(jnp.bfloat16), W, W),
    "mlp": lambda: jq.mlp(X, W, W, DOWN),
    "route": lambda: jq.route(HALF, 3),
    "expert_matmul": lambda: jq.expert_matmul(HALF, W[None], CHOSEN),
    "expert_matmul of rows": lambda: jq.expert_matmul(X[:, None], DOWN[None], CHOSEN),
    "expert_mlp": lambda: jq.expert_mlp(X, W[None], W[None], DOWN[None], CHOSEN, X[:, :1]),
    "routed_mlp": lambda: jq.routed_mlp(X, X[:, :1], W[None], W[None], DOWN[None], 1),
    "router": lambda: jq.rms_norm_matmul(HALF, NORM, jnp.ones((24, 256)), eps=1e-5),
    "rope_append": lambda: jq.rope_append(
        Q, Q[:, :2], Q[:, :2], *INT8, SLOTS, Q[:, 0, :8], Q[:, 0, :8], interleaved=True, **SCALES
    ),
    "rope_append with keys": lambda: jq.rope_append(
        *[Q, Q[:, :2], Q[:, :2], PAGES, PAGES, SLOTS, Q[:, 0, :8], Q[:, 0, :8]],
        interleaved=True,
        return_keys=True,
    ),
    "qkv_rope_append": lambda: jq.qkv_rope_append(
        X, (W, DOWN2, DOWN2), PAGES, PAGES, SLOTS, Q[:, 0, :8], Q[:, 0, :8], interleaved=True
    ),
    "causal_attention of other values": lambda: jq.causal_attention(
        PROMPT, PROMPT[:, :, :2], PROMPT[:, :, :2, :24], jnp.array([5, 3])
    ),
    "append_kv": lambda: jq.append_kv(PAGES, PAGES, Q[:, :2], Q[:, :2], SLOTS),
    "append_kv of latent pages": lambda: jq.append_kv(
        INT8[0], None, Q[:, :2], None, SLOTS, k_scales=SCALES["k_scales"]
    ),
    "paged_attention of latent pages": lambda: jq.paged_attention(
        jnp.ones((3, 8, 64)), LATENT, None, *ATTENTION[3:], value_dim=32
    ),
    "paged_attention": lambda: jq.paged_attention(*ATTENTION),
    "paged_attention of pieces": lambda: jq.paged_attention(Q[:, None], *ATTENTION[1:]),
    "paged_attention_matmul": lambda: jq.paged_attention_matmul(*ATTENTION, W),
    "paged_attention_matmul of pieces": lambda: jq.paged_attention_matmul(
        Q[:, None], *ATTENTION[1:], W, residual=X[:, None]
    ),
    "embedding": lambda: jq.embedding(SLOTS, W, jnp.float16),
}


def equations(name):
    found = jax.make_jaxpr(CALLS[name])().jaxpr.eqns
    return [equation for equation in found if equation.primitive in OPS]


@pytest.mark.parametrize("name", CALLS)
def test_are_the_references(name):
    for equation in equations(name):
        op, tree = OPS[equation.primitive], equation.params["tree"]
        operands, params = without_prefetch(equation.invars, tree, equation.params)
        params = {k: v for k, v in params.items() if k not in ("tree", "implementation")}
        leaves = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
        found = jax.eval_shape(
            functools.partial(op.reference, **params), *jax.tree.unflatten(tree, leaves)
        )
        want = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found)]
        assert [(v.aval.shape, v.aval.dtype) for v in equation.outvars] == want


def test_every_operation_is_here():
    ours = {op.name for op in OPS.values() if op.reference.__module__.startswith("jax_q4k.")}
    assert {e.primitive.name for name in CALLS for e in equations(name)} == ours


def test_a_product_that_is_passed_back_is_transposed():
    assert [e.params["transposed"] for e in equations("transposed")] == [False, True]
