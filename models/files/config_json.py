"""config.json -> GGUF metadata, and what the weights must look like."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jax_q4k import CheckpointError, GGUFError

from ..config import MIN_ROPE_DIVISOR, Config
from ..json_fields import Fields
from ..rope import frequencies

#: `architectures` -> GGUF's architecture.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

#: GGUF's key -> that of config.json, its type, its value where it is missing or null (...: it must
#: be there).
_KEYS: dict[str, tuple[str, type, Any]] = {
    "vocab_size": ("vocab_size", int, ...),
    "context_length": ("max_position_embeddings", int, ...),
    "embedding_length": ("hidden_size", int, ...),
    "block_count": ("num_hidden_layers", int, ...),
    "feed_forward_length": ("intermediate_size", int, ...),
    "attention.head_count": ("num_attention_heads", int, ...),
    "attention.head_count_kv": ("num_key_value_heads", int, None),
    "attention.key_length": ("head_dim", int, None),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float, ...),
}

#: Features that a decoder here would ignore: key of config.json, the value that asks for nothing.
_REFUSED: dict[str, Any] = {
    "quantization_config": None,
    "auto_map": None,  # the model's own code
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint's decoder. `metadata` holds GGUF's keys; the rest is what those leave to the
    tensors.
    """

    config: Config
    metadata: dict[str, Any]
    attention_bias: (
        bool  # of all four projections, beside the biases that the architecture itself has
    )
    mlp_bias: bool
    tied: bool  # the output layer is the embedding
    rope_divisors: np.ndarray | None  # float32 (rope_dim / 2,)


def describe(fields: Fields) -> Description:
    """What config.json says. Raises CheckpointError naming the key at fault."""
    name = _architecture(fields)
    for key, neutral in _REFUSED.items():
        value = fields.values.get(key)
        if value is not None and value != neutral:
            found = value.get("quant_method", "an object") if isinstance(value, dict) else value
            fields.fail(key, f"is {found!r:.100}, which is not supported")
    architecture = ARCHITECTURES[name]
    values: dict[str, Any] = {}
    for key, (json_key, kind, default) in _KEYS.items():
        value = (
            fields.get(json_key, kind) if default is ... else fields.get(json_key, kind, default)
        )
        if value is not None:
            values[key] = value
    if name != "LlamaForCausalLM":  # whose early files leave it out where it equals the heads
        fields.get("num_key_value_heads", int)
    if name == "Qwen3ForCausalLM":  # where it defaults to 128
        fields.get("head_dim", int)
    window = _window(fields, name)
    if window is not None:
        values["attention.sliding_window"] = window
    rope = _Rope(fields)
    values |= rope.values
    metadata = {"general.architecture": architecture} | {
        f"{architecture}.{key}": v for key, v in values.items()
    }
    try:
        config = Config.from_metadata(metadata, fields.file)
    except GGUFError as error:
        key = error.field.removeprefix(f"{architecture}.")
        others = {"rope.freq_base": "rope_theta", "attention.sliding_window": "sliding_window"}
        json_key = _KEYS[key][0] if key in _KEYS else others.get(key, key)
        raise CheckpointError(fields.file, json_key, error.problem) from None
    return Description(
        config=config,
        metadata=config.to_metadata() | metadata,
        attention_bias=name in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        and fields.get("attention_bias", bool, False),
        mlp_bias=name == "LlamaForCausalLM" and fields.get("mlp_bias", bool, False),
        tied=fields.get("tie_word_embeddings", bool, False),
        rope_divisors=rope.divisors(config),
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures", list)
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        fields.fail(
            "architectures",
            f"{names!r:.200} is not supported; supported are {', '.join(ARCHITECTURES)}",
        )
    return names[0]


def _window(fields: Fields, name: str) -> int | None:
    """Tokens that the layers with a sliding window attend to."""
    for kind in fields.get("layer_types", list, []):
        if kind not in _LAYER_TYPES:
            fields.fail(
                "layer_types",
                f"{kind!r:.100} is not supported; supported are {', '.join(_LAYER_TYPES)}",
            )
    if name == "LlamaForCausalLM" or (
        name != "MistralForCausalLM" and not fields.get("use_sliding_window", bool, False)
    ):
        return None
    return fields.get("sliding_window", int, None)


class _Rope:
    """Rotary positions: `rope_parameters`, or in files of transformers 4 `rope_theta` and
    `rope_scaling`.

    values: GGUF's keys.
    """

    def __init__(self, fields: Fields) -> None:
        given = [
            (key, inner)
            for key in ("rope_parameters", "rope_scaling")
            if (inner := fields.fields(key)) is not None
        ]
        if len(given) == 2 and given[0][1].values != given[1][1].values:
            fields.fail("rope_scaling", "differs from rope_parameters")
        self._fields = given[0][1] if given else fields
        theta = self._fields if "rope_theta" in self._fields.values else fields
        self.values: dict[str, Any] = {"rope.freq_base": theta.get("rope_theta", float, 10000.0)}
        self._kind = "default"
        if given:
            early = self._fields.get("type", str, "default")  # what the key was first called
            self._kind = self._fields.get("rope_type", str, early)
            if self._fields.get("partial_rotary_factor", float, 1.0) != 1.0:
                self._fields.fail("partial_rotary_factor", "is not supported, expected 1")
        if self._kind == "linear":
            self.values |= {"rope.scaling.type": "linear", "rope.scaling.factor": self._factor()}
        elif self._kind not in ("default", "llama3"):
            supported = "default, linear, llama3"
            self._fields.fail(
                "rope_type", f"{self._kind[:100]!r} is not supported; supported are {supported}"
            )

    def divisors(self, config: Config) -> np.ndarray | None:
        """What Llama 3.1 divides each frequency by: float32 (rope_dim / 2,); None: nothing.

        Wavelengths up to original_max_position_embeddings / high_freq_factor tokens stay, those
        from original_max_position_embeddings / low_freq_factor on are stretched by `factor`; in
        between the frequency is mixed linearly in original_max_position_embeddings / wavelength.
        """
        if self._kind != "llama3":
            return None
        get = self._fields.get
        factor, low, high = (
            self._factor(),
            get("low_freq_factor", float),
            get("high_freq_factor", float),
        )
        original = get("original_max_position_embeddings", int)
        if not 0 < low < high:
            self._fields.fail(
                "high_freq_factor",
                f"must be above low_freq_factor={low}, and that above 0, not {high}",
            )
        if not 0 < original <= 1 << 28:
            self._fields.fail(
                "original_max_position_embeddings", f"must be from 1 to {1 << 28}, not {original}"
            )
        turns = (
            original * frequencies(config).astype(np.float64) / (2 * math.pi)
        )  # original / wavelength
        kept = np.clip(
            (turns - low) / (high - low), 0.0, 1.0
        )  # the part of the frequency that is not stretched
        return (1 / ((1 - kept) / factor + kept)).astype(np.float32)

    def _factor(self) -> float:
        factor = self._fields.get("factor", float)
        if not MIN_ROPE_DIVISOR < factor <= 1e6:
            self._fields.fail(
                "factor", f"must be a number above {MIN_ROPE_DIVISOR} and up to 1e6, not {factor}"
            )
        return factor
