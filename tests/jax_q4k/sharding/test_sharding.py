"""Operations with sharded operands: results, types, derivatives, collectives."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.helpers import nmse

import jax_q4k as jq

from ..ops.random_weights import random_weights

KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def mesh(kind: str) -> Mesh:
    """Two data-parallel groups of four devices."""
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(KINDS[kind],) * 2)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32))


@functools.cache
def packed(n: int, k: int, format: str = "Q4_K") -> jq.QuantizedArray:
    return random_weights(format, n, k)


@functools.cache
def stack(experts: int, n: int, k: int, format: str = "Q4_K") -> jq.QuantizedArray:
    w = packed(experts * n, k, format)
    return jax.tree.map(lambda plane: plane.reshape(experts, n, *plane.shape[1:]), w)


def routed(x: Any) -> Any:
    ids, weights = jq.route(x, 3)
    return ids.astype(jnp.float32), weights


class Case(NamedTuple):
    """A call.

    Attributes:
      specs: partition spec of each operand. results: expected specs of the results.
      moving: operands to differentiate with respect to. gathers: elements that may be gathered, on
        automatic axes.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    specs: tuple[P, ...]
    results: tuple[P, ...]
    moving: tuple[int, ...] = ()
    gathers: int = 0


WHOLE, ROWS, COLUMNS, BATCH = P(), P("tp"), P(None, "tp"), P("dp")
HEADS = P(None, "tp")
TABLE = np.arange(4).reshape(2, 2)
#: Two groups of one sequence each, whose ids count from the first page, or slot, of the group.
GROUPED_TABLE, GROUPED_SLOTS = np.array([[[1, 0]], [[0, 1]]]), np.array([[3], [17]])
LENGTHS = np.array([20, 30])


