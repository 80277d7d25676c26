"""The shapes that an operation declares equal those from tracing its reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k.custom_call import TARGET
from jax_q4k.ops.draw import DrawParameters, draw
from jax_q4k.ops.op import OPS
from jax_q4k.ops.prefetch import without_prefetch

from .random_weights import random_weights

W, DOWN = random_weights("Q4_K", 256, 256), random_weights("Q6_K", 24, 256)
DOWN2 = random_weights("Q6_K", 64, 256)
NORM, PAGES = jnp.ones(256), jnp.ones((4, 2, 16, 32), jnp.bfloat16)
LATENT = jnp.ones((4, 1, 16, 64), jnp.bfloat16)
INT8 = PAGES.astype(jnp.int8), PAGES.astype(jnp.int8)
SCALES = dict(zip(("k_scales", "v_scales"), [jnp.ones((4, 2, 16))] * 2, strict=True))


def calls(rows, sequences):
    """Calls of each operation with so many rows, or sequences in a batch."""
    x, q = jnp.ones((rows, 256)), jnp.ones((rows, 8, 32))
    lengths = jnp.array([5, 3], jnp.int32)[:sequences]
    chosen = jnp.zeros((rows, 1), jnp.int32)
    slots, tables = jnp.arange(rows), jnp.zeros((rows, 1), jnp.int32)
    ones = jnp.ones(rows)
    draws = ones, slots, ones, ones  # temperature, top_k, top_p, min_p
    attention = q, PAGES, PAGES, tables, jnp.ones(rows, jnp.int32)

    half = x.astype(jnp.bfloat16)
    prompt = jnp.ones((sequences, 5, 4, 32))
    gates, state = jnp.ones((sequences, 5, 4)), jnp.ones((sequences, 4, 32, 16))

    def passed_back():
        """A product and its transpose."""
        y, back = jax.vjp(lambda x: jq.matmul(x, DOWN), half)
        return back(y)

    return {
        "rms_norm": lambda: jq.rms_norm(half, NORM, eps=1e-5),
        "rms_norm with a residual": lambda: jq.rms_norm(half, NORM, eps=1e-5, residual=x),
        "rotate": lambda: jq.rotate(q, q[:, 0, :8], q[:, 0, :8], interleaved=False),
        "causal_attention": lambda: jq.causal_attention(
            prompt, prompt[:, :, :2], prompt[:, :, :2], lengths
        ),
        "gated_delta_rule": lambda: jq.gated_delta_rule(
            prompt[:, :, :2], prompt[:, :, :2], prompt[..., :16], -gates, gates, state
        ),
        "gated_delta_rule in chunks": lambda: jq.gated_delta_rule(
            *(jnp.tile(x, (1, 20, 1, 1)) for x in (prompt[:, :, :2], prompt[:, :, :2])),
            jnp.tile(prompt[..., :16], (1, 20, 1, 1)),
            *(jnp.tile(x, (1, 20, 1)) for x in (-gates, gates)),
            state,
        ),
        "gated_delta_step": lambda: jq.gated_delta_step(
            *(jnp.ones((sequences, n)) for n in (192, 64, 4, 4)),
            *(jnp.ones((sequences, 3, 192)), state, jnp.array([0, -1])[:sequences]),
            **{"conv_weight": jnp.ones((192, 3)), "dt_bias": jnp.ones(4), "decay": -jnp.ones(4)},
            **{"norm_weight": jnp.ones(16), "eps": 1e-6},
        ),
        "packed_matmul": lambda: jq.matmul(half, DOWN),
        "transposed": passed_back,
        "stack": lambda: jq.matmul(half, DOWN[None], index=0),
        "linear of a stack": lambda: jq.matmul(x, W[None], index=0, bias=NORM),
        "float_matmul": lambda: jq.matmul(half, jnp.ones((24, 256))),
        "dequantize": lambda: jq.dequantize(DOWN, jnp.float16),
        "quantize": lambda: jq.quantize(half * 2, "Q6_K"),
        "quantize with an importance": lambda: jq.quantize(half * 2, "Q8_0", NORM),
        "quantize_q8_1": lambda: jq.quantize_q8_1(half),
        "argmax": lambda: jq.argmax(half),
        "top_k": lambda: jq.top_k(half, 7),
        "draw": lambda: draw(x, DrawParameters(slots.astype(jnp.uint32), *draws, slots)),
        "float_embedding": lambda: jq.embedding(slots, x, jnp.float16),
        "linear": lambda: jq.qkv_matmul(x, (W, DOWN), norm_weight=NORM, eps=1e-5),
        "gated": lambda: jq.gated_matmul(x.astype(jnp.bfloat16), W, W),
        "mlp": lambda: jq.mlp(x, W, W, DOWN),
        "route": lambda: jq.route(half, 3),
        "expert_matmul": lambda: jq.expert_matmul(half, W[None], chosen),
        "expert_matmul of rows": lambda: jq.expert_matmul(x[:, None], DOWN[None], chosen),
        "expert_mlp": lambda: jq.expert_mlp(x, W[None], W[None], DOWN[None], chosen, x[:, :1]),
        "routed_mlp": lambda: jq.routed_mlp(x, x[:, :1], W[None], W[None], DOWN[None], 1),
        "router": lambda: jq.rms_norm_matmul(half, NORM, jnp.ones((24, 256)), eps=1e-5),
        "rope_append": lambda: jq.rope_append(
            q,
            q[:, :2],
            q[:, :2],
            *INT8,
            slots,
            q[:, 0, :8],
            q[:, 0, :8],
            interleaved=True,
            **SCALES,
        ),
        "rope_append with keys": lambda: jq.rope_append(
            *[q, q[:, :2], q[:, :2], PAGES, PAGES, slots, q[:, 0, :8], q[:, 0, :8]],
            interleaved=True,
            return_keys=True,
        ),
        "rope_append of latent pages": lambda: jq.rope_append(
            *[jnp.ones((rows, 8, 40)), jnp.ones((rows, 1, 64)), None, LATENT, None, slots],
            *[q[:, 0, :16], q[:, 0, :16]],
            interleaved=True,
            q_rest=8,
        ),
        "rope_append with a gate": lambda: jq.rope_append(
            *[jnp.ones((rows, 8, 48)), q[:, :2], q[:, :2], PAGES, PAGES, slots],
            *[q[:, 0, :8], q[:, 0, :8]],
            interleaved=True,
            q_rest=16,
            return_keys=True,
        ),
        "qkv_rope_append": lambda: jq.qkv_rope_append(
            x, (W, DOWN2, DOWN2), PAGES, PAGES, slots, q[:, 0, :8], q[:, 0, :8], interleaved=True
        ),
        "causal_attention of other values": lambda: jq.causal_attention(
            prompt, prompt[:, :, :2], prompt[:, :, :2, :24], lengths
        ),
        "append_kv": lambda: jq.append_kv(PAGES, PAGES, q[:, :2], q[:, :2], slots),
        "append_kv of latent pages": lambda: jq.append_kv(
            INT8[0], None, q[:, :2], None, slots, k_scales=SCALES["k_scales"]
        ),
        "paged_attention of latent pages": lambda: jq.paged_attention(
            jnp.ones((rows, 8, 64)), LATENT, None, *attention[3:], value_dim=32
        ),
        "paged_attention of queries in two arrays": lambda: jq.paged_attention(
            q, LATENT, None, *attention[3:], value_dim=32, q_rest=q
        ),
        "paged_attention with a gate": lambda: jq.paged_attention(*attention, gate=q),
        "paged_attention": lambda: jq.paged_attention(*attention),
        "paged_attention of pieces": lambda: jq.paged_attention(q[:, None], *attention[1:]),
        "paged_attention_matmul": lambda: jq.paged_attention_matmul(*attention, W),
        "paged_attention_matmul of pieces": lambda: jq.paged_attention_matmul(
            q[:, None], *attention[1:], W, residual=x[:, None]
        ),
        "embedding": lambda: jq.embedding(slots, W, jnp.float16),
    }


CALLS = calls(3, 2)

#: A weight without rows is an error; a decoded weight does not depend on a batch.
NEED_ROWS = "quantize", "quantize with an importance", "dequantize"
WITHOUT_ROWS = {name: call for name, call in calls(0, 0).items() if name not in NEED_ROWS}


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


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_without_rows_no_kernel_runs(name):
    """CUDA refuses a launch of no blocks, and XLA compiles one without a word."""
    lowered = jax.jit(WITHOUT_ROWS[name]).trace().lower(lowering_platforms=("cuda",))
    assert TARGET not in lowered.as_text()
    shapes = jax.tree.leaves(jax.eval_shape(CALLS[name]))
    for got, full in zip(jax.tree.leaves(WITHOUT_ROWS[name]()), shapes, strict=True):
        assert got.dtype == full.dtype
        assert got.shape in (full.shape, (0, *full.shape[1:]))
