"""Defines Config: a decoder's architecture and dimensions, read from GGUF metadata."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_q4k import GGUFError
from jax_q4k.gguf import REQUIRED, Fields

from ..architectures import ARCHITECTURES
from ..architectures.base import (
    CHECKPOINT_INTERLEAVED,
    MAX_LAYERS,
    NO_CAP,
    QUERY_FACTOR,
    Architecture,
    MixerKind,
)
from . import (
    attention_fields,
    encoder_fields,
    expert_fields,
    layer_patterns,
    metadata_keys,
    mixer_fields,
    other_files,
    rope_fields,
)
from .attention_fields import Latent
from .expert_fields import Experts
from .mixer_fields import Delta
from .rope import Rope, Yarn
from .rope_fields import MAX_CONTEXT

_MAX_SIZE = 1 << 24  # far above any real model; bounds the work that a malformed file can cause


class Scales(NamedTuple):
    """Scale factors in a file's metadata; None if the file has no such key."""

    embedding: float | None = None
    residual: float | None = None  # of sublayer outputs
    attention: float | None = None  # of scores
    logits: float | None = None  # as in the file; `Architecture.logit_scale` converts it


#: GGUF key of each of Scales -> values that have no effect.
_SCALES = {
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "logit_scale": (0, 1),
}