def f32(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *operands: function(*operands, activations="f32", **options)


def products() -> dict[str, Case]:
    x, w, bias, residual = normal(8, 1024), packed(64, 1024), normal(64), normal(8, 64)
    norm, narrow = normal(1024), normal(8, 256)
    gate, up, down = packed(1024, 256), packed(1024, 256, "Q6_K"), packed(64, 1024)
    matmul = f32(jq.matmul)
    stack = jax.tree.map(lambda *planes: jnp.stack(planes), packed(64, 1024), w)
    second = f32(functools.partial(jq.matmul, index=1))
    around = f32(lambda x, w, b, r, **o: jq.matmul(x, w, bias=b, residual=r, **o))
    normed = f32(lambda x, g, w, **o: jq.rms_norm_matmul(x, g, w, eps=1e-5, **o))
    qkv = f32(lambda x, g, *w, **o: jq.qkv_matmul(x, w, norm_weight=g, eps=1e-5, **o))

    def mlp(x: Any, g: Any, r: Any, *weights: Any) -> jax.Array:
        return jq.mlp(x, *weights, norm_weight=g, eps=1e-5, residual=r, activations="f32")

    def without_norm(x: Any, *weights: Any) -> jax.Array:
        return jq.mlp(x, *weights, activations="f32")

    three = (w, packed(32, 1024, "Q6_K"), packed(16, 1024))
    return {
        "matmul-rows": Case(matmul, (x, w), (WHOLE, ROWS), (COLUMNS,), (0,)),
        "matmul-columns": Case(matmul, (x, w), (WHOLE, COLUMNS), (WHOLE,), (0,)),
        "matmul-columns-of-both": Case(matmul, (x, w), (COLUMNS, COLUMNS), (WHOLE,), (0,)),
        "matmul-batch": Case(matmul, (x, w), (BATCH, WHOLE), (BATCH,), (0,)),
        "matmul-batch-rows": Case(matmul, (x, w), (BATCH, ROWS), (P("dp", "tp"),), (0,)),
        "matmul-batch-columns": Case(matmul, (x, w), (BATCH, COLUMNS), (BATCH,), (0,)),
        "matmul-q8_1": Case(jq.matmul, (x, w), (WHOLE, COLUMNS), (WHOLE,)),
        "matmul-time": Case(
            matmul, (x.reshape(2, 4, -1), w), (COLUMNS, WHOLE), (COLUMNS,), (0,), 8 * 1024
        ),
        "matmul-batch-time": Case(
            matmul, (x.reshape(2, 4, -1), w), (P("dp", "tp"), WHOLE), (P("dp", "tp"),), (0,), 8192
        ),
        "matmul-around-rows": Case(
            around, (x, w, bias, residual), (WHOLE, ROWS, WHOLE, WHOLE), (COLUMNS,), (0, 2, 3)
        ),
        "matmul-around-columns": Case(
            around, (x, w, bias, residual), (WHOLE, COLUMNS, WHOLE, BATCH), (BATCH,), (0, 2, 3)
        ),
        "matmul-float-rows": Case(matmul, (x, normal(64, 1024)), (WHOLE, ROWS), (COLUMNS,), (0, 1)),
        "matmul-float-columns": Case(
            matmul, (x, normal(64, 1024)), (WHOLE, COLUMNS), (WHOLE,), (0, 1)
        ),
        "matmul-stack-rows": Case(
            second, (x, stack), (BATCH, P(None, "tp")), (P("dp", "tp"),), (0,)
        ),
        "matmul-stack-columns": Case(
            second, (x, stack), (WHOLE, P(None, None, "tp")), (WHOLE,), (0,)
        ),
        "mlp-stack": Case(
            lambda x, *ws: jq.mlp(x, *ws, index=0, activations="f32"),
            (narrow, gate[None], up[None], down[None]),
            (WHOLE, P(None, "tp"), P(None, "tp"), P(None, None, "tp")),
            (WHOLE,),
        ),
        "linear-stack-rows": Case(
            f32(lambda x, w, b, **o: jq.matmul(x, w, bias=b, index=1, **o)),
            (x, stack, bias),
            (WHOLE, P(None, "tp"), WHOLE),
            (COLUMNS,),
            (0, 2),
        ),
        "rms_norm_matmul-columns": Case(
            normed, (x, norm, w), (WHOLE, WHOLE, COLUMNS), (WHOLE,), (0, 1)
        ),
        "qkv_matmul-rows": Case(
            qkv, (x, norm, *three), (BATCH, WHOLE, ROWS, ROWS, ROWS), (P("dp", "tp"),) * 3, (0, 1)
        ),
        "gated_matmul-rows": Case(
            f32(jq.gated_matmul), (narrow, gate, up), (WHOLE, ROWS, ROWS), (COLUMNS,), (0,)
        ),
        "gated_matmul-columns": Case(
            f32(jq.gated_matmul), (x, w, w), (WHOLE, COLUMNS, COLUMNS), (WHOLE,), (0,)
        ),
        "mlp": Case(
            mlp,
            (narrow, normal(256), residual, gate, up, down),
            (BATCH, WHOLE, WHOLE, ROWS, ROWS, COLUMNS),
            (BATCH,),
            (0, 1, 2),
        ),
        "mlp-rows": Case(  # three blocks of columns, which four devices cannot split
            without_norm,
            (narrow, packed(768, 256), packed(768, 256), packed(64, 768)),
            (WHOLE, ROWS, ROWS, ROWS),
            (COLUMNS,),
            (0,),
        ),
        "mlp-columns": Case(
            without_norm, (narrow, gate, up, down), (WHOLE, WHOLE, WHOLE, COLUMNS), (WHOLE,), (0,)
        ),
    }


def experts() -> dict[str, Case]:
    """Eight experts, sharded over experts, rows, columns, tokens, and two of these axes."""
    x, ids, weights = normal(8, 256), jnp.arange(24).reshape(8, 3) % 9 - 1, jnp.abs(normal(8, 3))
    gate, up = stack(8, 1024, 256), stack(8, 1024, 256, "Q6_K")
    down, narrow = stack(8, 64, 1024), stack(8, 64, 768)
    bias, last, scale = normal(8, 1024), normal(8, 64), normal(8)
    product = f32(jq.expert_matmul)

    def mlp(x: Any, i: Any, p: Any, g: Any, u: Any, d: Any, b: Any, a: Any, s: Any) -> jax.Array:
        options = {"biases": (b, b, a), "down_scale": s, "residual": x[:, :64]}
        return jq.expert_mlp(x, g, u, d, i, p, activations="f32", **options)

    def plain(x: Any, i: Any, p: Any, g: Any, u: Any, d: Any) -> jax.Array:
        return jq.expert_mlp(x, g, u, d, i, p, activations="f32")

    def chosen(x: Any, r: Any, g: Any, u: Any, d: Any, b: Any, a: Any, s: Any) -> jax.Array:
        options = {"biases": (b, b, a), "down_scale": s, "residual": x[:, :64]}
        return jq.routed_mlp(x, r, g, u, d, 3, activations="f32", **options)

    def with_shared(x: Any, r: Any, s: Any, g: Any, u: Any, d: Any, *shared: Any) -> jax.Array:
        options = {"shared": shared, "shared_logits": s, "residual": x[:, :64]}
        return jq.routed_mlp(x, r, g, u, d, 3, activations="f32", **options)

    given, moving = (x, ids, weights, gate, up, down, bias, last, scale), (0, 2, 6, 7, 8)
    routed_given = (x, normal(8, 8), *given[3:])
    both, inner = P("dp", "tp"), P(None, None, "tp")
    return {
        "route": Case(routed, (x[:, :16],), (BATCH,), (BATCH, BATCH), (0,)),
        "expert_matmul-experts": Case(
            product, (x, stack(8, 64, 256), ids), (BATCH, ROWS, BATCH), (BATCH,), (0,)
        ),
        "expert_matmul-rows": Case(
            product, (x, stack(8, 64, 256), ids), (BATCH, COLUMNS, BATCH), (P("dp", None, "tp"),)
        ),
        "expert_matmul-columns": Case(
            product, (normal(8, 3, 1024), down, ids), (WHOLE, inner, WHOLE), (WHOLE,), (0,)
        ),
        "expert_mlp-experts": Case(
            mlp, given, (BATCH, BATCH, BATCH, *(ROWS,) * 6), (BATCH,), moving
        ),
        "expert_mlp-inner": Case(
            mlp,
            given,
            (BATCH, BATCH, BATCH, COLUMNS, COLUMNS, inner, COLUMNS, WHOLE, WHOLE),
            (BATCH,),
            moving,
        ),
        "expert_mlp-experts-inner": Case(
            mlp,
            given,
            (WHOLE, WHOLE, WHOLE, both, both, P("dp", None, "tp"), both, BATCH, BATCH),
            (WHOLE,),
        ),
        "routed_mlp-experts": Case(
            chosen, routed_given, (BATCH, BATCH, *(ROWS,) * 6), (BATCH,), (0, 1, 5, 6, 7)
        ),
        "routed_mlp-shared": Case(  # whose inner axis is split like experts
            with_shared,
            (
                *(x, normal(8, 8), normal(8, 1), gate, up, down),
                *(packed(1024, 256), packed(1024, 256, "Q6_K"), packed(64, 1024)),
            ),
            (*(BATCH,) * 3, *(ROWS,) * 5, COLUMNS),
            (BATCH,),
            (0, 1, 2),
        ),
        "routed_mlp-experts-inner": Case(
            chosen,
            routed_given,
            (WHOLE, WHOLE, both, both, P("dp", None, "tp"), both, BATCH, BATCH),
            (WHOLE,),
        ),
        "expert_mlp-rows": Case(  # three blocks of columns, which four devices cannot split
            plain,
            (x, ids, weights, gate[:, :768], up[:, :768], narrow),
            (WHOLE, WHOLE, WHOLE, COLUMNS, COLUMNS, WHOLE),
            (WHOLE,),
            (0,),
        ),
    }


def attentions() -> dict[str, Case]:
    q, k = normal(4, 20, 8, 32), normal(4, 20, 4, 32)
    pages, one, new = normal(4, 4, 16, 32), normal(2, 8, 32), normal(2, 4, 32)
    angles = normal(2, 16)
    heads = P(None, None, "tp")

    def causal(q: Any, k: Any, v: Any) -> jax.Array:
        options = {"window": 9, "soft_cap": 2.0, "sinks": np.linspace(-1, 1, 8, dtype=np.float32)}
        return jq.causal_attention(q, k, v, np.array([20, 7, 1, 12]), **options)

    def paged(q: Any, k: Any, v: Any) -> jax.Array:
        return jq.paged_attention(q, k, v, TABLE, LENGTHS, sinks=np.arange(8.0, dtype=np.float32))

    def projected(q: Any, k: Any, w: Any, residual: Any) -> jax.Array:
        return jq.paged_attention_matmul(
            q, k, k, TABLE, LENGTHS, w, residual=residual, activations="f32"
        )

    def piece(q: Any, k: Any, v: Any) -> jax.Array:
        return jq.paged_attention(q, k, v, TABLE, LENGTHS, lengths=np.array([3, 2]))

    def projected_piece(q: Any, k: Any, w: Any, residual: Any) -> jax.Array:
        options = {"residual": residual, "activations": "f32", "lengths": np.array([3, 2])}
        return jq.paged_attention_matmul(q, k, k, TABLE, LENGTHS, w, **options)

    def contiguous(q: Any, k: Any) -> jax.Array:
        return jq.attention(q, k, k, LENGTHS)

    def delta(q: Any, k: Any, v: Any, g: Any, state: Any) -> Any:
        return jq.gated_delta_rule(q / 9, k / 9, v, -abs(g), jax.nn.sigmoid(g), state)

    def tiled(q: Any, k: Any, v: Any, g: Any, state: Any) -> Any:
        gates = -abs(g), jax.nn.sigmoid(g)
        return jq.gated_delta_rule(q / 9, k / 9, v, *gates, state, tiled=True)

    def step(qkv: Any, z: Any, gates: Any, columns: Any, state: Any) -> Any:
        return jq.gated_delta_step(
            *(qkv, z, gates, gates, columns, state, np.array([5, 0, 2, -1])),
            **{"conv_weight": normal(512, 3), "dt_bias": normal(8), "decay": -abs(normal(8))},
            **{"norm_weight": normal(32), "eps": 1e-6},
        )

    def latent(q: Any, pages: Any) -> jax.Array:
        return jq.paged_attention(q, pages, None, TABLE, LENGTHS, value_dim=32)

    def grouped_latent(q: Any, pages: Any) -> jax.Array:
        return jq.paged_attention(q, pages, None, GROUPED_TABLE, LENGTHS, value_dim=32)

    def append_latent(k: Any, pages: Any) -> Any:
        return jq.append_kv(pages, None, k, None, GROUPED_SLOTS)

    def append(k: Any, pages: Any) -> Any:
        return jq.append_kv(pages, pages, k, k, np.array([3, 17]))

    def rope(q: Any, k: Any, pages: Any) -> Any:
        return jq.rope_append(
            q, k, k, pages, pages, np.array([3, 17]), angles, angles, interleaved=True
        )

    def qkv_rope(x: Any, q: Any, k: Any, pages: Any) -> Any:
        options = {"interleaved": True, "activations": "f32", "norm_weight": x[0] + 3, "eps": 1e-5}
        slots = np.array([3, 17])
        return jq.qkv_rope_append(x, (q, k, k), pages, pages, slots, angles, angles, **options)

    def rotate(q: Any, angles: Any) -> jax.Array:
        return jq.rotate(q, angles, angles, interleaved=False)

    def grouped(q: Any, k: Any) -> jax.Array:
        return jq.paged_attention(q, k, k, GROUPED_TABLE, LENGTHS)

    def grouped_projected(q: Any, k: Any, w: Any, residual: Any) -> jax.Array:
        options = {"residual": residual, "activations": "f32"}
        return jq.paged_attention_matmul(q, k, k, GROUPED_TABLE, LENGTHS, w, **options)

    def grouped_append(k: Any, pages: Any) -> Any:
        return jq.append_kv(pages, pages, k, k, GROUPED_SLOTS)

    def grouped_rope(q: Any, k: Any, pages: Any) -> Any:
        return jq.rope_append(
            q, k, k, pages, pages, GROUPED_SLOTS, angles, angles, interleaved=True
        )

    def latent_rope(q: Any, k: Any, pages: Any, slots: Any) -> Any:
        weight = np.linspace(0.5, 2, 32, dtype=np.float32)
        options: Any = {"interleaved": True, "k_norm": weight, "eps": 1e-5, "q_rest": 40}
        return jq.rope_append(q, k, None, pages, None, slots, angles, angles, **options)

    def gated(q: Any, k: Any, gate: Any, w: Any) -> jax.Array:
        options = {"gate": gate, "activations": "f32"}
        return jq.paged_attention_matmul(q, k, k, TABLE, LENGTHS, w, **options)

    gates, state = normal(4, 20, 8), normal(4, 8, 32, 32)
    sequences = q, k, q[::-1], gates, state
    of_batch = (BATCH,) * 5
    one_token = normal(4, 512), normal(4, 256), gates[:, 0], normal(4, 3, 512), state
    wide = normal(2, 32, 32)
    both = P("dp", "tp")
    rows, single, row = normal(4, 1, 16, 64), normal(2, 8, 64), normal(2, 1, 64)
    return {
        "causal_attention-batch": Case(causal, (q, k, k), (BATCH,) * 3, (BATCH,), (0, 1, 2)),
        "causal_attention-heads": Case(causal, (q, k, k), (heads,) * 3, (heads,), (0, 1, 2)),
        "gated_delta_rule-batch": Case(
            delta, (k, *sequences[1:]), of_batch, (BATCH, BATCH), tuple(range(5))
        ),
        "gated_delta_rule-heads": Case(
            delta,
            (k, *sequences[1:]),
            (heads, heads, heads, heads, HEADS),
            (heads, HEADS),
            tuple(range(5)),
        ),
        "gated_delta_rule-tiled": Case(
            tiled, (k, *sequences[1:]), of_batch, (BATCH, BATCH), tuple(range(5))
        ),
        "gated_delta_step": Case(step, one_token, of_batch, (BATCH,) * 3),
        "paged_attention-heads": Case(paged, (one, pages, pages), (HEADS,) * 3, (HEADS,)),
        "paged_attention-batch": Case(paged, (one, pages, pages), (BATCH, WHOLE, WHOLE), (BATCH,)),
        "paged_attention-one-kv-head": Case(  # replicated
            paged, (one, pages[:, :1], pages[:, 1:2]), (HEADS, WHOLE, WHOLE), (HEADS,)
        ),
        "paged_attention-piece-heads": Case(
            piece, (normal(2, 3, 8, 32), pages, pages), (heads, HEADS, HEADS), (heads,)
        ),
        "paged_attention-piece-batch": Case(
            piece, (normal(2, 3, 8, 32), pages, pages), (BATCH, WHOLE, WHOLE), (BATCH,)
        ),
        "paged_attention_matmul-piece": Case(
            projected_piece,
            (normal(2, 3, 32, 32), pages, packed(64, 1024), normal(2, 3, 64)),
            (heads, HEADS, COLUMNS, WHOLE),
            (WHOLE,),
        ),
        "paged_attention_matmul-piece-rows": Case(
            projected_piece,
            (normal(2, 3, 8, 32), pages, packed(64, 256), normal(2, 3, 64)),
            (heads, HEADS, ROWS, WHOLE),
            (P(None, None, "tp"),),
        ),
        "paged_attention-latent": Case(latent, (single, rows), (HEADS, WHOLE), (HEADS,)),
        "paged_attention-latent-groups": Case(
            grouped_latent, (single, rows), (both, BATCH), (both,)
        ),
        "rope_append-latent": Case(
            functools.partial(latent_rope, slots=np.array([3, 17])),
            (normal(2, 8, 72), row, rows),
            (HEADS, WHOLE, WHOLE),
            (HEADS, HEADS, WHOLE),
        ),
        "rope_append-latent-groups": Case(
            functools.partial(latent_rope, slots=GROUPED_SLOTS),
            (normal(2, 8, 72), row, rows),
            (both, BATCH, BATCH),
            (both, both, BATCH),
        ),
        "append_kv-latent-groups": Case(append_latent, (row, rows), (BATCH, BATCH), (BATCH,)),
        "paged_attention_matmul": Case(
            projected,
            (wide, pages, packed(64, 1024), normal(2, 64)),
            (HEADS, HEADS, COLUMNS, WHOLE),
            (WHOLE,),
        ),
        "paged_attention_matmul-gate": Case(
            gated,
            (wide, pages, wide[::-1], packed(64, 1024)),
            (HEADS, HEADS, HEADS, COLUMNS),
            (WHOLE,),
        ),
        "paged_attention_matmul-rows": Case(  # a single block of columns
            projected,
            (one, pages, packed(64, 256), normal(2, 64)),
            (HEADS, HEADS, ROWS, WHOLE),
            (COLUMNS,),
        ),
        "attention": Case(
            contiguous, (one, normal(2, 4, 48, 32)), (P("dp", "tp"),) * 2, (P("dp", "tp"),)
        ),
        "append_kv": Case(append, (new, pages), (HEADS, HEADS), (HEADS, HEADS)),
        "rope_append": Case(rope, (one, new, pages), (HEADS,) * 3, (HEADS,) * 3),
        "qkv_rope_append": Case(
            qkv_rope,
            (normal(2, 256), packed(256, 256), packed(128, 256), pages),
            (WHOLE, ROWS, ROWS, HEADS),
            (HEADS,) * 3,
        ),
        "qkv_rope_append-columns": Case(
            qkv_rope,
            (normal(2, 1024), packed(256, 1024), packed(128, 1024), pages),
            (COLUMNS, COLUMNS, COLUMNS, WHOLE),
            (WHOLE,) * 3,
        ),
        "qkv_rope_append-queries": Case(  # a single KV head, replicated
            qkv_rope,
            (normal(2, 256), packed(256, 256), packed(32, 256), pages[:, :1]),
            (WHOLE, ROWS, WHOLE, WHOLE),
            (HEADS, WHOLE, WHOLE),
        ),
        "paged_attention-groups": Case(grouped, (one, pages), (both, both), (both,)),
        "paged_attention_matmul-groups": Case(
            grouped_projected,
            (wide, pages, packed(64, 1024), normal(2, 64)),
            (both, both, COLUMNS, BATCH),
            (BATCH,),
        ),
        "append_kv-groups": Case(grouped_append, (new, pages), (both, both), (both, both)),
        "rope_append-groups": Case(grouped_rope, (one, new, pages), (both,) * 3, (both,) * 3),
        "rotate": Case(rotate, (one, angles), (P("dp", "tp"), BATCH), (P("dp", "tp"),), (0,)),
    }


def others() -> dict[str, Case]:
    x, w, ids = normal(8, 1024), packed(64, 1024), jnp.array([1, 20, 63, 5])
    norm = f32(lambda x, g, **_: jq.rms_norm(x, g, eps=1e-5))
    table = normal(64, 1024)
    ties = jnp.round(x)
    return {
        "embedding-rows": Case(jq.embedding, (ids, w), (WHOLE, ROWS), (WHOLE,)),
        "embedding-columns": Case(jq.embedding, (ids, w), (WHOLE, COLUMNS), (COLUMNS,)),
        "embedding-ids": Case(jq.embedding, (ids, w), (BATCH, ROWS), (BATCH,)),
        "embedding-float-rows": Case(jq.embedding, (ids, table), (WHOLE, ROWS), (WHOLE,), (1,)),
        "rms_norm-batch": Case(norm, (x, normal(1024)), (BATCH, WHOLE), (BATCH,), (0, 1)),
        "rms_norm-residual": Case(
            f32(lambda x, g, r, **_: jq.rms_norm(x, g, eps=1e-5, residual=r)),
            (x, normal(1024), x[::-1]),
            (COLUMNS, WHOLE, COLUMNS),
            (COLUMNS,),
            (0, 1, 2),
        ),
        "rms_norm-columns": Case(norm, (x, normal(1024)), (COLUMNS, WHOLE), (COLUMNS,), (0, 1)),
        "argmax": Case(jq.argmax, (ties,), (P("dp", "tp"),), (BATCH,)),
        "top_k": Case(lambda x: jq.top_k(x, 300), (ties,), (P("dp", "tp"),), (BATCH, BATCH)),
        "dequantize": Case(jq.dequantize, (w,), (ROWS,), (ROWS,)),
        "w.dequantize": Case(lambda w: w.dequantize(), (w,), (COLUMNS,), (COLUMNS,)),
        "quantize_q8_1": Case(jq.quantize_q8_1, (x,), (COLUMNS,), (COLUMNS, COLUMNS)),
    }


CASES = {**products(), **experts(), **attentions(), **others()}


def normalized(spec: Any) -> tuple[Any, ...]:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def gradients_of(case: Case) -> Callable[..., Any]:
    """Gradients of the sum of squared results in the `moving` operands."""

    def loss(moving: Any, *operands: Any) -> Any:
        given = list(operands)
        for at, x in zip(case.moving, moving, strict=True):
            given[at] = x
        results = jax.tree.leaves(case.function(*given))
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in results)

    def run(*operands: Any) -> Any:
        return jax.grad(loss)([operands[at] for at in case.moving], *operands)

    return run


