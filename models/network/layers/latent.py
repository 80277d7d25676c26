"""Multi-head latent attention (MLA) as a Flax module (https://arxiv.org/abs/2405.04434)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jax_q4k as jq

from ...config.attention_fields import Latent
from .attention import KV, Fresh, Paged
from .experts import ExpertLinear
from .linear import Linear, Norm, Prefetch, RMSNorm, linear


@dataclasses.dataclass(eq=False, repr=False)
class LatentAttention(nnx.Module):
    """Attention whose keys and values are projections of one latent vector per token.

    A head's key is the latent vector projected by `key_b`, concatenated with a rotated key that all
    heads share. Whole prompts attend to these keys and values. The KV cache stores the latent
    vector and the shared key instead. Attention over pages projects the queries with `key_b`, so
    that the latent vector is both key and value ("absorbed").

    Attributes:
      kv_a, kv_a_norm: projection to the latent vector and the shared key; norm of the latent
        vector.
      key_b, value_b: matrices per head, (heads, rank, head_dim - rope_dim) and (heads, value_dim,
        rank); rank is the size of the latent vector.
      query: projection to queries. None means that queries are query_b(query_a_norm(query_a(x))).
      head_dim: size of a query head; its last `rope_dim` elements are rotated.
    """

    kv_a: Linear
    kv_a_norm: RMSNorm
    key_b: ExpertLinear
    value_b: ExpertLinear
    output: Linear
    shape: Latent
    head_dim: int
    rope_dim: int
    scale: float | None
    query: Linear | None = None
    query_a: Linear | None = None
    query_a_norm: RMSNorm | None = None
    query_b: Linear | None = None
    norm: Norm | None = None

    @property
    def first(self) -> list[Linear]:
        """The input projections."""
        query = self.query or self.query_a
        assert query is not None
        return [query, self.kv_a]

    def __call__(
        self, x: Array, kv: KV, residual: Array | None = None, prefetch: Prefetch = ()
    ) -> tuple[Array, KV]:
        """Returns residual + attention(x), (..., hidden_size), and `kv` updated with x's tokens.

        residual: x if None. prefetch: projections that run next.
        """
        residual = x if residual is None else residual
        q, rows = self._projected(x)
        if isinstance(kv, Paged) and self._fills_pages:
            part = self.head_dim - self.rope_dim
            q, rotated, kv = kv.append_latent(q, rows, self.kv_a_norm, part)
            q, rank = _of_heads(self.key_b, q), self.shape.rank
            y = kv.latent_attention(q, rank, scale=self._scale, q_rest=rotated)
            y = _of_heads(self.value_b, y)
        else:
            y, kv = self._by_steps(q, rows, kv)
        y = y.reshape(*y.shape[:-2], -1)
        return linear(y, self.output, residual=residual, prefetch=prefetch)[0], kv

    @property
    def _fills_pages(self) -> bool:
        """Whether a latent vector and its shared key fill a row of the cache without padding."""
        shape, rope_dim = self.shape, self.rope_dim
        whole = shape.rank, shape.rank + rope_dim
        return (shape.stored_rank, shape.stored_dim(rope_dim)) == whole

    def _by_steps(self, q: Array, rows: Array, kv: KV) -> tuple[Array, KV]:
        """Attends without fusing: for prompts, and for rows that do not fill those of the cache.

        Returns attention (..., heads, value_dim), and the updated `kv`.
        """
        part = self.head_dim - self.rope_dim
        latent, shared = jnp.split(rows, (self.shape.rank,), axis=-1)
        latent, turned = self._normalized(latent), (q[..., part:], shared[..., None, :])
        turned_q, turned_k = (jq.rotate(y, **kv.rotation._asdict()) for y in turned)
        keys = self._stored(latent[..., None, :], turned_k)
        kv = kv.store(keys)
        if isinstance(kv, Fresh) and self._can_decode:
            q = jnp.concatenate([q[..., :part], turned_q], axis=-1)
            return self._unabsorbed(kv, q, latent, turned_k), kv
        q = self._stored(_of_heads(self.key_b, q[..., :part]), turned_q)
        if isinstance(kv, Fresh):
            values = latent[..., None, :]
            y = jq.causal_attention(q, keys, values, kv.lengths, scale=self._scale)
        else:
            y = kv.latent_attention(q, self.shape.stored_rank, scale=self._scale)
        return _of_heads(self.value_b, y[..., : self.shape.rank]), kv

    @property
    def _can_decode(self) -> bool:
        """Whether the heads' matrices may be decoded to floats, since no module replaces them."""
        return all(type(matrices) is ExpertLinear for matrices in (self.key_b, self.value_b))

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def _stored(self, latent: Array, rotated: Array) -> Array:
        """Returns rows for the KV cache: latent vectors and shared keys, padded to a page's row.

        latent: (..., rank). rotated: (..., rope_dim), the rotated shared keys.
        """
        shape, dim = self.shape, self.shape.stored_dim(self.rope_dim)
        between = shape.stored_rank - shape.rank
        padding = dim - shape.stored_rank - self.rope_dim
        parts = (_widened(latent, between), _widened(rotated, padding))
        return jnp.concatenate(parts, axis=-1)

    def _projected(self, x: Array) -> tuple[Array, Array]:
        """Returns queries (..., heads, head_dim), and rows of a latent vector and a shared key."""
        if self.query is not None:
            q, rows = linear(x, *self.first, norm=self.norm)
        else:
            assert self.query_a is not None and self.query_b is not None
            q, rows = linear(x, *self.first, norm=self.norm, prefetch=[self.query_b])
            (q,) = linear(q, self.query_b, norm=self.query_a_norm)
        return q.reshape(*q.shape[:-1], -1, self.head_dim), rows

    def _normalized(self, latent: Array) -> Array:
        """Applies `kv_a_norm` to latent vectors in XLA; a PTX kernel would need a copy of them."""
        x, norm = latent.astype(jnp.float32), self.kv_a_norm
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        weight = jnp.expand_dims(norm.weight.get_value(), range(x.ndim - 1))
        y = x * jax.lax.rsqrt(mean_square + norm.eps) * weight
        return y.astype(latent.dtype)

    def _unabsorbed(self, kv: Fresh, q: Array, latent: Array, shared: Array) -> Array:
        """Returns causal attention over a whole prompt, with keys and values of every head.

        The result is (batch, time, heads, value_dim).
        """
        key_b, value_b = (_floats(matrix) for matrix in (self.key_b, self.value_b))
        options: dict[str, Any] = {"precision": "highest"}
        k = jnp.einsum("...r,hrn->...hn", latent, key_b, **options)
        v = jnp.einsum("...r,hvr->...hv", latent, value_b, **options)
        of_heads = jnp.broadcast_to(shared, (*k.shape[:-1], self.rope_dim))
        k = jnp.concatenate([k, of_heads], axis=-1)
        return jq.causal_attention(q, k, v, kv.lengths, scale=self._scale)


def _widened(x: Array, zeros: int) -> Array:
    """Appends zeros to the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, zeros)]) if zeros else x


def _of_heads(matrices: ExpertLinear, x: Array) -> Array:
    """Multiplies each head by its matrix: x (..., heads, k) -> (..., heads, n)."""
    *leading, heads, _ = x.shape
    # A NumPy constant, because XLA would launch a kernel for an iota.
    every = np.arange(heads, dtype=np.int32)[:, None]
    return matrices(x, jnp.broadcast_to(every, (*leading, heads, 1)))[..., 0, :]


def _floats(matrices: ExpertLinear) -> Array:
    """Decodes the heads' matrices to float32 (heads, n, k), scaled if they have a scale."""
    weight = matrices.weight.get_value()
    packed = isinstance(weight, jq.QuantizedArray)
    floats = weight.dequantize() if packed else weight.astype(jnp.float32)
    return floats if matrices.scale is None else floats * matrices.scale.get_value()[:, None, None]