#: Field of Config and Architecture -> GGUF key.
_SOFT_CAPS = {
    "attention_soft_cap": "attn_logit_softcapping",
    "final_soft_cap": "final_logit_softcapping",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Config:
    """Architecture and dimensions of a decoder.

    Fields have the usual names of the literature; `from_metadata` has the GGUF keys.
    """

    architecture: str
    vocab_size: int
    context_length: int  # tokens
    hidden_size: int
    intermediate_size: int  # of the MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float = 10000.0
    rope_dim: int = 0  # leading dimensions of a head that are rotated; 0: all
    rope_factor: float = 1.0  # divides positions, or is YaRN's factor
    rope_magnitude: float = 1.0  # factor of cosines and sines
    has_rope: bool = True
    yarn: tuple[float, float, float] | None = None  # beta_fast, beta_slow, log_multiplier
    original_context: int | None = None  # tokens before context extension; None: context_length
    window: int | None = None  # sliding window in tokens; None means that no layer is windowed
    windowed_layers: tuple[bool, ...] | None = None  # None means that the architecture decides
    rotated_layers: tuple[bool, ...] | None = None  # None means that the architecture decides
    local_rope_theta: float | None = None  # of windowed layers; None means rope_theta
    temperature_scale: float = 0.0  # of queries beyond the original context; 0: none
    attention_soft_cap: float | None = None  # scores become cap * tanh(score / cap); None: no cap
    final_soft_cap: float | None = None  # the same for logits
    scales: Scales = Scales()
    experts: Experts | None = None  # of MoE layers
    mixers: tuple[MixerKind, ...] | None = None  # token mixer of each layer; None means attention
    delta: Delta | None = None  # of layers with a gated delta net
    convolution_width: int = 0  # tokens, of layers with a short convolution
    latent: Latent | None = None  # multi-head latent attention; None means ordinary keys and values
    kv_heads: tuple[int, ...] | None = None  # per layer; None means num_kv_heads
    local_head_dim: int | None = None  # of windowed layers; None means head_dim
    local_rope_dim: int | None = None  # of windowed layers; None means rope_dim
    shared_kv_layers: int = 0  # number of last layers that share KV of earlier layers
    inner_sizes: tuple[int, ...] | None = None  # per layer; None means intermediate_size
    per_layer_size: int = 0  # of per-layer embeddings; 0: none
    token_types: int = 0  # of encoders; 0: none
    labels: int = 1  # outputs of a classification head
    dense_size: int = 0  # inner size of the dense layers after pooling; 0: none
    checkpoint_interleaved: bool | None = None  # rope in the checkpoint; None: as in its class
    checkpoint_query_factor: float = 1.0  # of (MLA: rotated) queries, relative to the checkpoint's

    def __repr__(self) -> str:
        """Returns one line; `dataclasses.asdict` has all fields."""
        shown = "hidden_size", "num_heads", "num_kv_heads", "vocab_size", "context_length"
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in shown)
        return f"Config({self.architecture}, {self.num_layers} layers, {sizes})"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture={_unsupported(self.architecture)}")
        if self.rope_dim == 0:
            object.__setattr__(self, "rope_dim", self.head_dim)
        if self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} must be at most head_dim={self.head_dim}")

    @property
    def kind(self) -> Architecture:
        """The Architecture: properties that the name in `architecture` implies."""
        return ARCHITECTURES[self.architecture]

    @property
    def interleaved_rope(self) -> bool:
        """Whether rope rotates dimensions (2i, 2i + 1) instead of (i, i + rope_dim / 2)."""
        return self.kind.interleaved_rope

    @property
    def embedding_scale(self) -> float | None:
        """Factor of the embeddings; None means 1."""
        implied = self.kind.embedding_scale
        return self.scales.embedding if implied is None else implied(self)

    @property
    def attention_scale(self) -> float | None:
        """Factor of attention scores; None means head_dim ** -0.5."""
        scale, implied = self.scales.attention, self.kind.attention_scale
        return scale if scale is not None or implied is None else implied(self)

    @property
    def logit_scale(self) -> float | None:
        """Factor of the logits; None means 1."""
        scale, factor = self.scales.logits, self.kind.logit_scale
        return None if scale is None or factor is None else factor(scale)

    def window_of(self, layer: int) -> int | None:
        """Returns the sliding window of a layer in tokens; None means full attention."""
        return self.window if self.windowed_by_layer[layer] else None

    @functools.cached_property
    def windowed_by_layer(self) -> tuple[bool, ...]:
        """Whether each layer is windowed, provided that there is a window."""
        if self.windowed_layers is not None:
            return self.windowed_layers
        return layer_patterns.windowed_by_default(self.kind, self.num_layers)

    @functools.cached_property
    def rotated_by_layer(self) -> tuple[bool, ...]:
        """Whether each layer uses rope, provided that the model does."""
        if self.rotated_layers is not None:
            return self.rotated_layers
        windowed = (self.window_of(layer) is not None for layer in range(self.num_layers))
        return layer_patterns.rotated_by_default(self.kind, tuple(windowed))

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows of the layers."""
        found = dict.fromkeys(map(self.window_of, range(self.num_layers)))
        return tuple(window for window in found if window is not None)

    def mixer_of(self, layer: int) -> MixerKind:
        """Returns the kind of a layer's token mixer."""
        return "attention" if self.mixers is None else self.mixers[layer]

    def head_dim_of(self, layer: int) -> int:
        """Returns head_dim of a layer."""
        windowed = self.window_of(layer) is not None
        return self.local_head_dim if windowed and self.local_head_dim else self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        """Returns the number of KV heads of a layer."""
        return self.num_kv_heads if self.kv_heads is None else self.kv_heads[layer]

    def inner_size_of(self, layer: int) -> int:
        """Returns the inner size of a layer's dense MLP."""
        return self.intermediate_size if self.inner_sizes is None else self.inner_sizes[layer]

    def kv_layer_of(self, layer: int) -> int:
        """Returns the index of the layer whose keys and values this layer uses.

        It is the layer itself, or the last earlier layer of the same kind (windowed or not) that
        computes its own keys and values.
        """
        first = self.num_layers - self.shared_kv_layers
        if layer < first:
            return layer
        windowed = self.window_of(layer) is not None
        return next(
            i for i in reversed(range(first)) if (self.window_of(i) is not None) == windowed
        )

    def has_experts(self, layer: int) -> bool:
        """Returns whether the feed-forward network of a layer is an MoE."""
        if (experts := self.experts) is None or layer < experts.dense_layers:
            return False
        return not experts.interval or layer % experts.interval == 1

    @functools.cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Distinct rotary embeddings of the layers; most layers use the first."""
        return tuple(dict.fromkeys((self._rope, *map(self._rope_of, range(self.num_layers)))))

    def rope_of(self, layer: int) -> int:
        """Returns the index of a layer's rope in `ropes`."""
        return self.ropes.index(self._rope_of(layer))

    @property
    def _rope(self) -> Rope:
        original = self.original_context or self.context_length
        yarn = None if self.yarn is None else Yarn(original, *self.yarn)
        if yarn is not None and yarn.log_multiplier and self.latent is not None:
            # MLA applies the multiplier to the scale of scores only, and magnitudes cancel.
            yarn = yarn._replace(log_multiplier=1.0)
        return Rope(self.rope_theta, self.rope_dim, self.rope_factor, yarn, self.rope_magnitude)

    def _rope_of(self, layer: int) -> Rope:
        windowed = self.window_of(layer) is not None
        if not self.has_rope or not self.rotated_by_layer[layer]:
            return Rope(self.rope_theta, self.rope_dim, math.inf, divided=False)
        if windowed and self.local_rope_theta is not None:
            dim = self.local_rope_dim or self.rope_dim
            return Rope(self.local_rope_theta, dim, divided=False)
        return self._rope

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], file: str = "metadata") -> Config:
        """Reads a configuration from GGUF metadata.

        Missing keys get llama.cpp's defaults. If neither the file nor the architecture says which
        layers are windowed, a sliding window limits the context length, because it has no effect
        within that.

        Args:
          metadata: keys as in the file. file: name of the source in error messages.

        Raises:
          jax_q4k.GGUFError: an unsupported architecture or feature, a missing key, or a value out
            of range; the error names the key.
        """
        name = metadata.get("general.architecture")
        if (kind_of_file := other_files.kind_of(metadata)) is not None:
            raise GGUFError(file, "file", kind_of_file)
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise GGUFError(file, "general.architecture", _unsupported(name))
        own = Fields(metadata, file)
        get, kind = own.under(f"{name}."), ARCHITECTURES[name]
        metadata_keys.check(get, kind)
        integer = functools.partial(get.integer, repeated=True)
        size = functools.partial(integer, least=1, most=_MAX_SIZE)
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocab_size = size("vocab_size", REQUIRED if tokens is None else len(tokens))
        context_length = integer("context_length", least=1, most=MAX_CONTEXT)
        window = integer("attention.sliding_window", kind.window, least=0, most=MAX_CONTEXT)
        blocks = integer("block_count", least=1, most=MAX_LAYERS)
        # block_count includes multi-token-prediction layers, which are not run.
        layers = blocks - integer("nextn_predict_layers", 0, least=0, most=blocks - 1)
        windowed_layers = layer_patterns.windowed(get, kind, layers, blocks)
        if window and kind.windowed is None and windowed_layers is None:
            context_length, window = min(context_length, window), 0
        scaled = get
        if layer_patterns.is_without_windows(get, kind, window, context_length, windowed_layers):
            window, windowed_layers = 0, None
            scaled = layer_patterns.without_rope_off(get)
        inner = _inner_sizes(get, kind, layers, blocks)
        hidden_size = integer("embedding_length", least=1, most=_MAX_SIZE)
        heads = attention_fields.read(get, kind, hidden_size, layers, blocks)
        config = cls(
            architecture=name,
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            intermediate_size=max(inner),
            num_layers=layers,
            inner_sizes=inner if len(set(inner)) > 1 else None,
            per_layer_size=_per_layer_size(get, kind),
            **heads,
            **mixer_fields.read(get, kind, layers, blocks, heads["kv_heads"]),
            shared_kv_layers=_shared_kv_layers(get, kind, layers, windowed_layers),
            norm_eps=get.number(_norm_eps(kind), above=0.0, most=1.0),
            **rope_fields.read(scaled, kind, context_length),
            window=window or None,
            windowed_layers=windowed_layers,
            **_soft_caps(get, kind),
            scales=_scales(get, kind),
            experts=expert_fields.read(get, own, kind, layers, vocab_size, _MAX_SIZE, max(inner)),
            **encoder_fields.read(get, kind, metadata, hidden_size),
            checkpoint_interleaved=own.boolean(CHECKPOINT_INTERLEAVED, None),
            checkpoint_query_factor=own.number(QUERY_FACTOR, 1.0, above=0.0, most=1e6),
        )
        rotated = layer_patterns.rotated(get, layers, blocks)
        if rotated is None or rotated == config.rotated_by_layer:
            return config
        return dataclasses.replace(config, rotated_layers=rotated)

    def to_metadata(self) -> dict[str, Any]:
        """Returns GGUF metadata from which `from_metadata` restores this configuration."""
        values: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "block_count": self.num_layers,
            "feed_forward_length": attention_fields.array(self.inner_sizes, self.intermediate_size),
            _norm_eps(self.kind): self.norm_eps,
        }
        values |= attention_fields.write(self) | mixer_fields.write(self)
        values |= rope_fields.write(vars(self), self.kind)
        values |= expert_fields.write(self.experts, self.kind)
        values |= layer_patterns.write(self)
        for name, key in _SOFT_CAPS.items():
            cap = getattr(self, name) or 0.0
            if cap != (getattr(self.kind, name) or 0.0):
                values[key] = cap or NO_CAP
        scales = zip(_SCALES, self.scales, strict=True)
        values |= {key: scale for key, scale in scales if scale is not None}
        if self.kind.per_layer_embeddings:
            values["embedding_length_per_layer_input"] = self.per_layer_size
            values["attention.shared_kv_layers"] = self.shared_kv_layers
        values |= self.kind.metadata(self)
        prefixed = {f"{self.architecture}.{key}": value for key, value in values.items()}
        own = expert_fields.own_keys(self.experts) | encoder_fields.write(self)
        if self.checkpoint_interleaved is not None:
            own[CHECKPOINT_INTERLEAVED] = self.checkpoint_interleaved
        if self.checkpoint_query_factor != 1:
            own[QUERY_FACTOR] = self.checkpoint_query_factor
        return {"general.architecture": self.architecture, **prefixed, **own}


