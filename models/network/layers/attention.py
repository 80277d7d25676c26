"""Grouped-query attention as a Flax module, over a whole prompt or over a paged KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jax_q4k as jq

from ...config.attention_fields import stored_head_dim
from ...config.rope import Rotation
from ...kv_cache.shapes import Pages
from ..rows import flat_rows
from .linear import Linear, Norm, Prefetch, RMSNorm, added, fusible, linear, normalized, weights_of
from .pages import append_latent, repeat_kv_heads, scales

Norms: TypeAlias = tuple[RMSNorm | None, RMSNorm | None]
KV: TypeAlias = "Fresh | Paged"


@dataclasses.dataclass(eq=False, repr=False)
class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
      key: key projection; None means that the layer shares keys and values of an earlier layer.
      value: value projection; None means that values are the key projection before its norm.
      norm, post_norm: norms of the input, and of the output before it is added to x; None if
        absent.
      q_norm, k_norm: norms of queries and keys, per head or over all heads; None if absent.
      sum_norm: norm of residual + output, in encoders; None if absent.
      second_norm: norm of residual + the result of `sum_norm`; None if absent.
      value_eps: eps of a norm of the values that has no weight; None means no such norm.
      output_gate: `query` also produces a gate, stored after each head's queries; the sigmoid of
        the gate multiplies the head's attention output.
      sinks: (num_heads,), sink logits, as in `jax_q4k.paged_attention`; None if absent.
      window: sliding window in tokens, the query's own included; None means full attention.
      scale: factor of attention scores; None means head_dim ** -0.5.
      soft_cap: cap of attention scores; None means no cap.
      residual_scale: factor of the output before it is added to x; None means 1.
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
    sum_norm: Norm | None = None
    second_norm: Norm | None = None
    value_eps: float | None = None
    output_gate: bool = False
    sinks: nnx.Variable[Array] | None = None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    residual_scale: float | None = None

    def __call__(
        self, x: Array, kv: KV, residual: Array | None = None, prefetch: Prefetch = ()
    ) -> tuple[Array, KV]:
        """Returns residual + attention(x), (..., hidden_size), and `kv` updated with x's tokens.

        residual: x if None. prefetch: projections that run next.
        """
        residual = x if residual is None else residual
        norms: Any = self.q_norm, self.k_norm
        gate = None
        if self._is_plain:
            ahead = [self.output]
            q, kv = kv.project(x, self.first, self.norm, norms, self.head_dim, ahead)
        else:
            q, gate, kv = self._projected(x, kv, norms)
        seen: dict[str, Any] = {
            "window": self.window,
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "soft_cap": self.soft_cap,
        }
        if self.sinks is not None:
            seen["sinks"] = self.sinks.get_value()
        added_to = None if self._adds_separately else residual
        if self._is_padded:
            y = kv.attention(q, **seen)[..., : self.head_dim]
            y = _gated(y, gate)
            y = y.reshape(*y.shape[:-2], -1)
            y = linear(y, self.output, residual=added_to, prefetch=prefetch)[0]
        else:
            seen |= {} if gate is None else {"gate": gate}
            y = kv.attend(q, self.output, added_to, prefetch, **seen)
        if self._adds_separately:
            y = added(residual, y, self.post_norm, self.residual_scale)
        y = y if self.sum_norm is None else self.sum_norm(y)
        return (y if self.second_norm is None else self.second_norm(residual + y)), kv

    @property
    def first(self) -> list[Linear]:
        """The projections to queries, keys and values that this layer has."""
        return [p for p in (self.query, self.key, self.value) if p is not None]

    @property
    def _is_plain(self) -> bool:
        """Whether heads need only a norm per head and rotation between projection and cache."""
        of_heads = self.q_norm is None or self._per_head(self.q_norm)
        separate = self.output_gate or self.value_eps is not None or self._is_padded
        return len(self.first) == 3 and of_heads and not separate

    @property
    def _is_padded(self) -> bool:
        """Whether a head's row in the cache is wider than head_dim."""
        return stored_head_dim(self.head_dim) != self.head_dim

    def _widened(self, x: Array, norm: RMSNorm | None) -> tuple[Array, RMSNorm | None]:
        """Appends zeros to each head of x (..., heads, head_dim), to the width of the cache.

        Returns the heads, and the norm that remains to be applied. Heads that get zeros are
        normalized first, because zeros would change their mean square.
        """
        zeros = stored_head_dim(self.head_dim) - self.head_dim
        if not zeros:
            return x, norm
        x = x if norm is None else norm(x)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, zeros)]), None

    def _projected(self, x: Array, kv: KV, norms: Any) -> tuple[Array, Array | None, KV]:
        """Projects x step by step, without fusing, for layers that are not plain.

        Returns the queries, their output gate (..., heads, head_dim), None if absent, and `kv`
        updated with x's keys and values.
        """
        q, *kv_rows = linear(x, *self.first, norm=self.norm, prefetch=[self.output])
        if self.q_norm is not None and not self._per_head(self.q_norm):
            normalized = zip(norms, (q, *kv_rows[:1]), strict=True)
            q, kv_rows[0] = (norm(y) for norm, y in normalized)
            norms = None, None
        # gate rows follow those of each head
        gate_dim, gate = self.head_dim if self.output_gate else 0, None
        q = heads(q, self.head_dim + gate_dim)
        if self.output_gate and self._is_padded:
            q, gate = jnp.split(q, 2, axis=-1)
            gate_dim = 0
        if not kv_rows:
            return kv.query(*self._widened(q, norms[0])), gate, kv
        k, v = (heads(y, self.head_dim) for y in (kv_rows[0], kv_rows[-1]))
        value_eps = self.value_eps
        if value_eps is not None and self._is_padded:
            v, value_eps = normalized_values(v, value_eps), None
        widened = (
            self._widened(x, norm) for x, norm in zip((q, k, v), (*norms, None), strict=True)
        )
        (q, q_norm), (k, k_norm), (v, _) = widened
        # normalizes, rotates, stores
        q, rest, kv = kv.append(q, k, v, (q_norm, k_norm), gate_dim, value_eps)
        return q, gate if rest is None else rest, kv

    @property
    def _adds_separately(self) -> bool:
        """Whether a norm or factor between output projection and residual prevents fusing them."""
        return self.post_norm is not None or self.residual_scale is not None

    def _per_head(self, norm: Norm) -> bool:
        """Returns whether a norm applies per head, so that it can be fused with rotation."""
        return isinstance(norm, RMSNorm) and norm.weight.shape == (self.head_dim,)