def gathered(text: str) -> int:
    """Elements of the largest array that a compiled program gathers."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* (?:all-gather|all-to-all)(?:-start)?\(", text)
    return max((int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes), default=0)


@functools.cache
def on_one_device(name: str) -> tuple[list[jax.Array], list[jax.Array]]:
    """Results and gradients of a case."""
    case = CASES[name]
    # results for padding differ from those computed together with a gradient
    results = jax.tree.leaves(jax.jit(case.function)(*case.operands))
    return results, jax.jit(gradients_of(case))(*case.operands) if case.moving else []


#: The last case of each operation, alternating between the kinds of mesh.
LAST = {name.split("-")[0]: name for name in CASES}
QUICK = [f"{name}-{kind}" for name, kind in zip(LAST.values(), itertools.cycle(KINDS))]


@pytest.mark.slow("compiles programs for eight devices", quick=QUICK)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_split_operands_stay_where_they_are(name: str, kind: str) -> None:
    """Results and derivatives equal one device's and have the expected shardings; no gathers."""
    case, on = CASES[name], mesh(kind)
    placed = [
        jax.device_put(operand, NamedSharding(on, spec))
        for operand, spec in zip(case.operands, case.specs, strict=True)
    ]
    want_results, want_gradients = on_one_device(name)
    compiled = jax.jit(case.function).lower(*placed).compile()
    results = jax.tree.leaves(compiled(*placed))
    gradients = jax.jit(gradients_of(case))(*placed) if case.moving else []
    for got, want in zip(results, want_results, strict=True):
        assert nmse(got, want) <= 1e-10
    for got, want in zip(gradients, want_gradients, strict=True):
        assert jnp.any(want != 0) and nmse(got, want) <= 1e-10
    allowed = case.gathers if kind == "auto" else 0
    assert gathered(compiled.as_text()) <= allowed
    if not allowed:
        found = [normalized(result.sharding.spec) for result in results]
        assert found == [normalized(spec) for spec in case.results]


