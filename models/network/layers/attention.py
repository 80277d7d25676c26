"""Attention, and where its keys and values are: a whole prompt's, or pages of a cache."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from ...config.rope import Rotation
from ...kv_cache.shapes import Pages
from ..rows import flat_rows
from .linear import Ahead, Linear, Norm, RMSNorm, added, fusible, linear, normalized, weights_of
from .pages import append_latent, repeat_kv_heads, scales

Norms: TypeAlias = tuple[RMSNorm | None, RMSNorm | None]
KV: TypeAlias = "Fresh | Paged"


@dataclasses.dataclass(eq=False, repr=False)
class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
      key: None: keys and values are those of an earlier layer.
      value: None: it is the key's projection, before the norm.
      norm, post_norm: of x, and of what is added to it; None: there is none.
      q_norm, k_norm: of each head's queries and keys, or of all heads' together; None: there is
        none.
      value_eps: values are divided by the root of their mean square plus this; None: they are not.
      output_gate: `query` gives a gate behind each head's queries; its sigmoid multiplies what the
        head attends to.
      sinks: (num_heads,), of `jax_q4k.paged_attention`; None: there are none.
      window: tokens that a query sees, its own the last; None: all.
      scale, soft_cap: of scores; None: head_dim ** -0.5, no cap.
      residual_scale: factor of what is added; None: 1.
    """

    query: Linear
    output: Linear
    head_dim: int
    key: Linear | None = None
    value: Linear | None = None
    norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post_norm: Norm | None = None
    value_eps: float | None = None
    output_gate: bool = False
    sinks: nnx.Variable[Array] | None = None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    residual_scale: float | None = None

    def __call__(
        self, x: Array, kv: KV, residual: Array | None = None, prefetch: Ahead = ()
    ) -> tuple[Array, KV]:
        """x (..., hidden_size) -> the residual, or x, plus x's attention; and kv with its keys.

        prefetch: projections that come behind it.
        """
        residual = x if residual is None else residual
        norms: Any = self.q_norm, self.k_norm
        if self._is_plain:
            ahead = [self.output]
            q, kv = kv.project(x, self.first, self.norm, norms, self.head_dim, ahead)
            gate = None
        else:
            q, gate, kv = self._projected(x, kv, norms)
        seen: dict[str, Any] = {
            "window": self.window,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
        }
        if self.sinks is not None:
            seen["sinks"] = self.sinks.get_value()
        added_to = None if self._adds_apart else residual
        if gate is not None:
            y = kv.attention(q, **seen).reshape(gate.shape) * jax.nn.sigmoid(gate)
            y = linear(y, self.output, residual=added_to, prefetch=prefetch)[0]
        else:
            y = kv.attend(q, self.output, added_to, prefetch, **seen)
        if self._adds_apart:
            y = added(residual, y, self.post_norm, self.residual_scale)
        return y, kv

    @property
    def first(self) -> list[Linear]:
        """The projections to queries, keys and values that are there."""
        return [p for p in (self.query, self.key, self.value) if p is not None]

    @property
    def _is_plain(self) -> bool:
        """True where nothing but rotation and norms of heads stands between product and pages."""
        of_heads = self.q_norm is None or self._per_head(self.q_norm)
        apart = self.output_gate or self.value_eps is not None
        return len(self.first) == 3 and of_heads and not apart

    def _projected(self, x: Array, kv: KV, norms: Any) -> tuple[Array, Array | None, KV]:
        """Queries, their gate, and kv with x's keys, step by step."""
        q, *kv_rows = linear(x, *self.first, norm=self.norm, prefetch=[self.output])
        q, gate = self._gated(q)
        if self.q_norm is not None and not self._per_head(self.q_norm):
            normalized = zip(norms, (q, *kv_rows[:1]), strict=True)
            q, kv_rows[0] = (norm(y) for norm, y in normalized)
            norms = None, None
        q = heads(q, self.head_dim)
        if not kv_rows:
            return kv.query(q, norms[0]), gate, kv
        k, v = (heads(y, self.head_dim) for y in (kv_rows[0], kv_rows[-1]))
        if self.value_eps is not None:
            v = jq.rms_norm(v, jnp.ones(self.head_dim), eps=self.value_eps)  # one launch
        q, kv = kv.append(q, k, v, norms=norms)  # normalizes, rotates, stores
        return q, gate, kv

    @property
    def _adds_apart(self) -> bool:
        """True where something stands between the output's projection and the sum."""
        return self.post_norm is not None or self.residual_scale is not None

    def _gated(self, q: Array) -> tuple[Array, Array | None]:
        """Queries and their gate, both (..., heads * head_dim)."""
        if not self.output_gate:
            return q, None
        both = q.reshape(*q.shape[:-1], -1, 2, self.head_dim)
        queries, gate = (both[..., i, :].reshape(*q.shape[:-1], -1) for i in range(2))
        return queries, gate

    def _per_head(self, norm: Norm) -> bool:
        """True of a norm of each head, which is fused with what rotates them."""
        return isinstance(norm, RMSNorm) and norm.weight.shape == (self.head_dim,)


