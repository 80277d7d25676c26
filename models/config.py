"""What a decoder is, read from a GGUF file's metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from jax_q4k import HEAD_DIMS, GGUFError

ARCHITECTURES: tuple[str, ...] = ("llama", "qwen2", "qwen3")

MIN_ROPE_DIVISOR = 1e-6  # what divides a rope frequency is above this, so that angles stay finite

# Far above any real model; they bound the work that a malformed file can ask for.
_MAX_LAYERS, _MAX_HEADS, _MAX_SIZE, _MAX_CONTEXT = 1024, 4096, 1 << 24, 1 << 28

#: Keys of features that a decoder here would ignore, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder's dimensions. Names are those of the field; GGUF's keys are in `from_metadata`."""

    architecture: str
    vocab_size: int
    context_length: int  # tokens
    hidden_size: int
    intermediate_size: int  # of the feed-forward network
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_dim: int = 0  # leading dimensions of a head that are rotated; 0: all
    rope_factor: float = 1.0  # positions are divided by it (linear scaling)

    def __post_init__(self) -> None:
        if self.rope_dim == 0:
            object.__setattr__(self, "rope_dim", self.head_dim)
        if self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} must be at most head_dim={self.head_dim}")

    @property
    def interleaved_rope(self) -> bool:
        """Whether rotated pairs are dimensions (2i, 2i + 1), as llama files are laid out, or (i, i
        + half).
        """
        return self.architecture == "llama"

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections must have a bias."""
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head before the rotation."""
        return self.architecture == "qwen3"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], file: str = "metadata") -> Config:
        """The configuration that GGUF metadata describes, with llama.cpp's defaults for absent
        keys.

        A sliding window bounds the context length, within which it has no effect.

        Args:
          metadata: keys as in the file. file: what error messages call the source.

        Raises:
          jax_q4k.GGUFError: an architecture or feature that is not supported, a key that is
            missing, or a value out of range, naming the key.
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            found = "is missing" if architecture is None else f"{architecture!r} is not supported"
            raise GGUFError(
                file, "general.architecture", f"{found}; supported are {', '.join(ARCHITECTURES)}"
            )
        get = _Fields(metadata, architecture, file)
        get.refuse_unsupported()

        hidden_size = get.integer("embedding_length", _MAX_SIZE)
        num_heads = get.integer("attention.head_count", _MAX_HEADS)
        num_kv_heads = get.integer("attention.head_count_kv", num_heads, default=num_heads)
        if num_heads % num_kv_heads:
            get.fail(
                "attention.head_count_kv",
                f"{num_kv_heads} must divide attention.head_count={num_heads}",
            )
        if "attention.key_length" not in get and hidden_size % num_heads:
            get.fail(
                "attention.head_count", f"{num_heads} must divide embedding_length={hidden_size}"
            )
        head_dim = get.integer("attention.key_length", _MAX_SIZE, default=hidden_size // num_heads)
        if head_dim not in HEAD_DIMS:
            supported = ", ".join(map(str, HEAD_DIMS))
            get.fail(
                "attention.key_length",
                f"a head_dim of {head_dim} is not supported; supported are {supported}",
            )
        value_length = get.integer("attention.value_length", _MAX_SIZE, default=head_dim)
        if value_length != head_dim:
            get.fail(
                "attention.value_length", f"{value_length} must equal the key length, {head_dim}"
            )
        rope_dim = get.integer("rope.dimension_count", head_dim, default=head_dim)
        if rope_dim % 2:
            get.fail("rope.dimension_count", f"{rope_dim} must be even")
        context_length = get.integer("context_length", _MAX_CONTEXT)
        window = get.integer("attention.sliding_window", _MAX_CONTEXT, default=0, minimum=0)
        return cls(
            architecture=architecture,
            vocab_size=get.vocab_size(),
            context_length=min(context_length, window) if window else context_length,
            hidden_size=hidden_size,
            intermediate_size=get.integer("feed_forward_length", _MAX_SIZE),
            num_layers=get.integer("block_count", _MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=get.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_theta=get.number("rope.freq_base", 1.0, 1e12, default=10000.0),
            rope_dim=rope_dim,
            rope_factor=get.rope_factor(),
        )

    def to_metadata(self) -> dict[str, Any]:
        """GGUF metadata that `from_metadata` turns into this configuration again."""
        values: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "block_count": self.num_layers,
            "feed_forward_length": self.intermediate_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_norm_eps,
            "rope.dimension_count": self.rope_dim,
            "rope.freq_base": self.rope_theta,
        }
        if self.rope_factor != 1.0:
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.rope_factor}
        prefixed = {f"{self.architecture}.{key}": value for key, value in values.items()}
        return {"general.architecture": self.architecture, **prefixed}


class _Fields:
    """Checked access to `ARCHITECTURE.key` entries of the metadata."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, file: str) -> None:
        self._metadata = metadata
        self._prefix = architecture + "."
        self._file = file

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def fail(self, key: str, problem: str) -> NoReturn:
        raise GGUFError(self._file, self._prefix + key, problem)

    def integer(
        self, key: str, maximum: int, *, default: int | None = None, minimum: int = 1
    ) -> int:
        """An integer of minimum..maximum; an array with one value per layer counts if all are
        equal.
        """
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.fail(key, f"must be an integer from {minimum} to {maximum}, not {value!r}")
        return value

    def number(
        self, key: str, minimum: float, maximum: float, *, default: float | None = None
    ) -> float:
        """A number above `minimum` and up to `maximum`."""
        value = self._value(key, default)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not (math.isfinite(value) and minimum < value <= maximum):
            self.fail(key, f"must be a number above {minimum} and up to {maximum:g}, not {value!r}")
        return float(value)

    def refuse_unsupported(self) -> None:
        for key, neutral in _REFUSED.items():
            value = self._value(key, neutral[0])
            if isinstance(value, np.ndarray) or value not in neutral:
                self.fail(key, f"{value!r} is not supported")

    def rope_factor(self) -> float:
        kind = self._value("rope.scaling.type", "linear")
        if not isinstance(kind, str) or kind not in ("none", "linear"):
            self.fail("rope.scaling.type", f"{kind!r} is not supported; supported are none, linear")
        key = "rope.scaling.factor" if "rope.scaling.factor" in self else "rope.scale_linear"
        value = self._value(key, 0.0)
        if kind == "none" or (np.ndim(value) == 0 and value == 0):
            return 1.0
        return self.number(key, MIN_ROPE_DIVISOR, 1e6)

    def vocab_size(self) -> int:
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if tokens is None:
            return self.integer("vocab_size", _MAX_SIZE)
        return self.integer("vocab_size", _MAX_SIZE, default=len(tokens))

    def _value(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self._prefix + key, default)
        if value is None:
            self.fail(key, "is missing")
        return value