def test_types_say_where_results_lie() -> None:
    on, case = mesh("explicit"), CASES["matmul-batch-rows"]
    x, w = (
        jax.device_put(a, NamedSharding(on, spec))
        for a, spec in zip(case.operands, case.specs, strict=True)
    )
    assert jax.typeof(jq.matmul(x, w)).sharding.spec == P("dp", "tp")


def test_an_automatic_axis_beside_an_explicit_one() -> None:
    """Rows sharded over the automatic axis stay in place."""
    kinds = (AxisType.Auto, AxisType.Explicit)
    on, case = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=kinds), CASES["matmul-batch"]
    x, w = (
        jax.device_put(a, NamedSharding(on, spec))
        for a, spec in zip(case.operands, case.specs, strict=True)
    )
    compiled = jax.jit(case.function).lower(x, w).compile()
    assert gathered(compiled.as_text()) == 0
    assert nmse(compiled(x, w), case.function(*case.operands)) <= 1e-10


def test_the_simulator_takes_operands_of_an_automatic_mesh() -> None:
    """The operands are gathered, since callbacks cannot be partitioned by XLA."""
    x, weight = normal(4, 64), normal(64)
    placed = jax.device_put(x, NamedSharding(mesh("auto"), BATCH))
    norm = jax.jit(functools.partial(jq.rms_norm, eps=1e-5))
    with jq.implementation("sim"):
        got = norm(placed, weight)
    assert nmse(got, jq.rms_norm(x, weight, eps=1e-5)) <= 1e-10


