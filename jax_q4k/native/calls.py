"""Calls the native C++ handlers: one function of arrays per handler.

The functions pass operands in the order, and attributes by the names, that the handlers expect.
Callers have checked shapes and dtypes; a mismatch raises a JaxRuntimeError when the program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import float_types
from ..arrays import QuantizedArray
from ..arrays.indexed import Packed
from ..selection import current_selection
from . import call, prepare

MAX_HEAD_DIM = 576  # of keys and values, in attention and delta nets; multiples of 16


def linear(
    x: jax.Array,
    weights: Sequence[Packed | jax.Array],
    *,
    quantized: bool,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    biases: Sequence[jax.Array | None] | None = None,
    residual: jax.Array | None = None,
    activation: str | None = None,
) -> list[jax.Array]:
    """Linear layers: [residual +] [rms_norm](x) @ w.T [+ bias] for each w.

    With `activation`, the two weights are a gate and an up projection, and the only result is
    activation(gate, up).

    x float32 (m, k); weights (n_i, k) packed, alone or in stacks, or float; biases (n_i,) float32;
    residual (m, n) float32.
    `quantized`: whether x is quantized to q8_1, only for packed weights.
    """
    given = [None] * len(weights) if biases is None else list(biases)
    m = x.shape[0]
    rows = [w.shape[0] for w in (weights[:1] if activation else weights)]
    return call(
        "linear",
        [jax.ShapeDtypeStruct((m, n), jnp.float32) for n in rows],
        x,
        *([] if norm_weight is None else [norm_weight]),
        *jax.tree.leaves(list(weights)),
        *(bias for bias in given if bias is not None),
        *([] if residual is None else [residual]),
        formats=",".join(map(_format, weights)),
        biases="".join("0" if bias is None else "1" for bias in given),
        activation=activation or "",
        quantized=quantized,
        norm=norm_weight is not None,
        eps=float(eps),
        residual=residual is not None,
    )


def mlp(
    x: jax.Array,
    gate: Packed,
    up: Packed,
    down: Packed,
    *,
    quantized: tuple[bool, bool],
    activation: str,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Gated MLP: [residual +] activation(h @ gate.T, h @ up.T) @ down.T, with h = [rms_norm](x).

    Some rows of x go through both matmuls before the next rows.

    x float32 (m, k); gate and up (inner, k), down (n, inner), packed; residual and the result
    float32 (m, n).
    quantized: whether x, and whether the input of `down`, is quantized to q8_1.
    """
    m, n = x.shape[0], down.shape[0]
    return call(
        "mlp",
        [jax.ShapeDtypeStruct((m, n), jnp.float32)],
        x,
        *([] if norm_weight is None else [norm_weight]),
        *jax.tree.leaves((gate, up, down)),
        *([] if residual is None else [residual]),
        formats=f"{_format(gate)},{_format(up)}",
        down=_format(down),
        activation=activation,
        quantized=quantized[0],
        quantized_down=quantized[1],
        norm=norm_weight is not None,
        eps=float(eps),
        residual=residual is not None,
    )[0]


def expert_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[QuantizedArray | jax.Array, ...],
    *,
    quantized: tuple[bool, bool],
    activation: str,
    biases: Sequence[jax.Array | None] = (None, None, None),
    down_scale: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
) -> jax.Array:
    """MoE layer: [residual +] the weighted sum of each token's expert MLPs.

    x float32 (m, k); ids int32 and weights float32 (m, top); matrices gate and up (experts, inner,
    k) and down (experts, n, inner), packed or float, with biases float32 (experts, rows);
    down_scale (experts,); residual and the result float32 (m, n).
    quantized: see `mlp`; only for packed weights.
    """
    m, n = x.shape[0], matrices[2].shape[1]
    gate, up, down = map(_format, matrices)
    return call(
        "expert_mlp",
        [jax.ShapeDtypeStruct((m, n), jnp.float32)],
        *(x, ids, weights),
        *([] if norm_weight is None else [norm_weight]),
        *jax.tree.leaves(matrices),
        *(bias for bias in biases if bias is not None),
        *([] if down_scale is None else [down_scale]),
        *([] if residual is None else [residual]),
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        quantized=quantized[0],
        quantized_down=quantized[1],
        one_product=current_selection().batch_invariant,
        biases="".join("0" if bias is None else "1" for bias in biases),
        down_scale=down_scale is not None,
        norm=norm_weight is not None,
        eps=float(eps),
        residual=residual is not None,
    )[0]


