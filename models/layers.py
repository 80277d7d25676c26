"""A decoder layer's parts: the one file that knows which steps run as one kernel.

A sublayer maps x to x + post_norm(f(norm(x))) and owns its norms. Fused operations take the weights
of Linears and RMSNorms. Where another module stands in a Linear's place, such as an adapter around
it, the same steps run one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from flax import nnx
from jax import Array

import jax_q4k as jq

from . import flax_types, kv_cache
from .kv_cache import Pages
from .rope import Rotation


class Linear(nnx.Module):
    """x (..., k) -> x @ W.T + b (..., n); W packed or float, b float32 or None."""

    def __init__(self, weight: jq.QuantizedArray | Array, bias: Array | None = None) -> None:
        self.weight = flax_types.variable(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Array) -> Array:
        return jq.matmul(x, self.weight, bias=self.bias)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * w along the last axis, in float32."""

    def __init__(self, weight: Array, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return jq.rms_norm(x, self.weight, eps=self.eps)


Norms: TypeAlias = tuple[RMSNorm | None, RMSNorm | None]
KV: TypeAlias = "Fresh | Paged"


def linear(
    x: Array, *projections: Linear, norm: RMSNorm | None = None, residual: Array | None = None
) -> list[Array]:
    """residual + projection(norm(x)) of each projection; only a single one takes a residual.

    x (..., k) -> (..., n_i).
    """
    if not _fusible(*projections):
        h = x if norm is None else norm(x)
        ys = [projection(h) for projection in projections]
        return ys if residual is None else [residual + y for y in ys]
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    return list(jq.linear(x, weights, biases=biases, residual=residual, **_norm_arguments(norm)))


def _fusible(*projections: Linear) -> bool:
    return all(type(projection) is Linear for projection in projections)


def _norm_arguments(norm: RMSNorm | None) -> dict[str, Any]:
    return {} if norm is None else {"norm_weight": norm.weight, "eps": norm.eps}


@dataclasses.dataclass(eq=False, repr=False)
class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
      norm, post_norm: of x, and of what is added to it; None: there is none.
      q_norm, k_norm: of each head's queries and keys, both or none.
      window: tokens that a query sees, its own the last; None: all.
      scale, soft_cap: of scores; None: head_dim ** -0.5, no cap.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    head_dim: int
    norm: RMSNorm | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    post_norm: RMSNorm | None = None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None

    def __call__(self, x: Array, kv: KV) -> tuple[Array, KV]:
        """x (..., hidden_size) -> x plus its attention; and kv with its keys and values."""
        q, k, v = map(self.heads, linear(x, self.query, self.key, self.value, norm=self.norm))
        q, kv = kv.append(q, k, v, norms=(self.q_norm, self.k_norm))  # normalizes, rotates, stores
        residual = x if self.post_norm is None else None  # else added behind the norm
        seen = {"window": self.window, "scale": self.scale, "soft_cap": self.soft_cap}
        y = kv.attend(q, self.output, residual, **seen)
        return (y if self.post_norm is None else x + self.post_norm(y)), kv

    def heads(self, x: Array) -> Array:
        """(..., heads * head_dim) -> (..., heads, head_dim)."""
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


@dataclasses.dataclass(eq=False, repr=False)
class MLP(nnx.Module):
    """Gated feed-forward network: down(activation(gate(x), up(x))); norms as in Attention.

    activation: one of `jq.ACTIVATION_FUNCTIONS`.
    """

    gate: Linear
    up: Linear
    down: Linear
    norm: RMSNorm | None = None
    post_norm: RMSNorm | None = None
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.activation not in (known := jq.ACTIVATION_FUNCTIONS):
            raise ValueError(f"activation={self.activation!r} must be one of {', '.join(known)}")

    def __call__(self, x: Array) -> Array:
        """x (..., hidden_size) -> x plus the network of it."""
        residual = x if self.post_norm is None else None  # else added behind the norm
        modules = self.gate, self.up, self.down
        if _fusible(*modules) and all(m.bias is None for m in modules):
            options = _norm_arguments(self.norm) | {"activation": self.activation}
            y = jq.mlp(x, *(m.weight for m in modules), residual=residual, **options)
        else:
            gate, up = linear(x, self.gate, self.up, norm=self.norm)
            activated = jq.ACTIVATION_FUNCTIONS[self.activation](gate, up)
            (y,) = linear(activated, self.down, residual=residual)
        return y if self.post_norm is None else x + self.post_norm(y)


@dataclasses.dataclass(eq=False, repr=False)
class DecoderLayer(nnx.Module):
    """Attention, then the feed-forward network."""

    attention: Attention
    mlp: MLP

    def __call__(self, x: Array, kv: KV) -> tuple[Array, KV]:
        x, kv = self.attention(x, kv)
        return self.mlp(x), kv


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Keys and values of whole sequences, attended causally; differentiable where not stored.

    rotation: of tokens (batch, time). lengths: (batch,), where rows are padded. pages, slots: where
    keys and values are stored, too. k, v: (batch, time, num_kv_heads, head_dim), once appended.
    """

    rotation: Rotation
    lengths: Array
    pages: Pages = ()
    slots: Any = None  # (batch * time,)
    k: Array | None = None
    v: Array | None = None

    def append(self, q: Array, k: Array, v: Array, norms: Norms) -> tuple[Array, Fresh]:
        """q, normalized and rotated, and kv with these keys, treated alike, and values."""
        normalized = [x if norm is None else norm(x) for x, norm in zip((q, k), norms, strict=True)]
        q, k = (jq.rotate(x, **self.rotation._asdict()) for x in normalized)
        pages = self.pages and kv_cache.append(self.pages, k, v, self.slots)
        k, v = kv_cache.stored(self.pages, k, v)
        return q, dataclasses.replace(self, pages=pages, k=k, v=v)

    def attend(self, q: Array, output: Linear, residual: Array | None, **seen: Any) -> Array:
        """residual + output(attention of q), (batch, time, hidden_size); `seen`: its options."""
        out = jq.causal_attention(q, self.k, self.v, self.lengths, **seen)
        return linear(out.reshape(*out.shape[:2], -1), output, residual=residual)[0]


@dataclasses.dataclass(frozen=True)
class Paged:
    """A layer's pages, to which one token per sequence is appended; see `PagedCache`.

    rotation, slots: of these tokens, (batch,). lens: (batch,), tokens with these.
    """

    rotation: Rotation
    pages: Pages
    slots: Array
    block_tables: Array
    lens: Array

    def append(self, q: Array, k: Array, v: Array, norms: Norms) -> tuple[Array, Paged]:
        """As `Fresh.append`, of (batch, heads, head_dim)."""
        k_pages, v_pages, *_ = self.pages
        weights = [None if norm is None else norm.weight for norm in norms]
        options = self.rotation._asdict() | kv_cache.scales(self.pages)
        options |= {"eps": norms[0] and norms[0].eps, "q_norm": weights[0], "k_norm": weights[1]}
        k, v = kv_cache.stored(self.pages, k, v)
        q, *pages = jq.rope_append(q, k, v, k_pages, v_pages, self.slots, **options)
        return q, dataclasses.replace(self, pages=tuple(pages))

    def attend(self, q: Array, output: Linear, residual: Array | None, **seen: Any) -> Array:
        """As `Fresh.attend`, (batch, hidden_size)."""
        k_pages, v_pages, *_ = self.pages
        given = q, k_pages, v_pages, self.block_tables, self.lens
        options = seen | kv_cache.scales(self.pages)
        if not _fusible(output):
            out = jq.paged_attention(*given, **options)
            return linear(out.reshape(len(out), -1), output, residual=residual)[0]
        options |= {"bias": output.bias, "residual": residual}
        return jq.paged_attention_matmul(*given, output.weight, **options)
