"""Flax modules of a decoder layer: attention, MLP, experts, recurrent mixers.

A sublayer maps x to x + post_norm(f(norm(x))) and owns its norms. Only this package knows which
steps are fused into one kernel: fused operations take the weights of Linears and RMSNorms. If
another module replaces a Linear, or a Linear has a scale, the same steps run separately. The base
matmuls of AdaptedLinears still run as one kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from flax import nnx
from jax import Array

from .attention import KV, Attention, Fresh, Paged
from .bidirectional import Whole
from .convolution import ShortConvolution
from .delta import GatedDeltaNet
from .experts import DenseBesideExperts, ExpertLinear, Experts
from .head import Dense, Head
from .latent import LatentAttention
from .linear import AdaptedLinear, LayerNorm, Linear, Norm, Prefetch, RMSNorm, linear
from .mlp import ACTIVATIONS, MLP
from .per_layer import PerLayer, PerLayerEmbedding
from .recurrent import Chunk, Step

__all__ = [
    "ACTIVATIONS",
    "KV",
    "MLP",
    "AdaptedLinear",
    "Attention",
    "Chunk",
    "DecoderLayer",
    "Dense",
    "DenseBesideExperts",
    "ExpertLinear",
    "Experts",
    "Fresh",
    "GatedDeltaNet",
    "Head",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "Linear",
    "Paged",
    "PerLayer",
    "PerLayerEmbedding",
    "RMSNorm",
    "ShortConvolution",
    "Step",
    "Whole",
    "linear",
]


#: A layer's cache: keys and values, or recurrent state.
LayerCache: TypeAlias = "Fresh | Paged | Chunk | Step"


@dataclasses.dataclass(eq=False, repr=False)
class DecoderLayer(nnx.Module):
    """Transformer block: token mixer, then MLP; or both in parallel on one norm.

    Attributes:
      attention, delta, convolution: the token mixer; exactly one is set.
      norm: norm that mixer and MLP share if they run in parallel; None means that each has its own
        norm and they run in sequence.
      per_layer: adds the per-layer embedding; None if absent.
      output_scale: (1,), factor of the block's output; None means 1.
    """

    mlp: MLP | Experts | DenseBesideExperts
    attention: Attention | LatentAttention | None = None
    delta: GatedDeltaNet | None = None
    convolution: ShortConvolution | None = None
    norm: Norm | None = None
    per_layer: PerLayer | None = None
    output_scale: nnx.Variable[Array] | None = None

    def __call__(
        self,
        x: Array,
        cache: Any,
        per_layer_embedding: Array | None = None,
        prefetch: Prefetch = (),
    ) -> tuple[Array, Any]:
        """Maps x (..., hidden_size) to the block's output; also returns the updated cache.

        cache: KV for attention, Chunk or Step for other mixers. per_layer_embedding:
        (..., per_layer_size); None if absent. prefetch: projections that run after the layer.
        """
        x, cache = self._mixed(x, cache, prefetch)
        if self.per_layer is not None and per_layer_embedding is not None:
            x = self.per_layer(x, per_layer_embedding)
        if self.output_scale is not None:
            x = x * self.output_scale.get_value().reshape(())
        return x, cache

    @property
    def mixer(self) -> Attention | LatentAttention | GatedDeltaNet | ShortConvolution:
        """The token mixer: attention, delta net or convolution."""
        mixer = self.attention or self.delta or self.convolution
        assert mixer is not None
        return mixer

    @property
    def first(self) -> list[Linear]:
        """The layer's first projections, whose weights the layer before it prefetches."""
        return self.mixer.first

    def _mixed(self, x: Array, cache: Any, prefetch: Prefetch) -> tuple[Array, Any]:
        # weights of MoE networks depend on routing and are not prefetched
        network = self.mlp.first if isinstance(self.mlp, MLP) else []
        if self.norm is None:
            x, cache = self.mixer(x, cache, prefetch=network)
            return self._network(x, None, prefetch), cache
        h = self.norm(x)
        x, cache = self.mixer(h, cache, residual=x, prefetch=network)
        return self._network(h, x, prefetch), cache

    def _network(self, x: Array, residual: Array | None, prefetch: Prefetch) -> Array:
        if isinstance(self.mlp, MLP):
            return self.mlp(x, residual, prefetch)
        return self.mlp(x, residual)