def _unsupported(architecture: Any) -> str:
    found = "is missing" if architecture is None else f"{architecture!r} is not supported"
    return f"{found}; supported: {', '.join(ARCHITECTURES)}"


def _norm_eps(kind: Architecture) -> str:
    return f"attention.layer_norm_{'' if kind.layer_norm else 'rms_'}epsilon"


def _scales(get: Fields, kind: Architecture) -> Scales:
    scales: list[float | None] = []
    for key, neutral in _SCALES.items():
        if key == "logit_scale" and kind.logit_scale is not None:
            scales.append(get.number(key, above=0.0, most=1e6))
        elif key not in kind.scales:
            metadata_keys.refuse(get, key, neutral)
            scales.append(None)
        else:
            value = get.value(key, neutral[0])
            absent = not isinstance(value, np.ndarray) and value in neutral
            scales.append(None if absent else get.number(key, above=0.0, most=1e6))
    return Scales(*scales)


def _soft_caps(get: Fields, kind: Architecture) -> dict[str, Any]:
    caps: dict[str, Any] = {}
    for name, key in _SOFT_CAPS.items():
        default = getattr(kind, name)
        value = get.value(key, default or 0.0)
        if np.ndim(value) == 0 and value == 0:
            continue
        if default is None:
            get.fail(key, f"{value!r} is not supported")
        cap = get.number(key, default, above=0.0, most=NO_CAP)
        caps[name] = None if cap == NO_CAP else cap
    return caps