def expert_matmul(
    x: jax.Array, ids: jax.Array, w: QuantizedArray | jax.Array, *, quantized: bool
) -> jax.Array:
    """Multiplies each token by the matrices of its experts: float32 (m, top, n).

    x float32 (m, k) or (m * top, k); ids int32 (m, top); w (experts, n, k), packed or float.
    """
    struct = jax.ShapeDtypeStruct((*ids.shape, w.shape[1]), jnp.float32)
    leaves = jax.tree.leaves(w)
    return call(
        "expert_matmul",
        [struct],
        *(x, ids, *leaves),
        format=_format(w),
        quantized=quantized,
        one_product=current_selection().batch_invariant,
    )[0]


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    top: int,
    softmax: bool,
    groups: int,
    groups_used: int,
    normalize: bool,
    least_sum: float,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Router: the ids int32 and weights float32 (m, top) of each token's experts.

    logits float32 (m, experts); bias float32 (experts,), added for the choice. Scores are the
    logits' softmax, or their sigmoids. normalize: divides the weights by their sum, at least
    `least_sum`.
    """
    shape = logits.shape[0], top
    ids, weights = call(
        "route",
        [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        *([logits] if bias is None else [logits, bias]),
        softmax=softmax,
        bias=bias is not None,
        groups=groups,
        groups_used=groups_used,
        normalize=normalize,
        least_sum=least_sum,
        scale=scale,
    )
    return ids, weights


def _format(w: Packed | jax.Array) -> str:
    if isinstance(w, Packed):
        prepare(w.format)
        return w.format
    if (name := float_types.ggml_name(w.dtype)) is None:
        raise TypeError(f"a matrix has dtype {w.dtype}; the CPU's kernels take floats")
    return name


def embedding(ids: jax.Array, w: Packed | jax.Array) -> jax.Array:
    """Looks up rows `ids`, int32 (count,), of w (n, k), packed or float: float32 (count, k).

    An id out of range gives a row of NaN.
    """
    struct = jax.ShapeDtypeStruct((ids.shape[0], w.shape[1]), jnp.float32)
    return call("embedding", [struct], ids, *jax.tree.leaves(w), format=_format(w))[0]


def paged_attention(
    arrays: Sequence[jax.Array],
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    value_dim: int | None,
    contiguous: bool,
    pieces: bool,
    sinks: bool,
) -> jax.Array:
    """Attention of the last tokens of each sequence over a KV cache, paged or contiguous.

    arrays: the operands of the primitive in `attend` that are not None, q first, which is
    (batch, time, num_heads, head_dim). The result is float32 (batch, time, num_heads, width of
    values).
    value_dim: width of the values in rows of a latent cache; None for another cache.
    pieces: whether `arrays` has lengths. If not, time is 1.
    """
    q = arrays[0]
    return call(
        "paged_attention",
        [jax.ShapeDtypeStruct((*q.shape[:-1], value_dim or q.shape[-1]), jnp.float32)],
        *arrays,
        scale=float(scale),
        soft_cap=float(soft_cap or 0.0),
        window=int(window or 0),
        value_dim=int(value_dim or 0),
        contiguous=contiguous,
        pieces=pieces,
        sinks=sinks,
    )[0]


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Causal attention: every token attends to itself and the tokens before it.

    q and k are float32 (batch, time, heads, head_dim), v and the result (batch, time, heads,
    value_dim), lengths int32 (batch,), sinks float32 (heads,).
    """
    return call(
        "causal_attention",
        [jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), jnp.float32)],
        *(q, k, v, lengths),
        *([] if sinks is None else [sinks]),
        scale=float(scale),
        soft_cap=float(soft_cap or 0.0),
        window=int(window or 0),
        sinks=sinks is not None,
    )[0]