def test_one_axis_cannot_split_both_axes_of_a_result() -> None:
    on = mesh("explicit")
    x, w = (jax.device_put(a, NamedSharding(on, P("tp"))) for a in CASES["matmul-rows"].operands)
    with pytest.raises(Exception, match=r"packed_matmul: mesh axis 'tp' splits two axes.*reshard"):
        jq.matmul(x, w)


def test_operands_of_different_meshes() -> None:
    x, w = CASES["matmul-rows"].operands
    other = jax.make_mesh((8,), ("x",))
    x = jax.device_put(x, NamedSharding(other, P("x")))
    w = jax.device_put(w, NamedSharding(mesh("explicit"), P("tp")))
    with pytest.raises(ValueError, match="different meshes"):
        jq.matmul(x, w)


# Types in `jax.shard_map`: a result varies over the axes that an operand varies over.


@pytest.mark.parametrize("name", CASES)
def test_results_in_shard_map_vary_as_the_operands(name: str) -> None:
    """Refuses a result that differs between devices if it is declared replicated."""
    case = CASES[name]
    parts = [
        jax.tree.map(lambda a: jnp.concatenate([a, a]), x) for x in case.operands
    ]  # so that each shard has the shapes of the case
    specs = tuple(P("dp") for _ in parts)
    on = mesh("auto")
    options = {"mesh": on, "in_specs": specs}
    with pytest.raises(ValueError, match="replication which can't be statically inferred"):
        jax.eval_shape(jax.shard_map(case.function, out_specs=P(), **options), *parts)
    for check in (True, False):
        mapped = jax.shard_map(case.function, out_specs=P("dp"), check_vma=check, **options)
        got = jax.tree.leaves(jax.eval_shape(mapped, *parts))
        want = jax.tree.leaves(jax.eval_shape(case.function, *case.operands))
        assert [(g.shape, g.dtype) for g in got] == [
            ((2 * w.shape[0], *w.shape[1:]), w.dtype) for w in want
        ]