def normalized_values(v: Array, eps: float) -> Array:
    """Applies an RMSNorm without weights to each head of v (..., heads, head_dim)."""
    return jq.rms_norm(v, np.ones(v.shape[-1], np.float32), eps=eps)


def heads(x: Array, head_dim: int) -> Array:
    """Reshapes (..., heads * head_dim) to (..., heads, head_dim)."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Keys and values of a layer in a pass over whole prompts, with causal attention.

    Differentiable if `pages` is empty.

    Attributes:
      rotation: rotary cosines and sines of tokens (batch, time).
      temperature: (batch, time), factor of queries; None means 1.
      lengths: (batch,), tokens of each row before padding.
      pages, slots: the layer's KV pages, and the slots that keys and values are also written to;
        () means that they are not stored.
      k, v: (batch, time, num_kv_heads, head_dim), set by `append`.
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
        prefetch: Prefetch = (),
    ) -> tuple[Array, Fresh]:
        """Projects x (batch, time, hidden_size) to queries, keys and values; calls `append`.

        Returns the queries, and self with the keys and values.
        """
        ys = linear(x, *projections, norm=norm, prefetch=prefetch)
        q, k, v = (heads(y, head_dim) for y in ys)
        q, _, kv = self.append(q, k, v, norms)
        return q, kv

    def append(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: Norms,
        q_rest: int = 0,
        value_eps: float | None = None,
    ) -> tuple[Array, Array | None, Fresh]:
        """Normalizes and rotates queries and keys; normalizes values unless `value_eps` is None.

        Returns scaled q, the last `q_rest` elements of its rows (None if 0), which are not part of
        the query, and self with k and v.
        """
        v = v if value_eps is None else normalized_values(v, value_eps)
        k, v = repeat_kv_heads(self.pages, k, v)
        if self.pages:
            vectors = [flat_rows(x) for x in (q, k, v)]
            cos, sin, _ = self.rotation
            rotation = self.rotation._replace(cos=flat_rows(cos), sin=flat_rows(sin))
            # attends to returned keys, because those in pages may be rounded
            args = vectors, self.pages, self.slots, rotation, norms
            *queries, pages, keys = _appended(*args, q_rest=q_rest, return_keys=True)
            q, *rest = (x.reshape(*q.shape[:-1], -1) for x in queries)
            k = keys.reshape(k.shape)
        else:
            rest = [q[..., -q_rest:]] if q_rest else []
            q = q[..., : k.shape[-1]]
            q, k = (_rotated(x, norm, self.rotation) for x, norm in zip((q, k), norms, strict=True))
            pages = ()
        kv = dataclasses.replace(self, pages=pages, k=k, v=v)
        return _scaled(q, self.temperature), rest[0] if rest else None, kv

    def store(self, rows: Array) -> Fresh:
        """Writes `rows` (batch, time, 1, n), latent vectors with shared keys, to the pages, if any.

        Returns self with the updated pages.
        """
        if not self.pages:
            return self
        pages = append_latent(self.pages, flat_rows(rows), self.slots)
        return dataclasses.replace(self, pages=pages)

    def query(self, q: Array, norm: Norm | None) -> Array:
        """Normalizes, rotates and scales q, for layers that share an earlier layer's KV."""
        return _scaled(_rotated(q, norm, self.rotation), self.temperature)

    def attention(self, q: Array, *, gate: Array | None = None, **seen: Any) -> Array:
        """Returns causal attention of q (batch, time, num_heads, head_dim).

        gate: like q; its sigmoid multiplies the result. seen: options of
        `jax_q4k.causal_attention`.
        """
        return _gated(jq.causal_attention(q, self.k, self.v, self.lengths, **seen), gate)

    def attend(
        self, q: Array, output: Linear, residual: Array | None, prefetch: Prefetch = (), **seen: Any
    ) -> Array:
        """Returns residual + output(attention(q)), (batch, time, hidden_size)."""
        out = self.attention(q, **seen).reshape(*q.shape[:2], -1)
        return linear(out, output, residual=residual, prefetch=prefetch)[0]


