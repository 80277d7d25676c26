"""Linear layers, LoRA layers and norms as Flax modules, and their fusion into one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from .. import flax_types


class Matrix(nnx.Module):
    """Base of Linear and ExpertLinear: a weight matrix, or one per expert, with bias and scales.

    weight: packed or float. bias: float32, None if absent. scale: float32 factor of the matmul's
    result; None means 1. input_scale: kept only for saving; matmuls ignore it, as in llama.cpp.
    """

    def __init__(
        self,
        weight: jq.QuantizedArray | Array,
        bias: Array | None = None,
        scale: Array | None = None,
        input_scale: Array | None = None,
    ) -> None:
        self.weight = flax_types.variable(weight)
        self.bias = None if bias is None else nnx.Param(bias)
        self.scale = None if scale is None else nnx.Param(scale)
        self.input_scale = None if input_scale is None else nnx.Variable(input_scale)


class Linear(Matrix):
    """Computes scale * x @ W.T + b for x (..., k), W (n, k), b (n,) and a scale (1,)."""

    def __call__(self, x: Array) -> Array:
        if self.scale is None:
            return jq.matmul(x, self.weight, bias=self.bias)
        return self.of_product(jq.matmul(x, self.weight))

    def of_product(self, y: Array) -> Array:
        """Returns the layer's output, scale * y + b, given y = x @ W.T."""
        scale = None if self.scale is None else self.scale.get_value().reshape(())
        return scaled(y, scale, None if self.bias is None else self.bias.get_value())


class AdaptedLinear(nnx.Module):
    """LoRA: computes base(x) + ((x @ a.T) * scale) @ b.T in float32.

    Attributes:
      base: the adapted Linear (n, k).
      a, b: LoRA matrices (rank, k) and (n, rank), float.
      scale: float32 scalar, or (rows, rank): factors for the tokens of each row, where x is
        (rows, k), (rows, time, k) or (rows * time, k). A column whose factor is 0 adds nothing,
        even if it is infinite.
    """

    def __init__(self, base: Linear | AdaptedLinear, a: Array, b: Array, scale: Array) -> None:
        self.base = base
        self.a, self.b, self.scale = nnx.Param(a), nnx.Param(b), nnx.Param(scale)

    def __call__(self, x: Array) -> Array:
        return self.added(x, self.base(x))

    def added(self, x: Array, y: Array) -> Array:
        """Returns y, the base layer's output for x, plus the LoRA update."""
        inner, scale = _product(x.astype(jnp.float32), self.a.get_value()), self.scale.get_value()
        if scale.ndim:
            of_rows, factors = inner.reshape(len(scale), -1, scale.shape[1]), scale[:, None]
            inner = jnp.where(factors == 0, 0.0, of_rows * factors).reshape(inner.shape)
        else:
            inner = scale * inner
        z = y.astype(jnp.float32) + _product(inner, self.b.get_value())
        return z.astype(y.dtype)


def _product(x: Array, w: Array) -> Array:
    """Returns x (..., k) @ w.T for w (n, k), in full float32 precision on every device."""
    return jnp.einsum("...k,nk->...n", x, w.astype(jnp.float32), precision="highest")


class RMSNorm(nnx.Module):
    """Computes [residual +] x / sqrt(mean(x^2) + eps) * w along the last axis, in float32."""

    def __init__(self, weight: Array, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        return jq.rms_norm(x, self.weight, eps=self.eps, residual=residual)


class LayerNorm(nnx.Module):
    """Computes (x - mean) / sqrt(variance + eps) * w + b along w's last axis, in float32.

    weight: (n,), or (heads, n) for a norm per head of x (..., heads * n). bias: (n,); None if
    absent.
    """

    def __init__(self, weight: Array, eps: float, bias: Array | None = None) -> None:
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        weight, dtype = self.weight.get_value(), x.dtype
        heads = x.reshape(*x.shape[:-1], *weight.shape).astype(jnp.float32)
        centred = heads - heads.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps) * weight
        y = y if self.bias is None else y + self.bias.get_value()
        return y.reshape(x.shape).astype(dtype)


Norm: TypeAlias = RMSNorm | LayerNorm


#: Projections that start the next sublayer; the kernel before them may prefetch their weights.
Prefetch: TypeAlias = "Sequence[Linear | AdaptedLinear]"


def linear(
    x: Array,
    *projections: Linear,
    norm: Norm | None = None,
    residual: Array | None = None,
    prefetch: Prefetch = (),
) -> list[Array]:
    """Returns residual + projection(norm(x)), (..., n_i), for each projection.

    residual: allowed with a single projection only. prefetch: projections that run next.
    """
    if any(type(projection) is AdaptedLinear for projection in projections):
        h = x if norm is None else norm(x)
        bases = (p.base if type(p) is AdaptedLinear else p for p in projections)
        # one kernel, as without adapters
        ys = linear(h, *bases, residual=residual, prefetch=prefetch)
        both = zip(projections, ys, strict=True)
        return [p.added(h, y) if type(p) is AdaptedLinear else y for p, y in both]
    if not all(type(projection) is Linear for projection in projections):
        h = x if norm is None else norm(x)
        ys = [projection(h) for projection in projections]
        return ys if residual is None else [residual + y for y in ys]
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    x, options = normalized(x, norm)
    options["prefetch"] = weights_of(prefetch)
    if fusible(*projections):
        return list(jq.linear(x, weights, biases=biases, residual=residual, **options))
    products = jq.linear(x, weights, **options)
    ys = [p.of_product(y) for p, y in zip(projections, products, strict=True)]
    return ys if residual is None else [residual + y for y in ys]


def weights_of(projections: Prefetch) -> list[Any]:
    """Returns the weights of the projections, to prefetch; skips modules of unknown types."""
    found: list[Any] = []
    for projection in projections:
        while isinstance(projection, AdaptedLinear):
            projection = projection.base
        if isinstance(projection, Linear):
            found.append(projection.weight)
    return found


def fusible(*projections: Any) -> bool:
    """Returns whether fused operations can take the weights of these modules."""
    return all(type(p) is Linear and p.scale is None for p in projections)


def scaled(y: Array, scale: Array | None, bias: Array | None) -> Array:
    """Returns scale * y + bias in y's dtype, computed in float32."""
    z = y.astype(jnp.float32)
    z = z if scale is None else scale * z
    return (z if bias is None else z + bias).astype(y.dtype)


def normalized(x: Array, norm: Norm | None) -> tuple[Array, dict[str, Any]]:
    """Prepares norm(x) for operations that fuse an RMSNorm.

    For an RMSNorm, returns x and the norm's keyword arguments. Applies another norm here, and
    returns its result without arguments.
    """
    if isinstance(norm, RMSNorm):
        return x, {"norm_weight": norm.weight, "eps": norm.eps}
    return (x if norm is None else norm(x)), {}


def added(residual: Array | None, y: Array, post_norm: Norm | None, scale: float | None) -> Array:
    """Returns residual + scale * post_norm(y); a residual of None means 0."""
    if isinstance(post_norm, RMSNorm) and scale is None:
        return post_norm(y, residual)
    y = y if post_norm is None else post_norm(y)
    y = y if scale is None else scale * y
    return y if residual is None else residual + y