def _inner_sizes(get: Fields, kind: Architecture, layers: int, blocks: int) -> tuple[int, ...]:
    """Returns the inner size of each layer's dense MLP; optional in files with MoE layers only."""
    key = "feed_forward_length"
    if not kind.mlp and key not in get:
        key = f"expert_{key}"
    return attention_fields.by_layer(get, key, layers, blocks, most=_MAX_SIZE)


def _per_layer_size(get: Fields, kind: Architecture) -> int:
    key = "embedding_length_per_layer_input"
    if not kind.per_layer_embeddings:
        metadata_keys.refuse(get, key, (0,))
        return 0
    return get.integer(key, 0, least=0, most=_MAX_SIZE)


def _shared_kv_layers(
    get: Fields, kind: Architecture, layers: int, windowed_layers: tuple[bool, ...] | None
) -> int:
    """Returns how many of the last layers share keys and values of earlier layers."""
    key = "attention.shared_kv_layers"
    if not kind.per_layer_embeddings:
        metadata_keys.refuse(get, key, (0,))
        return 0
    count = get.integer(key, 0, least=0, most=layers - 1)
    windowed = windowed_layers or layer_patterns.windowed_by_default(kind, layers)
    if not set(windowed[layers - count :]) <= set(windowed[: layers - count]):
        get.fail(key, f"{count} leaves a layer without an earlier layer of its kind")
    return count