@dataclasses.dataclass(frozen=True)
class Paged:
    """A layer's KV pages, to which one token or a chunk per sequence is appended.

    See `PagedCache`. Arrays of tokens have a leading axis (batch,), or (batch * time,) for chunks.

    Attributes:
      rotation, temperature, slots: rotary cosines and sines, query factors and slots of the new
        tokens.
      lens: (batch,), stored tokens of each sequence, the new ones included.
      lengths: (batch,), new tokens of each sequence, up to time; None means one each.
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
        prefetch: Prefetch = (),
    ) -> tuple[Array, Paged]:
        """Like `Fresh.project`, for x (batch, hidden_size), one token per row."""
        k_pages, v_pages, *_ = self.pages
        kv_rows = k_pages.shape[1] * head_dim  # pages may hold each head several times
        if not fusible(*projections) or projections[1].weight.shape[0] != kv_rows:
            ys = linear(x, *projections, norm=norm, prefetch=prefetch)
            q, k, v = (heads(y, head_dim) for y in ys)
            q, _, kv = self.append(q, k, v, norms)
            return q, kv
        options = _of_heads(self.pages, self.rotation, norms)
        options |= {"head_eps": options.pop("eps"), "biases": [p.bias for p in projections]}
        x, normalizing = normalized(x, norm)
        weights = weights_of(projections)
        options["prefetch"] = weights_of(prefetch)
        options |= {"k_pages": k_pages, "v_pages": v_pages, "slot_mapping": self.slots}
        q, *pages = jq.qkv_rope_append(x, weights, **options, **normalizing)
        return _scaled(q, self.temperature), dataclasses.replace(self, pages=tuple(pages))

    def append(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: Norms,
        q_rest: int = 0,
        value_eps: float | None = None,
    ) -> tuple[Array, Array | None, Paged]:
        """Like `Fresh.append`, for heads (batch, heads, head_dim)."""
        k, v = repeat_kv_heads(self.pages, k, v)
        args = [q, k, v], self.pages, self.slots, self.rotation, norms
        q, *rest, pages = _appended(*args, q_rest=q_rest, v_eps=value_eps)
        kv = dataclasses.replace(self, pages=pages)
        return _scaled(q, self.temperature), rest[0] if rest else None, kv

    def append_latent(
        self, q: Array, rows: Array, norm: RMSNorm, q_rest: int
    ) -> tuple[Array, Array, Paged]:
        """Normalizes latent vectors, rotates their keys and stores both; rotates queries.

        q: (batch, num_heads, q_rest + rope_dim). rows: (batch, rank + rope_dim), latent vectors and
        shared keys, as wide as a row of the pages. Returns the first `q_rest` elements of queries,
        the rotated others, and self with the updated pages.
        """
        options = self.rotation._asdict() | scales(self.pages)
        options |= {"k_norm": norm.weight, "eps": norm.eps, "q_rest": q_rest}
        latent = rows[:, None], None, self.pages[0], None, self.slots
        rotated, rest, *pages = jq.rope_append(q, *latent, **options)
        return rest, rotated, dataclasses.replace(self, pages=tuple(pages))

    def store(self, rows: Array) -> Paged:
        """Like `Fresh.store`, for rows (batch, 1, n)."""
        pages = append_latent(self.pages, rows, self.slots)
        return dataclasses.replace(self, pages=pages)

    def latent_attention(
        self, q: Array, rank: int, *, scale: float, q_rest: Array | None = None
    ) -> Array:
        """Returns attention of q (batch, num_heads, n) over the latent cache.

        The result is (batch, num_heads, rank). q_rest: see `jax_q4k.paged_attention`.
        """
        rest = None if q_rest is None else self._of_sequences(q_rest)
        options = {"value_dim": rank, "scale": scale, "q_rest": rest} | self._options
        args = self._of_sequences(q), self.pages[0], None, self.block_tables, self.lens
        return jq.paged_attention(*args, **options).reshape(*q.shape[:-1], rank)

    def query(self, q: Array, norm: Norm | None) -> Array:
        """Like `Fresh.query`, for q (batch, heads, head_dim)."""
        return _scaled(_rotated(q, norm, self.rotation), self.temperature)

    def attention(self, q: Array, *, gate: Array | None = None, **seen: Any) -> Array:
        """Like `Fresh.attention`, for q (batch, num_heads, head_dim)."""
        options = seen | self._options | {"gate": self._gate(gate)}
        return jq.paged_attention(*self._paged_args(q), **options).reshape(q.shape)

    def attend(
        self,
        q: Array,
        output: Linear,
        residual: Array | None,
        prefetch: Prefetch = (),
        *,
        gate: Array | None = None,
        **seen: Any,
    ) -> Array:
        """Like `Fresh.attend`, but returns (batch, hidden_size)."""
        if not fusible(output):
            out = self.attention(q, gate=gate, **seen).reshape(len(q), -1)
            return linear(out, output, residual=residual, prefetch=prefetch)[0]
        if residual is not None:
            residual = self._of_sequences(residual)
        options = seen | self._options | {"bias": output.bias, "residual": residual}
        options |= {"prefetch": weights_of(prefetch), "gate": self._gate(gate)}
        y = jq.paged_attention_matmul(*self._paged_args(q), output.weight, **options)
        return y.reshape(len(q), -1)

    @property
    def _options(self) -> dict[str, Any]:
        """Keyword arguments of paged attention: scales of int8 pages, and lengths of chunks."""
        of_pieces = {} if self.lengths is None else {"lengths": self.lengths}
        return scales(self.pages) | of_pieces

    def _gate(self, gate: Array | None) -> Array | None:
        return None if gate is None else self._of_sequences(gate)

    def _of_sequences(self, x: Array) -> Array:
        """Reshapes chunks' tokens (batch * time, ...) to (batch, time, ...)."""
        return x if self.lengths is None else x.reshape(len(self.lengths), -1, *x.shape[1:])

    def _paged_args(self, q: Array) -> tuple[Array, Array, Array, Array, Array]:
        k_pages, v_pages, *_ = self.pages
        return self._of_sequences(q), k_pages, v_pages, self.block_tables, self.lens


