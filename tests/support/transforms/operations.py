"""Calls of every public operation, each with a reference in plain JAX on decoded weights.

References run in float64. Shapes are small and can be split over two devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_q4k as jq
from ptx_kernels.kernels.operands import random_blocks

#: Dtypes of activations; other operands keep theirs.
DTYPES = ("float32", "bfloat16", "float16")
EPS = 1e-5
WHOLE, ROWS, HEADS = P(), P("x"), P(None, "x")


class Refusal(NamedTuple):
    """An error type and part of its message."""

    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return f"{self.error.__name__}: {self.message}"


class Case(NamedTuple):
    """A call of an operation.

    Attributes:
      operation: its name in `jax_q4k`.
      call, oracle: functions of the operands; the oracle's operands are float64, packed ones
        decoded.
      operands: float32 arrays, integers, QuantizedArrays.
      specs, results: partition specs of operands and results over an axis "x" of two devices.
      variant: distinguishes it from other calls of the operation.
      examples, weights: operands that `vmap` maps: those that differ between calls, and parameters.
      activations: operands that have one of DTYPES.
      moving: operands to differentiate with respect to; () if none is a float.
      linear: the operand that the operation is linear in.
      refuses: transform -> its Refusal; "derivative" stands for all that need a derivative.
    """

    operation: str
    call: Callable[..., Any]
    oracle: Callable[..., Any]
    operands: tuple[Any, ...]
    specs: tuple[P, ...]
    results: Any
    variant: str = ""
    examples: tuple[int, ...] = (0,)
    weights: tuple[int, ...] = (1,)
    activations: tuple[int, ...] = (0,)
    moving: tuple[int, ...] = (0,)
    linear: int | None = None
    refuses: dict[str, Refusal] = {}

    @property
    def differentiable(self) -> bool:
        return bool(self.moving) and "derivative" not in self.refuses

    @property
    def name(self) -> str:
        return f"{self.operation} {self.variant}".strip()

    def given(self, dtype: str) -> tuple[Any, ...]:
        """Operands with activations cast to `dtype`."""
        return tuple(
            a.astype(dtype) if i in self.activations else a for i, a in enumerate(self.operands)
        )


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def packed(n: int, k: int, format: str = "Q4_K") -> jq.QuantizedArray:
    """Random blocks, scaled so that products with normal activations are about 1/2."""
    block = jq.formats.get(format)
    raw = random_blocks(format, (n, k // block.block_size), np.random.default_rng((n, k)))
    size = 2 * np.sqrt(k * np.mean(block.decode(block.split(raw)) ** 2))
    for at in map(block.offset, block.f16_fields):
        scale = raw[..., at : at + 2].view(np.float16)
        scale[...] = scale / size
    return jq.QuantizedArray.from_gguf_bytes(raw, format, (n, k))


def stack(experts: int, n: int, k: int, format: str = "Q4_K") -> jq.QuantizedArray:
    """Random blocks of matrices (experts, n, k)."""
    w = packed(experts * n, k, format)
    return jax.tree.map(lambda plane: np.reshape(plane, (experts, n, *plane.shape[1:])), w)


def no_derivative(name: str) -> dict[str, Refusal]:
    return {"derivative": Refusal(NotImplementedError, f"{name} has no derivative")}


def _rms_norm(x: Any, weight: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS) * weight


def _gated(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate.T) * (x @ up.T)


def products() -> list[Case]:
    x, residual, bias, norm = normal(4, 256), normal(4, 8), normal(8), normal(256)
    w, w2, floats = packed(8, 256), packed(4, 256, "Q6_K"), normal(8, 256) / 16
    gate, up, down = packed(256, 256), packed(256, 256, "Q8_0"), packed(8, 256, "Q6_K")
    two = (ROWS, WHOLE)
    return [
        Case("matmul", jq.matmul, lambda x, w: x @ w.T, (x, w), two, ROWS, linear=0),
        Case(
            "matmul",
            lambda x, w: x @ w.T,
            lambda x, w: x @ w.T,
            (x, w),
            two,
            ROWS,
            "by w.T",
            linear=0,
        ),
        Case(
            "matmul",
            lambda x, w, b, r: jq.matmul(x, w, bias=b, residual=r),
            lambda x, w, b, r: r + x @ w.T + b,
            (x, w, bias, residual),
            (ROWS, WHOLE, WHOLE, ROWS),
            ROWS,
            "with bias and residual",
            examples=(0, 3),
            weights=(1, 2),
            activations=(0, 2, 3),
            moving=(0, 2, 3),
        ),
        Case(
            "matmul",
            jq.matmul,
            lambda x, w: x @ w.T,
            (x, floats),
            two,
            ROWS,
            "of floats",
            activations=(0, 1),
            moving=(0, 1),
            linear=0,
        ),
        Case(
            "matmul",
            lambda x, w, i: jq.matmul(x, w, index=i),
            lambda x, w, i: x @ w[i].T,
            (
                x,
                jax.tree.map(lambda *planes: np.stack(planes), w, packed(8, 256)[::-1]),
                np.array(1),
            ),
            (ROWS, WHOLE, WHOLE),
            ROWS,
            "of a stack, by index",
            linear=0,
        ),
        Case(
            "linear",
            lambda x, n, w, b, r: jq.linear(x, [w], norm_weight=n, eps=EPS, biases=[b], residual=r)[
                0
            ],
            lambda x, n, w, b, r: r + _rms_norm(x, n) @ w.T + b,
            (x, norm, w, bias, residual),
            (ROWS, WHOLE, WHOLE, WHOLE, ROWS),
            ROWS,
            examples=(0, 4),
            weights=(1, 2, 3),
            activations=(0, 1, 3, 4),
            moving=(0, 1, 3, 4),
        ),
        Case(
            "rms_norm_matmul",
            lambda x, n, w: jq.rms_norm_matmul(x, n, w, eps=EPS),
            lambda x, n, w: _rms_norm(x, n) @ w.T,
            (x, norm, w),
            (ROWS, WHOLE, WHOLE),
            ROWS,
            weights=(1, 2),
            activations=(0, 1),
            moving=(0, 1),
        ),
        Case(
            "qkv_matmul",
            lambda x, *w: jq.qkv_matmul(x, w),
            lambda x, *weights: tuple(x @ w.T for w in weights),
            (x, w, w2),
            (ROWS, WHOLE, WHOLE),
            (ROWS, ROWS),
            weights=(1, 2),
            linear=0,
        ),
        Case(
            "gated_matmul",
            jq.gated_matmul,
            _gated,
            (x, w, packed(8, 256, "Q5_K")),
            (ROWS, WHOLE, WHOLE),
            ROWS,
            weights=(1, 2),
        ),
        Case(
            "mlp",
            lambda x, g, u, d, n, r: jq.mlp(x, g, u, d, norm_weight=n, eps=EPS, residual=r),
            lambda x, g, u, d, n, r: r + _gated(_rms_norm(x, n), g, u) @ d.T,
            (x, gate, up, down, norm, residual),
            (ROWS, WHOLE, WHOLE, WHOLE, WHOLE, ROWS),
            ROWS,
            examples=(0, 5),
            weights=(1, 2, 3, 4),
            activations=(0, 4, 5),
            moving=(0, 4, 5),
        ),
    ]


def experts() -> list[Case]:
    """Cases with four experts; tokens choose two, and one token only one."""
    x, residual, norm, logits = normal(4, 256), normal(4, 8), normal(256), normal(4, 6)
    ids, weights = np.array([[3, 0], [1, 2], [2, -1], [3, 1]]), abs(normal(4, 2))
    w, floats = stack(4, 8, 256), normal(4, 8, 256) / 16
    gate, up, down = stack(4, 256, 256), stack(4, 256, 256, "Q8_0"), stack(4, 8, 256, "Q6_K")
    shared = packed(256, 256), packed(256, 256, "Q8_0"), packed(8, 256, "Q6_K")
    biases, scale = normal(4, 256) / 4, abs(normal(4))
    of_rows = (ROWS, WHOLE, ROWS)
    return [
        Case(
            "route",
            lambda x, b: jq.route(
                x, 2, gating="sigmoid", bias=b, groups=3, groups_used=2, scale=1.5
            ),
            _route,
            (logits, normal(6)),
            (ROWS, WHOLE),
            (ROWS, ROWS),
            weights=(1,),
        ),
        Case(
            "expert_matmul",
            jq.expert_matmul,
            _expert_products,
            (x, w, ids),
            of_rows,
            ROWS,
            examples=(0, 2),
            linear=0,
        ),
        Case(
            "expert_matmul",
            jq.expert_matmul,
            lambda x, w, ids: _expert_products(x, w, ids),
            (normal(4, 2, 256), floats, ids),
            of_rows,
            ROWS,
            "of floats, a row for each",
            examples=(0, 2),
            activations=(0, 1),
            moving=(0, 1),
            linear=0,
        ),
        Case(
            "expert_mlp",
            lambda x, g, u, d, i, p, n, b, s, r: jq.expert_mlp(
                *(x, g, u, d, i, p), **_around_experts(n, b, s, r)
            ),
            _expert_mlp,
            (x, gate, up, down, ids, weights, norm, biases, scale, residual),
            (ROWS, WHOLE, WHOLE, WHOLE, ROWS, ROWS, WHOLE, WHOLE, WHOLE, ROWS),
            ROWS,
            examples=(0, 4, 5, 9),
            weights=(1, 2, 3, 6, 7, 8),
            activations=(0, 6, 9),
            moving=(0, 5, 6, 7, 8, 9),
        ),
        Case(
            "routed_mlp",
            lambda x, p, g, u, d, n, b, s, r: jq.routed_mlp(
                *(x, p, g, u, d, 2),
                gating="sigmoid",
                scale=1.5,
                **_around_experts(n, b, s, r),
            ),
            _routed_mlp,
            (x, logits[:, :4], gate, up, down, norm, biases, scale, residual),
            (ROWS, ROWS, *(WHOLE,) * 6, ROWS),
            ROWS,
            examples=(0, 1, 8),
            weights=(2, 3, 4, 5, 6, 7),
            activations=(0, 5, 8),
            moving=(0, 1, 5, 6, 7, 8),
        ),
        Case(
            "routed_mlp",
            lambda x, p, s, g, u, d, n, r, *shared: jq.routed_mlp(
                *(x, p, g, u, d, 2),
                gating="sigmoid",
                scale=1.5,
                norm_weight=n,
                eps=EPS,
                residual=r,
                shared=shared,
                shared_logits=s,
            ),
            _with_a_shared_expert,
            (x, logits[:, :4], normal(4, 1), gate, up, down, norm, residual, *shared),
            (*(ROWS,) * 3, *(WHOLE,) * 4, ROWS, *(WHOLE,) * 3),
            ROWS,
            "with a shared expert",
            examples=(0, 1, 2, 7),
            weights=(3, 4, 5, 6, 8, 9, 10),
            activations=(0, 6, 7),
            moving=(0, 1, 2, 6, 7),
        ),
    ]


def _around_experts(norm: Any, bias: Any, scale: Any, residual: Any) -> dict[str, Any]:
    """Arguments of `expert_mlp` and `routed_mlp` other than the matrices."""
    return {
        "activation": "swiglu_oai",
        "biases": (bias, bias, None),
        "down_scale": scale,
        "norm_weight": norm,
        "eps": EPS,
        "residual": residual,
    }


def _route(logits: Any, bias: Any) -> Any:
    scores = 1 / (1 + jnp.exp(-logits))
    best = jnp.sum((scores + bias).reshape(-1, 3, 2), axis=-1)
    allowed = jnp.repeat(best > jnp.min(best, axis=-1, keepdims=True), 2, axis=-1)
    return _two_best(jnp.where(allowed, scores + bias, -jnp.inf), scores)


def _two_best(ranks: Any, scores: Any) -> Any:
    """Returns ids, and weights whose sum is 1.5."""
    _, ids = jax.lax.top_k(ranks, 2)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    return ids.astype(jnp.int32), 1.5 * weights / jnp.sum(weights, axis=-1, keepdims=True)


def _expert_products(x: Any, w: Any, ids: Any) -> Any:
    x = jnp.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    return jnp.where(ids[..., None] < 0, 0, jnp.einsum("mtnk,mtk->mtn", w[ids], x))


def _expert_mlp(
    x: Any, g: Any, u: Any, d: Any, ids: Any, p: Any, norm: Any, b: Any, scale: Any, residual: Any
) -> Any:
    x = _rms_norm(x, norm)
    gate = jnp.minimum(_expert_products(x, g, ids) + b[ids], 7)
    up = jnp.clip(_expert_products(x, u, ids) + b[ids], -7, 7)
    h = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return residual + jnp.einsum("mtn,mt->mn", _expert_products(h, d, ids), p * scale[ids])


def _routed_mlp(x: Any, logits: Any, g: Any, u: Any, d: Any, *rest: Any) -> Any:
    scores = 1 / (1 + jnp.exp(-logits))
    return _expert_mlp(x, g, u, d, *_two_best(scores, scores), *rest)


def _with_a_shared_expert(
    x: Any, logits: Any, gate: Any, g: Any, u: Any, d: Any, norm: Any, residual: Any, *shared: Any
) -> Any:
    scores, h = 1 / (1 + jnp.exp(-logits)), _rms_norm(x, norm)
    ids, weights = _two_best(scores, scores)
    own_gate, own_up = (h @ w.T for w in shared[:2])
    y = residual + jax.nn.sigmoid(gate) * ((jax.nn.silu(own_gate) * own_up) @ shared[2].T)
    inner = jax.nn.silu(_expert_products(h, g, ids)) * _expert_products(h, u, ids)
    return y + jnp.einsum("mtn,mt->mn", _expert_products(inner, d, ids), weights)


def rows() -> list[Case]:
    x, w, norm, table = normal(4, 256), packed(8, 256), normal(256), normal(8, 32)
    on_grid = np.round(40 * normal(8, 64)).clip(-126, 126)
    on_grid[:, ::32] = 127  # so that Q8_0's scale is 1
    ids = np.array([3, 0, 7, 3])
    return [
        Case(
            "embedding",
            jq.embedding,
            lambda ids, w: w[ids],
            (ids, w),
            (ROWS, WHOLE),
            ROWS,
            activations=(),
            moving=(),
        ),
        Case(
            "embedding",
            lambda ids, w: jq.embedding(ids, w, w.dtype),
            lambda ids, w: w[ids],
            (ids, table),
            (ROWS, WHOLE),
            ROWS,
            "of floats",
            activations=(1,),
            moving=(1,),
            linear=1,
        ),
        Case(
            "dequantize",
            jq.dequantize,
            lambda w: w,
            (w,),
            (ROWS,),
            ROWS,
            examples=(),
            weights=(0,),
            activations=(),
            moving=(),
        ),
        Case(
            "quantize",
            lambda w: jq.quantize(w, "Q8_0").dequantize(),
            lambda w: w,
            (on_grid,),
            (ROWS,),
            ROWS,
            weights=(),
            activations=(),
            refuses=no_derivative("quantize"),
        ),
        Case(
            "rms_norm",
            lambda x, n: jq.rms_norm(x, n, eps=EPS),
            _rms_norm,
            (x, norm),
            (ROWS, WHOLE),
            ROWS,
            activations=(0, 1),
            moving=(0, 1),
        ),
        Case(
            "rms_norm",
            lambda x, n, r: jq.rms_norm(x, n, eps=EPS, residual=r),
            lambda x, n, r: r + _rms_norm(x, n),
            (x, norm, x[::-1]),
            (ROWS, WHOLE, ROWS),
            ROWS,
            variant="with a residual",
            examples=(0, 2),
            activations=(0, 1, 2),
            moving=(0, 1, 2),
        ),
        Case(
            "quantize_q8_1",
            jq.quantize_q8_1,
            _q8_1,
            (normal(4, 64),),
            (ROWS,),
            (ROWS, ROWS),
            weights=(),
            refuses=no_derivative("quantize_q8_1"),
        ),
        Case(
            "argmax",
            jq.argmax,
            lambda x: jnp.argmax(x, axis=-1),
            (normal(4, 32),),
            (ROWS,),
            ROWS,
            weights=(),
        ),
        Case(
            "top_k",
            lambda x: jq.top_k(x, 5),
            lambda x: tuple(jax.lax.top_k(x, 5)),
            (normal(4, 32),),
            (ROWS,),
            (ROWS, ROWS),
            weights=(),
        ),
    ]


def _q8_1(x: Any) -> Any:
    groups = x.reshape(x.shape[0], -1, 32)
    scale = jnp.max(jnp.abs(groups), axis=-1) / 127
    values = jnp.round(groups / scale[..., None])
    pairs = jnp.stack([scale, scale * jnp.sum(values, axis=-1)], axis=-1)
    return values.reshape(x.shape), pairs


# --- attention ---

HEAD_DIM, GROUPS = 32, 2
TABLE, LENGTHS = np.array([[0, 2], [1, 3]]), np.array([20, 30])
SLOTS = np.array([3, 17])


def _causal(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    k, v = (jnp.repeat(a, GROUPS, axis=2) for a in (k, v))
    at = jnp.arange(q.shape[1])
    seen = (at <= at[:, None]) & (at < lengths[:, None, None])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def _attention(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """Attention of q (batch, heads, head_dim) to the first `lengths` tokens.

    k, v are (batch, kv heads, time, ...).
    """
    k, v = (jnp.repeat(a, GROUPS, axis=1) for a in (k, v))
    scores = jnp.einsum("bhd,bhtd->bht", q, k) / HEAD_DIM**0.5
    seen = jnp.arange(k.shape[2]) < lengths[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bht,bhtd->bhd", jax.nn.softmax(scores, axis=-1), v)


def _paged(q: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any) -> Any:
    k, v = (
        jnp.moveaxis(pages[table], 2, 1).reshape(q.shape[0], pages.shape[1], -1, HEAD_DIM)
        for pages in (k_pages, v_pages)
    )
    return _attention(q, k, v, lengths)


def _pieces(q: Any, k: Any, v: Any, table: Any, lengths: Any, new: Any) -> Any:
    """Attention of chunks q (batch, time, heads, head_dim); padding gets zeros."""
    steps = jnp.arange(q.shape[1])
    seen = jnp.where(steps < new[:, None], (lengths - new)[:, None] + steps + 1, 1)
    out = jax.vmap(lambda q, n: _paged(q, k, v, table, n), 1, 1)(q, seen)
    return jnp.where((steps < new[:, None])[..., None, None], out, 0)


def _latent(q: Any, pages: Any, table: Any, lengths: Any) -> Any:
    """Attention to latent rows, whose first 32 elements are the values."""
    rows = jnp.repeat(pages[table].reshape(q.shape[0], 1, -1, q.shape[2]), q.shape[1], axis=1)
    scores = jnp.einsum("bhd,bhtd->bht", q, rows) / q.shape[2] ** 0.5
    seen = jnp.arange(rows.shape[2]) < lengths[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bht,bhtd->bhd", weights, rows[..., :HEAD_DIM])


def _append(k_pages: Any, v_pages: Any, k: Any, v: Any, slots: Any) -> Any:
    size = k_pages.shape[2]
    return tuple(
        pages.at[slots // size, :, slots % size].set(new)
        for pages, new in ((k_pages, k), (v_pages, v))
    )


def _delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
    """Runs token by token; v head h uses k head h % num_k_heads."""
    q, k = (jnp.tile(x, (1, 1, v.shape[2] // x.shape[2], 1)) for x in (q, k))

    def token(state: Any, of_token: Any) -> Any:
        q, k, v, g, beta = of_token
        state = state * jnp.exp(g)[..., None, None]
        missing = v - jnp.einsum("bhkv,bhk->bhv", state, k)
        state += jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * missing)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q) / q.shape[-1] ** 0.5

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    state, out = jax.lax.scan(token, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _delta_step(
    qkv: Any, z: Any, alpha: Any, beta: Any, columns: Any, state: Any, at: Any, *weights: Any
) -> Any:
    """One step of sequences that are longer than the ring."""
    convolution, bias, decay, norm = weights
    (batch, heads, keys, values), width = state.shape, columns.shape[1]
    columns = columns.at[jnp.arange(batch), at % width].set(qkv)
    past = (at[:, None] + 1 + jnp.arange(width)) % width  # slots, oldest first
    u = jax.nn.silu(
        jnp.einsum("bwc,cw->bc", columns[jnp.arange(batch)[:, None], past], convolution)
    )
    q, k = jnp.moveaxis(u[:, : -heads * values].reshape(batch, 2, -1, keys), 1, 0)
    q, k = (x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + EPS) for x in (q, k))
    gates = jnp.logaddexp(alpha + bias, 0) * decay, jax.nn.sigmoid(beta)
    v = u[:, -heads * values :].reshape(batch, 1, heads, values)
    o, state = _delta_rule(q[:, None], k[:, None], v, *(g[:, None] for g in gates), state)
    y = _rms_norm(o[:, 0], norm) * jax.nn.silu(z.reshape(batch, heads, values))
    return y.reshape(z.shape), columns, state


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def _rotate_pairs(x: Any, cos: Any, sin: Any) -> Any:
    """Rotates pairs of neighbors."""
    cos, sin = cos[:, None], sin[:, None]
    pairs, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = pairs[..., 0::2], pairs[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(pairs.shape)
    return jnp.concatenate([turned, rest], axis=-1)


def _rope_append(q: Any, k: Any, v: Any, kp: Any, vp: Any, slots: Any, cos: Any, sin: Any) -> Any:
    return _rotate(q, cos, sin), *_append(kp, vp, _rotate(k, cos, sin), v, slots)


def _latent_rope_append(q: Any, k: Any, pages: Any, slots: Any, cos: Any, sin: Any) -> Any:
    rank = k.shape[-1] - 2 * cos.shape[-1]
    row = jnp.concatenate([k[..., :rank], _rotate(k[..., rank:], cos, sin)], axis=-1)
    stored = pages.at[slots // 16, :, slots % 16].set(row)
    return _rotate(q[..., 8:], cos, sin), q[..., :8], stored


def _qkv_rope_append(x: Any, wq: Any, wk: Any, wv: Any, *around: Any) -> Any:
    kp, vp, slots, cos, sin = around
    q, k, v = ((x @ w.T).reshape(len(x), -1, HEAD_DIM) for w in (wq, wk, wv))
    q, k = (_rotate_pairs(y, cos, sin) for y in (q, k))
    return q, *_append(kp, vp, k, v, slots)


def attentions() -> list[Case]:
    pages = normal(4, 2, 16, HEAD_DIM), normal(4, 2, 16, HEAD_DIM)[::-1]
    q, k, v = normal(2, 4, HEAD_DIM), normal(2, 2, HEAD_DIM), normal(2, 2, HEAD_DIM)[::-1]
    angles = normal(2, 8)
    cos, sin = np.cos(angles), np.sin(angles)
    wide = np.cos(normal(2, 16)), np.sin(normal(2, 16))
    prompt, keys = normal(2, 6, 4, HEAD_DIM), normal(2, 6, 2, HEAD_DIM)
    contiguous = normal(2, 2, 32, HEAD_DIM)
    matrices = [packed(n * HEAD_DIM, 256, f) for n, f in ((4, "Q4_K"), (2, "Q6_K"), (2, "Q4_K"))]
    over_pages = (HEADS, HEADS, HEADS, WHOLE, WHOLE)
    w = packed(8, 4 * HEAD_DIM, "Q8_0")
    return [
        Case(
            "rotate",
            functools.partial(jq.rotate, interleaved=False),
            _rotate,
            (q, cos, sin),
            (ROWS,) * 3,
            ROWS,
            examples=(0, 1, 2),
            weights=(),
            linear=0,
        ),
        Case(
            "causal_attention",
            jq.causal_attention,
            _causal,
            (prompt, keys, keys[::-1], np.array([6, 6])),
            (ROWS,) * 4,
            ROWS,
            examples=(0, 1, 2),
            weights=(),
            activations=(0, 1, 2),
            moving=(0, 1, 2),
        ),
        Case(
            "attention",
            jq.attention,
            _attention,
            (q, contiguous, contiguous[::-1], np.array([20, 32])),
            (ROWS,) * 4,
            ROWS,
            examples=(0,),
            weights=(1, 2),
            refuses=no_derivative("paged_attention"),
        ),
        Case(
            "paged_attention",
            jq.paged_attention,
            _paged,
            (q, *pages, TABLE, LENGTHS),
            over_pages,
            HEADS,
            examples=(0, 3, 4),
            weights=(1, 2),
            refuses=no_derivative("paged_attention"),
        ),
        Case(
            "paged_attention",
            lambda q, pages, table, lengths: jq.paged_attention(
                q, pages, None, table, lengths, value_dim=HEAD_DIM
            ),
            _latent,
            (normal(2, 4, 64), normal(4, 1, 16, 64), TABLE, LENGTHS),
            (HEADS, WHOLE, WHOLE, WHOLE),
            HEADS,
            variant="of latent pages",
            examples=(0, 2, 3),
            refuses=no_derivative("paged_attention"),
        ),
        Case(
            "paged_attention",
            lambda q, rest, pages, table, lengths: jq.paged_attention(
                q, pages, None, table, lengths, value_dim=32, q_rest=rest
            ),
            lambda q, rest, *args: _latent(jnp.concatenate([q, rest], -1), *args)[..., :32],
            (normal(2, 4, 32), normal(2, 4, 32), normal(4, 1, 16, 64), TABLE, LENGTHS),
            (HEADS, HEADS, WHOLE, WHOLE, WHOLE),
            HEADS,
            variant="of queries in two arrays",
            examples=(0, 1, 3, 4),
            refuses=no_derivative("paged_attention"),
        ),
        Case(
            "paged_attention",
            lambda q, gate, *rest: jq.paged_attention(q, *rest, gate=gate),
            lambda q, gate, *rest: _paged(q, *rest) * jax.nn.sigmoid(gate),
            (q, q[::-1], *pages, TABLE, LENGTHS),
            (HEADS, *over_pages),
            HEADS,
            variant="with a gate",
            examples=(0, 1, 4, 5),
            weights=(2, 3),
            refuses=no_derivative("paged_attention"),
        ),
        Case(
            "paged_attention",
            lambda q, k, v, table, lengths, new: jq.paged_attention(
                q, k, v, table, lengths, lengths=new
            ),
            _pieces,
            (normal(2, 6, 4, HEAD_DIM), *pages, TABLE, LENGTHS, np.array([6, 4])),
            (ROWS, WHOLE, WHOLE, ROWS, ROWS, ROWS),
            ROWS,
            variant="of pieces",
            examples=(0, 3, 4, 5),
            weights=(1, 2),
            refuses=no_derivative("paged_attention"),
        ),
        Case(
            "paged_attention_matmul",
            jq.paged_attention_matmul,
            lambda q, k, v, t, n, w: _paged(q, k, v, t, n).reshape(2, -1) @ w.T,
            (q, *pages, TABLE, LENGTHS, w),
            (ROWS, WHOLE, WHOLE, ROWS, ROWS, WHOLE),
            ROWS,
            examples=(0, 3, 4),
            weights=(1, 2, 5),
            refuses=no_derivative("paged_attention_matmul"),
        ),
        Case(
            "append_kv",
            jq.append_kv,
            _append,
            (*pages, k, v, SLOTS),
            (HEADS, HEADS, HEADS, HEADS, WHOLE),
            (HEADS, HEADS),
            examples=(2, 3, 4),
            weights=(0, 1),
            activations=(2, 3),
            moving=(2, 3),
            refuses=no_derivative("append_kv"),
        ),
        Case(
            "append_kv",
            lambda pages, k, slots: jq.append_kv(pages, None, k, None, slots),
            lambda pages, k, slots: (pages.at[slots // 16, :, slots % 16].set(k),),
            (pages[0], k, SLOTS),
            (HEADS, HEADS, WHOLE),
            (HEADS,),
            variant="of latent pages",
            examples=(1, 2),
            weights=(0,),
            activations=(1,),
            moving=(1,),
            refuses=no_derivative("append_kv"),
        ),
        Case(
            "rope_append",
            functools.partial(jq.rope_append, interleaved=False),
            _rope_append,
            (q, k, v, *pages, SLOTS, cos, sin),
            (*[HEADS] * 5, WHOLE, WHOLE, WHOLE),
            (HEADS,) * 3,
            examples=(0, 1, 2, 5),
            weights=(3, 4),
            activations=(0, 1, 2),
            moving=(0, 1, 2),
            refuses=no_derivative("rope_append"),
        ),
        Case(
            "rope_append",
            lambda q, k, pages, slots, cos, sin: jq.rope_append(
                q, k, None, pages, None, slots, cos, sin, interleaved=False, q_rest=8
            ),
            _latent_rope_append,
            (normal(2, 4, 40), normal(2, 2, 64), normal(4, 2, 16, 64), SLOTS, *wide),
            (HEADS, HEADS, HEADS, WHOLE, WHOLE, WHOLE),
            (HEADS, HEADS, HEADS),
            variant="of latent pages",
            examples=(0, 1, 3),
            weights=(2,),
            activations=(0, 1),
            moving=(0, 1),
            refuses=no_derivative("rope_append"),
        ),
        Case(
            "qkv_rope_append",
            lambda x, q, *rest: jq.qkv_rope_append(x, (q, *rest[:2]), *rest[2:], interleaved=True),
            _qkv_rope_append,
            (normal(2, 256), *matrices, *pages, SLOTS, cos, sin),
            (WHOLE, ROWS, ROWS, ROWS, HEADS, HEADS, WHOLE, WHOLE, WHOLE),
            (HEADS,) * 3,
            examples=(0, 6),
            weights=(1, 2, 3, 4, 5),
            refuses=no_derivative("qkv_rope_append"),
        ),
    ]


def deltas() -> list[Case]:
    """Cases of gated delta nets: two k heads of 8, four v heads of 16."""
    q, k, v = normal(2, 18, 2, 8) / 3, normal(2, 18, 2, 8)[::-1] / 3, normal(2, 18, 4, 16)
    g, beta, state = -abs(normal(2, 18, 4)), 1 / (1 + abs(normal(2, 18, 4))), normal(2, 4, 8, 16)
    rule = functools.partial(jq.gated_delta_rule, tiled=True)
    weights = normal(96, 3), normal(4), -abs(normal(4)), normal(16)
    one = normal(2, 96), normal(2, 64), normal(2, 4), normal(2, 4)[::-1]
    shared = {
        "weights": (),
        "activations": tuple(range(5)),
        "moving": tuple(range(6)),
        "examples": tuple(range(6)),
    }
    return [
        Case(
            "gated_delta_rule",
            rule,
            _delta_rule,
            (*(x[:, :4] for x in (q, k, v, g, beta)), state),
            (ROWS,) * 6,
            (ROWS, ROWS),
            **shared,
        ),
        Case(
            "gated_delta_rule",
            rule,
            _delta_rule,
            (q, k, v, g, beta, state),
            (ROWS,) * 6,
            (ROWS, ROWS),
            "in chunks",
            **shared,
        ),
        Case(
            "gated_delta_step",
            lambda *a: jq.gated_delta_step(
                *a[:7],
                **dict(zip(("conv_weight", "dt_bias", "decay", "norm_weight"), a[7:], strict=True)),
                eps=EPS,
                tiled=True,
            ),
            _delta_step,
            (*one, normal(2, 3, 96), state, np.array([7, 2]), *weights),
            (*(ROWS,) * 7, *(WHOLE,) * 4),
            (ROWS,) * 3,
            examples=tuple(range(7)),
            weights=(7, 8, 9, 10),
            activations=(0, 1, 2, 3),
            moving=(0, 1, 2, 3),
            refuses=no_derivative("gated_delta_step"),
        ),
    ]


CASES = {case.name: case for case in [*products(), *experts(), *rows(), *attentions(), *deltas()]}