def heads(x: Array, head_dim: int) -> Array:
    """(..., heads * head_dim) -> (..., heads, head_dim)."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


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

    def project(
        self,
        x: Array,
        projections: list[Linear],
        norm: Norm | None,
        norms: Norms,
        head_dim: int,
        prefetch: Ahead = (),
    ) -> tuple[Array, Fresh]:
        """`append` of the heads that the projections make of x (batch, time, hidden_size)."""
        ys = linear(x, *projections, norm=norm, prefetch=prefetch)
        q, k, v = (heads(y, head_dim) for y in ys)
        return self.append(q, k, v, norms)

    def append(self, q: Array, k: Array, v: Array, norms: Norms) -> tuple[Array, Fresh]:
        """q, normalized, rotated and scaled; kv with keys, normalized and rotated, and values."""
        k, v = repeat_kv_heads(self.pages, k, v)
        if self.pages:
            vectors = [flat_rows(x) for x in (q, k, v)]
            cos, sin, _ = self.rotation
            rotation = self.rotation._replace(cos=flat_rows(cos), sin=flat_rows(sin))
            # its own keys: those in pages may be rounded
            given = vectors, self.pages, self.slots, rotation, norms
            rotated, *stored, keys = _appended(*given, return_keys=True)
            q, k, pages = rotated.reshape(q.shape), keys.reshape(k.shape), tuple(stored)
        else:
            q, k = (_rotated(x, norm, self.rotation) for x, norm in zip((q, k), norms, strict=True))
            pages = ()
        return _scaled(q, self.temperature), dataclasses.replace(self, pages=pages, k=k, v=v)

    def store(self, rows: Array) -> Fresh:
        """With latent vectors and their keys (batch, time, 1, n) in pages."""
        if not self.pages:
            return self
        pages = append_latent(self.pages, flat_rows(rows), self.slots)
        return dataclasses.replace(self, pages=pages)

    def query(self, q: Array, norm: Norm | None) -> Array:
        """q, normalized, rotated and scaled, where keys and values are there."""
        return _scaled(_rotated(q, norm, self.rotation), self.temperature)

    def attention(self, q: Array, **seen: Any) -> Array:
        """Attention of q (batch, time, num_heads, head_dim); `seen`: its options."""
        return jq.causal_attention(q, self.k, self.v, self.lengths, **seen)

    def attend(
        self, q: Array, output: Linear, residual: Array | None, prefetch: Ahead = (), **seen: Any
    ) -> Array:
        """residual + output(attention of q), (batch, time, hidden_size)."""
        out = self.attention(q, **seen).reshape(*q.shape[:2], -1)
        return linear(out, output, residual=residual, prefetch=prefetch)[0]


@dataclasses.dataclass(frozen=True)
class Paged:
    """A layer's pages, to which one token per sequence is appended, or a piece; see `PagedCache`.

    rotation, temperature, slots: of these tokens, (batch,). lens: (batch,), tokens with these.
    lengths: of pieces, (batch,): how many of `time` tokens each sequence gets; what has tokens has
    batch * time of them then. None: one.
    """

    rotation: Rotation
    temperature: Array | None
    pages: Pages
    slots: Array
    block_tables: Array
    lens: Array
    lengths: Array | None = None

    def project(
        self,
        x: Array,
        projections: list[Linear],
        norm: Norm | None,
        norms: Norms,
        head_dim: int,
        prefetch: Ahead = (),
    ) -> tuple[Array, Paged]:
        """As `Fresh.project`, of x (batch, hidden_size)."""
        k_pages, v_pages, *_ = self.pages
        kv_rows = k_pages.shape[1] * head_dim  # pages may hold each head several times
        if not fusible(*projections) or projections[1].weight.shape[0] != kv_rows:
            ys = linear(x, *projections, norm=norm, prefetch=prefetch)
            q, k, v = (heads(y, head_dim) for y in ys)
            return self.append(q, k, v, norms)
        options = _of_heads(self.pages, self.rotation, norms)
        options |= {"head_eps": options.pop("eps"), "biases": [p.bias for p in projections]}
        x, normalizing = normalized(x, norm)
        weights = weights_of(projections)
        options["prefetch"] = weights_of(prefetch)
        options |= {"k_pages": k_pages, "v_pages": v_pages, "slot_mapping": self.slots}
        q, *pages = jq.qkv_rope_append(x, weights, **options, **normalizing)
        return _scaled(q, self.temperature), dataclasses.replace(self, pages=tuple(pages))

    def append(self, q: Array, k: Array, v: Array, norms: Norms) -> tuple[Array, Paged]:
        """As `Fresh.append`, of (batch, heads, head_dim)."""
        k, v = repeat_kv_heads(self.pages, k, v)
        q, *pages = _appended([q, k, v], self.pages, self.slots, self.rotation, norms)
        return _scaled(q, self.temperature), dataclasses.replace(self, pages=tuple(pages))

    def store(self, rows: Array) -> Paged:
        """As `Fresh.store`, of (batch, 1, n)."""
        pages = append_latent(self.pages, rows, self.slots)
        return dataclasses.replace(self, pages=pages)

    def latent_attention(self, q: Array, rank: int, *, scale: float) -> Array:
        """Attention of q (batch, num_heads, n) to latent vectors, (batch, num_heads, rank)."""
        options = {"value_dim": rank, "scale": scale} | self._options
        given = self._of_sequences(q), self.pages[0], None, self.block_tables, self.lens
        return jq.paged_attention(*given, **options).reshape(*q.shape[:-1], rank)

    def query(self, q: Array, norm: Norm | None) -> Array:
        """As `Fresh.query`, of (batch, heads, head_dim)."""
        return _scaled(_rotated(q, norm, self.rotation), self.temperature)

    def attention(self, q: Array, **seen: Any) -> Array:
        """As `Fresh.attention`, of (batch, num_heads, head_dim)."""
        return jq.paged_attention(*self._given(q), **seen | self._options).reshape(q.shape)

    def attend(
        self, q: Array, output: Linear, residual: Array | None, prefetch: Ahead = (), **seen: Any
    ) -> Array:
        """As `Fresh.attend`, (batch, hidden_size)."""
        if not fusible(output):
            out = self.attention(q, **seen).reshape(len(q), -1)
            return linear(out, output, residual=residual, prefetch=prefetch)[0]
        if residual is not None:
            residual = self._of_sequences(residual)
        options = seen | self._options | {"bias": output.bias, "residual": residual}
        options["prefetch"] = weights_of(prefetch)
        y = jq.paged_attention_matmul(*self._given(q), output.weight, **options)
        return y.reshape(len(q), -1)

    @property
    def _options(self) -> dict[str, Any]:
        """Arguments by which operations attend: scales of int8 pages, lengths of pieces."""
        of_pieces = {} if self.lengths is None else {"lengths": self.lengths}
        return scales(self.pages) | of_pieces

    def _of_sequences(self, x: Array) -> Array:
        """(batch * time, ...) -> (batch, time, ...) of pieces."""
        return x if self.lengths is None else x.reshape(len(self.lengths), -1, *x.shape[1:])

    def _given(self, q: Array) -> tuple[Array, Array, Array, Array, Array]:
        k_pages, v_pages, *_ = self.pages
        return self._of_sequences(q), k_pages, v_pages, self.block_tables, self.lens


def _rotated(x: Array, norm: Norm | None, rotation: Rotation) -> Array:
    """Each head's vector of x (..., heads, head_dim), normalized and rotated."""
    return jq.rotate(x if norm is None else norm(x), **rotation._asdict())


def _appended(
    vectors: list[Array],
    pages: Pages,
    slots: Array,
    rotation: Rotation,
    norms: Norms,
    *,
    return_keys: bool = False,
) -> tuple[Array, ...]:
    """Tokens' queries, normalized and rotated, and pages with keys, likewise, and values.

    vectors: queries, keys and values (tokens, heads, head_dim). return_keys: of `jq.rope_append`.
    """
    q, k, v = vectors
    options = _of_heads(pages, rotation, norms) | {"return_keys": return_keys}
    return jq.rope_append(q, k, v, pages[0], pages[1], slots, **options)


def _of_heads(pages: Pages, rotation: Rotation, norms: Norms) -> dict[str, Any]:
    """Arguments by which operations normalize, rotate and store heads."""
    weights: list[Any] = [None if norm is None else norm.weight for norm in norms]
    norm_options = {"eps": norms[0] and norms[0].eps, "q_norm": weights[0], "k_norm": weights[1]}
    return rotation._asdict() | scales(pages) | norm_options


def _scaled(q: Array, temperature: Array | None) -> Array:
    """Queries (..., heads, head_dim) times a factor (...) of each token."""
    return q if temperature is None else q * temperature[..., None, None]
