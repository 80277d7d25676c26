"""A decoder layer's parts: the one folder that knows which steps run as one kernel.

A sublayer maps x to x + post_norm(f(norm(x))) and owns its norms. Fused operations take the weights
of Linears and RMSNorms. Where another module stands in a Linear's place, such as an adapter around
it, or where a Linear has a scale, the same steps run one by one.
"""

from __future__ import annotations

import dataclasses

from flax import nnx
from jax import Array

from .attention import KV, Attention, Fresh, Paged
from .experts import ExpertLinear, Experts
from .linear import LayerNorm, Linear, Norm, RMSNorm, linear
from .mlp import MLP

__all__ = [
    "KV",
    "MLP",
    "Attention",
    "DecoderLayer",
    "ExpertLinear",
    "Experts",
    "Fresh",
    "LayerNorm",
    "Linear",
    "Paged",
    "RMSNorm",
    "linear",
]


@dataclasses.dataclass(eq=False, repr=False)
class DecoderLayer(nnx.Module):
    """Attention, then the feed-forward network; or both of one norm of x, added up.

    norm: that of both; None: they have their own, and the network follows attention.
    """

    attention: Attention
    mlp: MLP | Experts
    norm: Norm | None = None

    def __call__(self, x: Array, kv: KV) -> tuple[Array, KV]:
        """x (..., hidden_size) -> x after the layer; and kv with its keys and values."""
        if self.norm is None:
            x, kv = self.attention(x, kv)
            return self.mlp(x), kv
        h = self.norm(x)
        x, kv = self.attention(h, kv, residual=x)
        return self.mlp(h, residual=x), kv