def rope_append(
    pages: Sequence[jax.Array],
    others: Sequence[jax.Array],
    *,
    rope: bool,
    latent: bool = False,
    interleaved: bool = False,
    eps: float = 0.0,
    keys: bool = False,
) -> list[Any]:
    """Writes k and v to slots of a KV cache's pages, in place; with `rope`, rotates q and k first.

    Returns the updated pages; with `rope`, then the rotated q; with `keys`, last the rotated k.

    others: k, v, slot_mapping; with `rope`: q, k, v, slot_mapping, cos, sin, then both norms or
    none.
    latent: `others` lacks v, and `pages` lacks the values' pages.
    """
    results = [jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages]
    if rope:
        rotated = others[: 1 + keys]
        results += [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in rotated]
    return call(
        "rope_append",
        results,
        *pages,
        *others,
        aliases={i: i for i in range(len(pages))},
        rope=rope,
        latent=latent,
        interleaved=interleaved,
        norms=len(others) == 8,
        returned=keys,
        eps=float(eps),
    )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates x, float32 (tokens, heads, head_dim), by the angles of cos and sin.

    cos and sin are float32 (tokens, rope_dim / 2).
    """
    return call(
        "rotate", [jax.ShapeDtypeStruct(x.shape, jnp.float32)], x, cos, sin, interleaved=interleaved
    )[0]


def has_heads(*dims: int) -> bool:
    """Returns whether the gated delta kernels take heads of these sizes."""
    return all(dim % 16 == 0 and dim <= MAX_HEAD_DIM for dim in dims)


def gated_delta_rule(*operands: jax.Array, scale: float, tiled: bool) -> list[jax.Array]:
    """Runs the gated delta rule; returns o, and the state after the last token, updated in place.

    The operands are those of the primitive `gated_delta_rule`.
    """
    v, state = operands[2], operands[5]
    return call(
        "gated_delta_rule",
        [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (v, state)],
        *operands,
        aliases={5: 1},
        scale=float(scale),
        tiled=tiled,
    )


def gated_delta_step(*operands: jax.Array, eps: float, tiled: bool) -> list[jax.Array]:
    """Runs a gated delta net's decode step; returns y, and columns and state, updated in place.

    The operands are those of the primitive `gated_delta_step`.
    """
    z, columns, state = operands[1], operands[4], operands[5]
    return call(
        "gated_delta_step",
        [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (z, columns, state)],
        *operands,
        aliases={4: 1, 5: 2},
        eps=float(eps),
        tiled=tiled,
    )


def draw(
    logits: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    step: jax.Array,
    *,
    least_temperature: float,
) -> jax.Array:
    """Draws tokens int32 (m,) from logits float32 (m, n); `ops.draw` describes the parameters."""
    struct = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    seed = jax.lax.bitcast_convert_type(seed, jnp.int32)
    rows = temperature, top_k, top_p, min_p, seed, step
    return call("draw", [struct], logits, *rows, least_temperature=least_temperature)[0]


def argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest value of each row of float32 (m, n), and its index int32."""
    results = [jax.ShapeDtypeStruct(x.shape[:1], dtype) for dtype in (jnp.float32, jnp.int32)]
    values, indices = call("argmax", results, x)
    return values, indices


def top_k(x: jax.Array, *, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest values of float32 (m, n), descending, and their indices int32."""
    shape = x.shape[0], count
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    values, indices = call("top_k", results, x)
    return values, indices


def codebook_search(
    x: jax.Array,
    w: jax.Array,
    digits: jax.Array,
    levels: jax.Array,
    pairs: jax.Array,
    *,
    format: str,
    unit: float,
    subs: int,
) -> list[jax.Array]:
    """Searches codebook entries for x (blocks, 256), errors weighted by w of that shape.

    Args:
      digits: levels of the entries' values, uint8 (entries, 4 or 8).
      levels: the values, ascending, float32 (3 or 8,).
      pairs: uint8 (any, 2), see `quantizers.codebook.shared_pairs`; they change the time only.
      unit: factor of d in weights.
      subs: sub-blocks with a scale, 8 or 16.

    Returns:
      d float32 (blocks,), scales uint8 (blocks, subs), entries uint16 (blocks, 256 / values of an
      entry), signs uint8 (blocks, 32): see `quantizers.codebook.Codes`.
    """
    blocks = x.shape[0]
    return call(
        "codebook_search",
        [
            jax.ShapeDtypeStruct((blocks,), jnp.float32),
            jax.ShapeDtypeStruct((blocks, subs), jnp.uint8),
            jax.ShapeDtypeStruct((blocks, 256 // digits.shape[1]), jnp.uint16),
            jax.ShapeDtypeStruct((blocks, 32), jnp.uint8),
        ],
        x,
        w,
        digits,
        levels,
        pairs,
        format=format,
        unit=unit,
    )
