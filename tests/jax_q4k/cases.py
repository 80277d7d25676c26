"""A call of every public operation, for tests of their common properties."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from support.format_lists import PRODUCTS

import jax_q4k as jq
from jax_q4k.ops.draw import DrawParameters, draw

from .ops.random_weights import random_weights

FORMATS = PRODUCTS


def ramp(low, high, *shape):
    """float32 values from low to high."""
    return jnp.linspace(low, high, math.prod(shape), dtype=jnp.float32).reshape(shape)


W = {name: random_weights(name, 256, 256) for name in FORMATS}
KEYS = random_weights("Q6_K", 64, 256)  # two heads
STACK = jax.tree.map(lambda plane: jnp.stack([plane, plane]), W["Q6_K"])
EXPERTS = {
    name: jax.tree.map(lambda plane: jnp.stack([plane] * 4), W[name]) for name in ("Q4_K", "Q6_K")
}
CHOSEN, WEIGHTS = jnp.array([[3, 0], [1, -1], [2, 3]]), ramp(0.1, 0.9, 3, 2)
X, NORM = ramp(-1, 1, 3, 256), ramp(0.5, 1, 256)
DRAWS = DrawParameters(
    seed=jnp.arange(3, dtype=jnp.uint32),
    temperature=ramp(0, 1, 3),
    top_k=jnp.array([0, 5, 300], jnp.int32),
    top_p=ramp(0.8, 1, 3),
    min_p=ramp(0, 0.1, 3),
    step=jnp.arange(3, dtype=jnp.int32),
)
HALF = X.astype(jnp.bfloat16)
IDS = jnp.array([3, 0, 9])
BIAS, RESIDUAL = ramp(-1, 1, 256), jnp.cos(X)
EXPERT_BIAS = ramp(-1, 1, 4, 256)
PROMPT = jnp.cos(ramp(0, 1e3, 2, 5, 4, 32))
LENGTHS = jnp.array([5, 3])
Q, PAGES = PROMPT[0, :3].repeat(2, 1), jnp.ones((4, 2, 16, 32), jnp.bfloat16)
KV = PROMPT[0, :3, :2]
INT8, SCALES = PAGES.astype(jnp.int8), jnp.ones((4, 2, 16), jnp.float32)
SLOTS, TABLES, SEEN = jnp.arange(3), jnp.zeros((3, 1), jnp.int32), jnp.array([1, 5, 16])
ANGLES = jnp.cos(Q[:, 0, :8]), jnp.sin(Q[:, 0, :8])

# for a gated delta net: two k heads of 16, four v heads of 32, and its ring of columns
DELTA_K, DELTA_V = jnp.cos(ramp(0, 1e3, 2, 18, 2, 16)) / 4, jnp.sin(ramp(0, 1e3, 2, 18, 4, 32))
DECAY, BETA = ramp(-2, 0, 2, 18, 4), ramp(0, 1, 2, 18, 4)
STATE, RING = ramp(-1, 1, 2, 4, 16, 32), jnp.cos(ramp(0, 1e3, 2, 4, 192))
AT, CONVOLUTION = jnp.array([7, 0]), ramp(-1, 1, 192, 4)

CONTIGUOUS = jnp.ones((3, 2, 16, 32), jnp.float32)
WEIGHT = jnp.ones((24, 256), jnp.float32)

#: Case -> (function of arrays and packed weights, arguments, whether it is differentiable in the
#: first argument). All arguments are on the device already.
CASES = {
    "rms_norm": (lambda x, w: jq.rms_norm(x, w, eps=1e-5), (X, NORM), True),
    "rms_norm bfloat16": (lambda x, w: jq.rms_norm(x, w, eps=1e-5), (HALF, NORM), True),
    "rotate": (lambda q, c, s: jq.rotate(q, c, s, interleaved=True), (Q, *ANGLES), True),
    "causal_attention": (
        lambda q, k, v, n, z: jq.causal_attention(q, k, v, n, window=2, soft_cap=3.0, sinks=z),
        (PROMPT, PROMPT[:, :, :2], PROMPT[:, :, :2], LENGTHS, BIAS[:4]),
        True,
    ),
    "gated_delta_rule": (
        jq.gated_delta_rule,
        (DELTA_K[:, :3], DELTA_K[:, 3:6], DELTA_V[:, :3], DECAY[:, :3], BETA[:, :3], STATE),
        True,
    ),
    "gated_delta_rule in chunks": (
        lambda *a: jq.gated_delta_rule(*a, tiled=True),
        (DELTA_K, DELTA_K[::-1], DELTA_V, DECAY, BETA, STATE),
        True,
    ),
    "gated_delta_step": (
        lambda x, z, a, b, c, s, p, w, d, n: jq.gated_delta_step(
            *(x, z, a, b, c, s, p),
            **{"conv_weight": w, "dt_bias": d, "decay": -d, "norm_weight": n, "eps": 1e-6},
        ),
        (
            *(RING[::-1, 0], DELTA_V[:, 0].reshape(2, -1), DECAY[:, 0], BETA[:, 1]),
            *(RING, STATE, AT, CONVOLUTION, NORM[:4], NORM[:32]),
        ),
        False,
    ),
    **{f"matmul {name}": (jq.matmul, (X, w), True) for name, w in W.items()},
    "matmul with bias": (
        lambda x, w, b, r: jq.matmul(x, w, bias=b, residual=r),
        (HALF, W["Q4_K"], BIAS, RESIDUAL.astype(HALF.dtype)),
        True,
    ),
    "matmul of a stack": (lambda x, w, i: jq.matmul(x, w, index=i), (X, STACK, IDS[1]), True),
    "matmul of floats": (jq.matmul, (HALF, WEIGHT), True),
    "linear": (
        lambda x, a, b, n: jq.linear(x, [a, b], norm_weight=n, eps=1e-5),
        (X, W["Q4_K"], W["Q6_K"], NORM),
        True,
    ),
    "qkv_matmul": (
        lambda x, a, b, n: jq.qkv_matmul(x, (a, b), norm_weight=n, eps=1e-5),
        (X, W["Q4_K"], W["Q6_K"], NORM),
        True,
    ),
    "rms_norm_matmul": (
        lambda x, n, w: jq.rms_norm_matmul(x, n, w, eps=1e-5),
        (X, NORM, W["Q4_K"]),
        True,
    ),
    "gated_matmul": (jq.gated_matmul, (HALF, W["Q4_K"], W["Q5_K"]), True),
    "mlp": (
        lambda x, g, u, d, n, r: jq.mlp(x, g, u, d, norm_weight=n, eps=1e-5, residual=r),
        (X, W["Q4_K"], W["Q4_K"], W["Q6_K"], NORM, RESIDUAL),
        True,
    ),
    "route": (
        lambda x, b: jq.route(x, 3, gating="sigmoid", bias=b, groups=8, groups_used=2),
        (X, BIAS),
        True,
    ),
    "expert_matmul": (jq.expert_matmul, (HALF, EXPERTS["Q4_K"], CHOSEN), True),
    "expert_mlp": (
        lambda x, g, d, i, p, n, b, r: jq.expert_mlp(
            x, g, g, d, i, p, norm_weight=n, eps=1e-5, biases=(b, b, b), residual=r
        ),
        (X, EXPERTS["Q4_K"], EXPERTS["Q6_K"], CHOSEN, WEIGHTS, NORM, EXPERT_BIAS, RESIDUAL),
        True,
    ),
    "routed_mlp": (
        lambda x, p, g, d, n, b, r: jq.routed_mlp(
            *(x, p, g, g, d, 2),
            norm_weight=n,
            eps=1e-5,
            biases=(b, b, b),
            residual=r,
        ),
        (X, X[:, :4], EXPERTS["Q4_K"], EXPERTS["Q6_K"], NORM, EXPERT_BIAS, RESIDUAL),
        True,
    ),
    **{f"dequantize {name}": (jq.dequantize, (w,), False) for name, w in W.items()},
    **{f"embedding {name}": (jq.embedding, (IDS, w), False) for name, w in W.items()},
    "embedding of floats": (jq.embedding, (IDS, WEIGHT), False),
    "quantize": (lambda w: jq.quantize(w, "Q6_K"), (HALF,), False),
    "quantize_q8_1": (jq.quantize_q8_1, (HALF,), False),
    "argmax": (jq.argmax, (HALF,), False),
    "top_k": (lambda x: jq.top_k(x, 7), (HALF,), False),
    "draw": (draw, (X, DRAWS), False),
    "append_kv": (jq.append_kv, (PAGES, PAGES, KV, KV, SLOTS), False),
    "append_kv int8": (
        lambda k, s, new, slots: jq.append_kv(k, k, new, new, slots, k_scales=s, v_scales=s),
        (INT8, SCALES, KV, SLOTS),
        False,
    ),
    "rope_append": (
        lambda q, k, p, slots, c, s, n: jq.rope_append(
            q, k, k, p, p, slots, c, s, interleaved=False, q_norm=n, k_norm=n, eps=1e-5
        ),
        (Q, KV, PAGES, SLOTS, *ANGLES, NORM[:32]),
        False,
    ),
    "qkv_rope_append": (
        lambda x, q, k, p, slots, c, s, n: jq.qkv_rope_append(
            x, (q, k, k), p, p, slots, c, s, interleaved=False, norm_weight=n, eps=1e-5
        ),
        (X, W["Q4_K"], KEYS, PAGES, SLOTS, *ANGLES, NORM),
        False,
    ),
    "paged_attention": (
        lambda *a: jq.paged_attention(*a, window=4, soft_cap=5.0),
        (Q, PAGES, PAGES, TABLES, SEEN),
        False,
    ),
    "paged_attention int8": (
        lambda q, p, s, t, n, z: jq.paged_attention(q, p, p, t, n, k_scales=s, v_scales=s, sinks=z),
        (Q, INT8, SCALES, TABLES, SEEN, BIAS[:8]),
        False,
    ),
    "paged_attention of pieces": (
        lambda q, *a: jq.paged_attention(q[:, None], *a, window=4),
        (Q, PAGES, PAGES, TABLES, SEEN),
        False,
    ),
    "attention": (jq.attention, (Q, CONTIGUOUS, CONTIGUOUS, SEEN), False),
    "paged_attention_matmul": (
        lambda *a: jq.paged_attention_matmul(*a[:-1], bias=a[-1]),
        (Q, PAGES, PAGES, TABLES, SEEN, W["Q4_K"], BIAS),
        False,
    ),
}


def forward_and_back(function):
    """Returns the results, and the first argument's cotangent for the results as cotangents."""

    def both(x, *others):
        results, back = jax.vjp(lambda x: function(x, *others), x)
        return results, back(results)

    return both


def tangents(function):
    """Returns the results, and their tangents along the first argument."""
    return lambda x, *others: jax.jvp(lambda x: function(x, *others), (x,), (x,))


def derivatives(name):
    function, arguments, differentiable = CASES[name]
    found = (forward_and_back(function), tangents(function)) if differentiable else ()
    return [(whole, arguments) for whole in found]
