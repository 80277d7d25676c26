"""Linear attention by the gated delta rule, whose state decays and is corrected per token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels.limits import gated_delta_takes

from ..native import calls
from ..sharding.layout import Layout
from . import checks
from .op import KernelCall, Op
from .vmaps import by_rows

#: Tokens per chunk in plain JAX, and the sequence length up to which it runs token by token.
CHUNK, FEW = 64, 16


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    *,
    scale: float | None = None,
    tiled: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention over a sequence by the gated delta rule, in float32.

    Each v head has a state S (key_dim, value_dim). For each token, in this order, the state decays,
    is corrected at the token's key, and is read at its query:

        S *= exp(g);  S += k (beta (v - S^T k))^T;  o = scale * S^T q

    This is the rule of Gated Delta Networks (https://arxiv.org/abs/2412.06464). The caller
    normalizes q and k. PTX kernels take a key_dim that is a multiple of 8 up to 128 or of 16 up to
    256, and a value_dim that is a multiple of 16 up to 256; native kernels take multiples of 16 up
    to 576. Other heads run in plain JAX.

    A token with beta = 0 and g = 0 is padding: the state stays the same bit for bit, whatever k and
    v hold, even NaN, and derivatives in its k, v and beta are zero. Its o is what its q reads.

    Args:
      q, k: (batch, time, num_k_heads, key_dim) float32, bfloat16 or float16.
      v: (batch, time, num_v_heads, value_dim) of these dtypes.
      g, beta: (batch, time, num_v_heads) of these dtypes: the logarithm of the decay, at most 0,
        and the fraction of the correction that is applied.
      state: (batch, num_v_heads, key_dim, value_dim) float32.
      scale: None means key_dim ** -0.5.
      tiled: v head h uses k head h % num_k_heads (Qwen 3.5's GGUF files); otherwise h //
        (num_v_heads / num_k_heads).

    Returns:
      o (batch, time, num_v_heads, value_dim) of v's dtype, and the state after the last token. A
      donated state is updated in place. Differentiable.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit.
    """
    q, k, v, g, beta = (
        checks.float_array(name, x)
        for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
    )
    if q.ndim != 4 or not all(q.shape[2:]):
        rule = "(batch, time, num_k_heads, key_dim), with a head and a dimension"
        raise ValueError(f"q has shape {q.shape}; it must be {rule}")
    batch, time, num_k_heads, key_dim = q.shape
    checks.same_shape("k", k, q.shape, "q's shape")
    if v.ndim != 4 or v.shape[:2] != (batch, time) or not v.shape[3]:
        rule = f"({batch}, {time}, num_v_heads, value_dim), as q is"
        raise ValueError(f"v has shape {v.shape}; it must be {rule}")
    num_v_heads = checks.v_heads(v.shape[2], num_k_heads)
    for name, x in (("g", g), ("beta", beta)):
        checks.same_shape(name, x, v.shape[:3], "(batch, time, num_v_heads)")
    state = checks.float_array("state", state, checks.FLOAT32)
    rule = "(batch, num_v_heads, key_dim, value_dim)"
    checks.same_shape("state", state, (batch, num_v_heads, key_dim, v.shape[3]), rule)
    params = {
        "scale": key_dim**-0.5 if scale is None else checks.positive("scale", scale),
        "tiled": checks.flag("tiled", tiled),
    }
    if v.size == 0:
        return v, state
    o, state = _op.bind(*(x.astype(jnp.float32) for x in (q, k, v, g, beta)), state, **params)
    return o.astype(v.dtype), state


def of_v_heads(x: jax.Array, num_v_heads: int, axis: int, tiled: bool) -> jax.Array:
    """Repeats x's k heads along `axis`, so that the axis has one entry per v head."""
    copies = num_v_heads // x.shape[axis]
    if copies == 1:
        return x
    if tiled:
        return jnp.concatenate([x] * copies, axis=axis)
    return jnp.repeat(x, copies, axis=axis)


def token(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Applies the rule to one token: returns the new state and the token's o.

    state (batch, heads, key_dim, value_dim); q and k (batch, heads, key_dim); v (batch, heads,
    value_dim); g and beta (batch, heads).
    """
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    padding = ((beta == 0) & (g == 0))[..., None]
    k, v = jnp.where(padding, 0, k), jnp.where(padding, 0, v)
    decayed = state * jnp.exp(g)[..., None, None]
    d = beta[..., None] * (v - product("bhkv,bhk->bhv", decayed, k))
    after = decayed + k[..., :, None] * d[..., None, :]
    after = jnp.where(padding[..., None], state, after)
    return after, scale * product("bhkv,bhk->bhv", after, q)


def stepwise(*operands: jax.Array, scale: float, tiled: bool) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` in plain JAX, token by token."""
    q, k, v, g, beta, state = operands
    q, k = (of_v_heads(x, v.shape[2], 2, tiled) for x in (q, k))
    if v.shape[1] == 1:
        state, o = token(state, *(x[:, 0] for x in (q, k, v, g, beta)), scale=scale)
        return o[:, None], state
    state, o = jax.lax.scan(
        lambda state, inputs: token(state, *inputs, scale=scale),
        state,
        tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)),
    )
    return jnp.moveaxis(o, 0, 1), state


