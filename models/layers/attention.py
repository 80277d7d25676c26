"""Attention, and where its keys and values are: a whole prompt's, or pages of a cache."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from flax import nnx
from jax import Array

import jax_q4k as jq

from .. import kv_cache
from ..kv_cache import Pages
from ..rope import Rotation
from .linear import Linear, Norm, RMSNorm, added, fusible, linear

Norms: TypeAlias = tuple[RMSNorm | None, RMSNorm | None]
KV: TypeAlias = "Fresh | Paged"


@dataclasses.dataclass(eq=False, repr=False)
class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
      norm, post_norm: of x, and of what is added to it; None: there is none.
      q_norm, k_norm: of each head's queries and keys, or of all heads' together; both or none.
      sinks: (num_heads,), of `jax_q4k.paged_attention`; None: there are none.
      window: tokens that a query sees, its own the last; None: all.
      scale, soft_cap: of scores; None: head_dim ** -0.5, no cap.
      residual_scale: factor of what is added; None: 1.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    head_dim: int
    norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post_norm: Norm | None = None
    sinks: nnx.Variable[Array] | None = None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    residual_scale: float | None = None

    def __call__(self, x: Array, kv: KV, residual: Array | None = None) -> tuple[Array, KV]:
        """x (..., hidden_size) -> the residual, or x, plus x's attention; and kv with its keys."""
        residual = x if residual is None else residual
        q, k, v = linear(x, self.query, self.key, self.value, norm=self.norm)
        norms: Any = self.q_norm, self.k_norm
        if self.q_norm is not None and not self._per_head(self.q_norm):
            q, k = (norm(y) for norm, y in zip(norms, (q, k), strict=True))
            norms = None, None
        q, k, v = map(self.heads, (q, k, v))
        q, kv = kv.append(q, k, v, norms=norms)  # normalizes, rotates, stores
        seen: dict[str, Any] = {
            "window": self.window,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
        }
        if self.sinks is not None:
            seen["sinks"] = self.sinks.get_value()
        if self.post_norm is None and self.residual_scale is None:
            return kv.attend(q, self.output, residual, **seen), kv
        y = kv.attend(q, self.output, None, **seen)
        return added(residual, y, self.post_norm, self.residual_scale), kv

    def _per_head(self, norm: Norm) -> bool:
        """True of a norm of each head, which is fused with what rotates them."""
        return isinstance(norm, RMSNorm) and norm.weight.shape == (self.head_dim,)

    def heads(self, x: Array) -> Array:
        """(..., heads * head_dim) -> (..., heads, head_dim)."""
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Keys and values of whole sequences, attended causally; differentiable where not stored.

    rotation: of tokens (batch, time). temperature: (batch, time), a factor of queries, or None.
    lengths: (batch,), where rows are padded. pages, slots: where keys and values are stored, too.
    k, v: (batch, time, num_kv_heads, head_dim), once appended.
    """

    rotation: Rotation
    temperature: Array | None
    lengths: Array
    pages: Pages = ()
    slots: Any = None  # (batch * time,)
    k: Array | None = None
    v: Array | None = None

    def append(self, q: Array, k: Array, v: Array, norms: Norms) -> tuple[Array, Fresh]:
        """q, normalized, rotated and scaled; kv with keys, normalized and rotated, and values."""
        normalized = [x if norm is None else norm(x) for x, norm in zip((q, k), norms, strict=True)]
        q, k = (jq.rotate(x, **self.rotation._asdict()) for x in normalized)
        pages = self.pages and kv_cache.append(self.pages, k, v, self.slots)
        k, v = kv_cache.stored(self.pages, k, v)
        return _scaled(q, self.temperature), dataclasses.replace(self, pages=pages, k=k, v=v)

    def attend(self, q: Array, output: Linear, residual: Array | None, **seen: Any) -> Array:
        """residual + output(attention of q), (batch, time, hidden_size); `seen`: its options."""
        out = jq.causal_attention(q, self.k, self.v, self.lengths, **seen)
        return linear(out.reshape(*out.shape[:2], -1), output, residual=residual)[0]


@dataclasses.dataclass(frozen=True)
class Paged:
    """A layer's pages, to which one token per sequence is appended; see `PagedCache`.

    rotation, temperature, slots: of these tokens, (batch,). lens: (batch,), tokens with these.
    """

    rotation: Rotation
    temperature: Array | None
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
        return _scaled(q, self.temperature), dataclasses.replace(self, pages=tuple(pages))

    def attend(self, q: Array, output: Linear, residual: Array | None, **seen: Any) -> Array:
        """As `Fresh.attend`, (batch, hidden_size)."""
        k_pages, v_pages, *_ = self.pages
        given = q, k_pages, v_pages, self.block_tables, self.lens
        options = seen | kv_cache.scales(self.pages)
        if not fusible(output):
            out = jq.paged_attention(*given, **options)
            return linear(out.reshape(len(out), -1), output, residual=residual)[0]
        options |= {"bias": output.bias, "residual": residual}
        return jq.paged_attention_matmul(*given, output.weight, **options)


def _scaled(q: Array, temperature: Array | None) -> Array:
    """Queries (..., heads, head_dim) times a factor (...) of each token."""
    return q if temperature is None else q * temperature[..., None, None]