def _gated(y: Array, gate: Array | None) -> Array:
    """Multiplies attention's result by the sigmoid of its output gate, if there is one."""
    return y if gate is None else y * jax.nn.sigmoid(gate)


def _rotated(x: Array, norm: Norm | None, rotation: Rotation) -> Array:
    """Normalizes and rotates each head of x (..., heads, head_dim)."""
    return jq.rotate(x if norm is None else norm(x), **rotation._asdict())


def _appended(
    vectors: list[Array],
    pages: Pages,
    slots: Array,
    rotation: Rotation,
    norms: Norms,
    *,
    q_rest: int = 0,
    **more: Any,
) -> list[Any]:
    """Normalizes and rotates queries and keys, and stores keys and values in the pages.

    vectors: queries, keys and values (tokens, heads, head_dim). q_rest, more: options of
    `jq.rope_append`. Returns queries, with `q_rest` the rest of their rows, the updated pages as a
    tuple, and with `return_keys` the keys.
    """
    q, k, v = vectors
    options = _of_heads(pages, rotation, norms) | {"q_rest": q_rest} | more
    results = jq.rope_append(q, k, v, pages[0], pages[1], slots, **options)
    first = 1 + bool(q_rest)
    end = first + len(pages)
    return [*results[:first], results[first:end], *results[end:]]


def _of_heads(pages: Pages, rotation: Rotation, norms: Norms) -> dict[str, Any]:
    """Returns keyword arguments of operations that normalize, rotate and store heads."""
    weights: list[Any] = [None if norm is None else norm.weight for norm in norms]
    norm_options = {"eps": norms[0] and norms[0].eps, "q_norm": weights[0], "k_norm": weights[1]}
    return rotation._asdict() | scales(pages) | norm_options


def _scaled(q: Array, temperature: Array | None) -> Array:
    """Multiplies queries (..., heads, head_dim) by each token's factor (...); None means 1."""
    return q if temperature is None else q * temperature[..., None, None]