@pytest.mark.slow("compiles a program for each case", quick=["xla-check=False"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_gradients_in_shard_map(implementation: str, check: bool) -> None:
    """Tensor-parallel products, and a replicated operand of data-parallel ones."""
    x, w, norm = normal(8, 1024), packed(64, 1024), normal(1024)
    on = mesh("auto")

    def local(function: Any, specs: Any, out: Any) -> Any:
        return jax.shard_map(function, mesh=on, in_specs=specs, out_specs=out, check_vma=check)

    rows = local(f32(jq.matmul), (WHOLE, ROWS), COLUMNS)
    columns = local(
        lambda x, w: jax.lax.psum(jq.matmul(x, w, activations="f32"), "tp"),
        (COLUMNS, COLUMNS),
        WHOLE,
    )
    data = local(
        lambda norm, x: jax.lax.psum(jnp.sum(jq.rms_norm(x, norm, eps=1e-5) ** 3), "dp"),
        (WHOLE, BATCH),
        WHOLE,
    )
    with jq.implementation(implementation):  # type: ignore[arg-type]
        for mapped, plain, operands in (
            (rows, f32(jq.matmul), (x, w)),
            (columns, f32(jq.matmul), (x, w)),
            (data, lambda norm, x: jnp.sum(jq.rms_norm(x, norm, eps=1e-5) ** 3), (norm, x)),
        ):
            gradients = [
                jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2)))(*operands)
                for f in (mapped, plain)
            ]
            assert nmse(*gradients) <= 1e-10


def test_carries_and_branches_in_shard_map() -> None:
    x, w = normal(8, 256), packed(1024, 256)

    def looped(x: Any, w: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return jnp.tanh(jq.matmul(x, w, activations="f32")), None

        x = jax.lax.pcast(x, "tp", to="varying")
        carried, _ = jax.lax.scan(step, x, length=3)

        def product() -> jax.Array:
            return jq.matmul(x, w, activations="f32")

        return jax.lax.cond(jnp.sum(carried) > 0, product, lambda: carried)

    mapped = jax.shard_map(looped, mesh=mesh("auto"), in_specs=(WHOLE, ROWS), out_specs=ROWS)
    results = jax.jit(mapped)(x, w).reshape(4, 8, 256)
    for part, got in zip(range(4), results, strict=True):
        rows, want = w[256 * part : 256 * part + 256], x
        for _ in range(3):
            want = jnp.tanh(jq.matmul(want, rows, activations="f32"))
        want = jq.matmul(x, rows, activations="f32") if jnp.sum(want) > 0 else want
        assert nmse(got, want) <= 1e-10
