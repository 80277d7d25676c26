"""A decoder layer's parts: the one folder that knows which steps run as one kernel.

A sublayer maps x to x + post_norm(f(norm(x))) and owns its norms. Fused operations take the weights
of Linears and RMSNorms. Where another module stands in a Linear's place, such as an adapter around
it, or where a Linear has a scale, the same steps run one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jax import Array

from .attention import KV, Attention, Fresh, Paged
from .convolution import ShortConvolution
from .delta import GatedDeltaNet
from .experts import ExpertLinear, Experts
from .linear import LayerNorm, Linear, Norm, RMSNorm, linear
from .mlp import MLP
from .recurrent import Chunk, Memory, Step

__all__ = [
    "KV",
    "MLP",
    "Attention",
    "Chunk",
    "DecoderLayer",
    "ExpertLinear",
    "Experts",
    "Fresh",
    "GatedDeltaNet",
    "LayerNorm",
    "Linear",
    "Memory",
    "Paged",
    "RMSNorm",
    "ShortConvolution",
    "Step",
    "linear",
]


@dataclasses.dataclass(eq=False, repr=False)
class DecoderLayer(nnx.Module):
    """What mixes tokens, then the feed-forward network; or both of one norm of x, added up.

    Attributes:
      attention, delta, convolution: what mixes tokens: one of them.
      norm: that of both; None: they have their own, and the network comes second.
    """

    mlp: MLP | Experts
    attention: Attention | None = None
    delta: GatedDeltaNet | None = None
    convolution: ShortConvolution | None = None
    norm: Norm | None = None

    def __call__(self, x: Array, memory: Any) -> tuple[Array, Any]:
        """x (..., hidden_size) -> x after the layer; and the memory with its tokens.

        memory: KV of attention, Memory of others.
        """
        mixer: Any = self.attention or self.delta or self.convolution
        if self.norm is None:
            x, memory = mixer(x, memory)
            return self.mlp(x), memory
        h = self.norm(x)
        x, memory = mixer(h, memory, residual=x)
        return self.mlp(h, residual=x), memory