def chunked(*operands: jax.Array, scale: float, tiled: bool) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` in plain JAX, by matrix products over CHUNK tokens at a time.

    Let G be the sums of g from the start of a chunk. The corrections d solve
    (1 + M) d = beta (v - exp(G) S^T k), where M[i, j] = beta_i (k_i . k_j) exp(G_i - G_j) for
    j < i. So d = U - W S, and U and W do not depend on the state. See section 3.3 of the paper.
    """
    q, k, v, g, beta, state = operands
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    time = v.shape[1]
    padding = ((beta == 0) & (g == 0))[..., None]
    q, k = (of_v_heads(x, v.shape[2], 2, tiled) for x in (q, k))
    k, v = jnp.where(padding, 0, k), jnp.where(padding, 0, v)
    q, k, v, g, beta, padding = (_in_chunks(x, time) for x in (q * scale, k, v, g, beta, padding))

    row, column = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)
    # G_i - G_j is summed directly: the difference of two large sums would have few digits left, and
    # above the diagonal its exp might be infinite
    spans = jnp.cumsum(jnp.where(row > column, g[..., None], 0), axis=-2)
    decay = jnp.where(row >= column, jnp.exp(spans), 0)  # from after token j to after token i
    so_far = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]
    m = beta[..., None] * product("nbhik,nbhjk->nbhij", k, k) * decay
    solved = jax.lax.linalg.triangular_solve(
        jnp.where(row > column, m, 0),
        beta[..., None] * jnp.concatenate([v, k * so_far], axis=-1),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    seen = product("nbhik,nbhjk->nbhij", q, k) * decay
    left = k * decay[..., -1, :, None]  # each token's key, decayed to the end of the chunk

    def chunk(state: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        q, u, w, seen, left, decay, idle = inputs
        d = u - product("bhik,bhkv->bhiv", w, state)
        o = product("bhik,bhkv->bhiv", q, state) + product("bhij,bhjv->bhiv", seen, d)
        after = state * decay[..., None] + product("bhik,bhiv->bhkv", left, d)
        return jnp.where(idle[..., None], state, after), o

    idle = jnp.all(padding, axis=-2)
    state, o = jax.lax.scan(chunk, state, (q * so_far, u, w, seen, left, so_far[..., -1, :], idle))
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # (batch, chunks, CHUNK, heads, value_dim)
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :time], state


def _in_chunks(x: jax.Array, time: int) -> jax.Array:
    """Pads x (batch, time, heads, ...) at its end; returns (chunks, batch, heads, CHUNK, ...).

    The padding is True for booleans, which mark padding, and 0 for all else.
    """
    more = -time % CHUNK
    x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2), constant_values=x.dtype == bool)
    x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def reference(*operands: jax.Array, scale: float, tiled: bool) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` in plain JAX; all operands are floats of one dtype."""
    form = stepwise if operands[0].shape[1] <= FEW else chunked
    return form(*operands, scale=scale, tiled=tiled)


def ptx(launch: KernelCall, *operands: jax.Array, scale: float, tiled: bool) -> Sequence[jax.Array]:
    """`gated_delta_rule` by a PTX kernel, or in plain JAX for head sizes without a kernel."""
    from ptx_kernels.kernels.gated_delta import gated_delta_rule as rule_kernel
    from ptx_kernels.kernels.gated_delta import gated_delta_rule_rule
    from ptx_kernels.tuning import choose

    (batch, time, num_k_heads, key_dim), (_, _, num_v_heads, value_dim) = (
        x.shape for x in (operands[0], operands[2])
    )
    if not gated_delta_takes(key_dim, value_dim):
        return reference(*operands, scale=scale, tiled=tiled)
    kernel = rule_kernel(
        batch=batch,
        time=time,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
        tiled=tiled,
        config=choose(gated_delta_rule_rule, batch, num_v_heads, key_dim, value_dim),
    )
    return launch(kernel, *operands)


def native(*operands: jax.Array, scale: float, tiled: bool) -> Any:
    """`gated_delta_rule` by a native kernel, in place, or in plain JAX for other head sizes."""
    if not calls.has_heads(*operands[-1].shape[2:]):
        return reference(*operands, scale=scale, tiled=tiled)
    return tuple(calls.gated_delta_rule(*operands, scale=scale, tiled=tiled))


def _layout(*_: Any, scale: float, tiled: bool) -> Layout:
    # tiled: the k heads of a device's v heads are not a contiguous part of all k heads
    keys, values, h = ("b", "b", "_") if tiled else ("b _ h _", "b _ h _", "h")
    gates, state = f"b _ {h}", f"b {h}"
    return Layout((keys, keys, values, gates, gates, state), (values, state))


_op = Op(
    "gated_delta_rule",
    reference,
    shapes=lambda q, k, v, g, beta, state, **_: (v, state),
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=6),  # examples enlarge the batch
    derivative="reference",
    layout=_layout,
)
