"""config.json of a Hugging Face checkpoint -> GGUF metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_q4k import CheckpointError, GGUFError
from jax_q4k.gguf import REQUIRED, Fields

from ..architecture import Architecture, CheckpointClass
from ..architectures import ARCHITECTURES
from ..config import Config
from ..json_fields import JSONFields
from ..rope import frequencies
from ..rope_fields import MIN_DIVISOR

MAX_CONFIG = 1 << 22  # bytes of config.json, and of each file of settings beside it

#: GGUF's key -> that of config.json, how it is read, its default (REQUIRED: none).
_KEYS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "vocab_size": ("vocab_size", Fields.integer, REQUIRED),
    "context_length": ("max_position_embeddings", Fields.integer, REQUIRED),
    "embedding_length": ("hidden_size", Fields.integer, REQUIRED),
    "block_count": ("num_hidden_layers", Fields.integer, REQUIRED),
    "feed_forward_length": ("intermediate_size", Fields.integer, REQUIRED),
    "attention.head_count": ("num_attention_heads", Fields.integer, REQUIRED),
    "attention.head_count_kv": ("num_key_value_heads", Fields.integer, None),
    "attention.key_length": ("head_dim", Fields.integer, None),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", Fields.number, REQUIRED),
}

#: Features that a decoder here would ignore: key of config.json, the value that asks for nothing.
_REFUSED: dict[str, Any] = {
    "quantization_config": None,
    "auto_map": None,  # the model's own code
    "partial_rotary_factor": 1.0,
    "use_bidirectional_attention": False,
}
#: Of Architecture -> of hidden_act.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint's decoder: GGUF's `metadata`, and facts that GGUF leaves to the tensors."""

    config: Config
    metadata: dict[str, Any]
    biases: tuple[str, ...]  # groups of them, beside the architecture's own
    tied: bool  # the output layer is the embedding
    rope_divisors: np.ndarray | None  # float32 (rope_dim / 2,)
    multimodal: bool  # the checkpoint holds more than the decoder, which has a prefix of its own


def describe(fields: JSONFields) -> Description:
    """The decoder of a config.json. Raises CheckpointError naming the key at fault."""
    architecture, checkpoint = _architecture(fields)
    if checkpoint.text_config is not None:
        _refuse_unsupported(fields)
        given = {k: v for k, v in fields.mapping("text_config").items() if v is not None}
        fields = JSONFields({**checkpoint.text_config, **given}, fields.file, "text_config.")
    _refuse_unsupported(fields)
    activations = _ACTIVATIONS[architecture.activation], *checkpoint.activations
    for key in ("hidden_act", "hidden_activation"):
        _accept(fields, key, activations)
    values: dict[str, Any] = {}
    for key, (json_key, read, default) in _KEYS.items():
        value = read(fields, json_key, default)
        if value is not None:
            values[key] = value
    for key in checkpoint.required:
        fields.integer(key)
    values |= {key: fields.number(json_key) for key, json_key in checkpoint.keys.items()}
    for key, json_key in checkpoint.optional_keys.items():
        if (number := fields.number(json_key, None)) is not None:
            values[key] = number
    window = _window(fields, architecture, checkpoint)
    if window is not None:
        values["attention.sliding_window"] = window
    rope = _Rope(fields)
    values |= rope.values
    prefix = f"{architecture.name}."
    metadata = {"general.architecture": architecture.name} | {
        prefix + key: value for key, value in values.items()
    }
    try:
        config = Config.from_metadata(metadata, fields.file)
    except GGUFError as error:
        key = error.field.removeprefix(prefix)
        others = {"rope.freq_base": "rope_theta", "attention.sliding_window": "sliding_window"}
        others |= {**checkpoint.keys, **checkpoint.optional_keys}
        json_key = _KEYS[key][0] if key in _KEYS else others.get(key, key)
        raise CheckpointError(fields.file, fields.prefix + json_key, error.problem) from None
    for key, value_of in checkpoint.implied.items():
        _accept(fields, key, (value_of(config),))
    return Description(
        config=config,
        metadata=config.to_metadata() | metadata,
        biases=tuple(
            group
            for key, groups in checkpoint.biases.items()
            if fields.boolean(key, False)
            for group in groups
        ),
        tied=fields.boolean("tie_word_embeddings", checkpoint.tied),
        rope_divisors=rope.divisors(config),
        multimodal=checkpoint.text_config is not None,
    )


def _architecture(fields: JSONFields) -> tuple[Architecture, CheckpointClass]:
    known = {
        checkpoint.name: (architecture, checkpoint)
        for architecture in ARCHITECTURES.values()
        for checkpoint in architecture.checkpoints
    }
    names = fields.array("architectures")
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in known:
        supported = ", ".join(known)
        fields.fail("architectures", f"{names!r:.200} is not supported; supported are {supported}")
    return known[names[0]]


def _refuse_unsupported(fields: JSONFields) -> None:
    for key, neutral in _REFUSED.items():
        _accept(fields, key, (neutral,))


def _accept(fields: JSONFields, key: str, values: tuple[Any, ...]) -> None:
    """Refuses a key that says anything but one of these values."""
    value = fields.values.get(key)
    if value is not None and value not in values:
        found = value.get("quant_method", "an object") if isinstance(value, dict) else value
        fields.fail(key, f"is {found!r:.100}, which is not supported")


def _window(
    fields: JSONFields, architecture: Architecture, checkpoint: CheckpointClass
) -> int | None:
    """Tokens that the layers with a sliding window attend to."""
    for i, kind in enumerate(fields.array("layer_types", [])):
        if kind not in _LAYER_TYPES:
            supported = ", ".join(_LAYER_TYPES)
            problem = f"{kind!r:.100} is not supported; supported are {supported}"
            fields.fail("layer_types", problem)
        if architecture.windowed is not None and kind != _LAYER_TYPES[architecture.windowed(i)]:
            expected = _LAYER_TYPES[architecture.windowed(i)]
            fields.fail("layer_types", f"says {kind} of layer {i}, expected {expected}")
    counts = checkpoint.window
    if isinstance(counts, str):
        counts = fields.boolean(counts, False)
    return fields.integer("sliding_window", None) if counts else None


class _Rope:
    """Rotary positions: `rope_parameters`, or transformers 4's `rope_theta` and `rope_scaling`.

    Parameters may be given for each type of layer: windowed ones then have only a theta.

    values: GGUF's keys.
    """

    def __init__(self, fields: JSONFields) -> None:
        given = [
            (key, inner)
            for key in ("rope_parameters", "rope_scaling")
            if (inner := fields.object(key)) is not None
        ]
        if len(given) == 2 and given[0][1].values != given[1][1].values:
            fields.fail("rope_scaling", "differs from rope_parameters")
        self._fields = given[0][1] if given else fields
        self.values: dict[str, Any] = {}
        if given and (whole := self._fields.object("full_attention")) is not None:
            local = self._fields.object("sliding_attention")
            if local is not None:
                if (kind := local.string("rope_type", "default")) != "default":
                    local.fail("rope_type", f"{kind[:100]!r} is not supported, expected 'default'")
                self.values["rope.freq_base_swa"] = local.number("rope_theta", 10000.0)
            self._fields = whole
        theta = self._fields if "rope_theta" in self._fields else fields
        self.values["rope.freq_base"] = theta.number("rope_theta", 10000.0)
        self._kind = "default"
        if given:
            early = self._fields.string("type", "default")  # what the key was first called
            self._kind = self._fields.string("rope_type", early)
            if self._fields.number("partial_rotary_factor", 1.0) != 1.0:
                self._fields.fail("partial_rotary_factor", "is not supported, expected 1")
        if self._kind == "linear":
            self.values |= {"rope.scaling.type": "linear", "rope.scaling.factor": self._factor()}
        elif self._kind not in ("default", "llama3"):
            supported = "default, linear, llama3"
            self._fields.fail(
                "rope_type", f"{self._kind[:100]!r} is not supported; supported are {supported}"
            )

    def divisors(self, config: Config) -> np.ndarray | None:
        """Divisors of Llama 3.1's frequencies: float32 (rope_dim / 2,); None: none.

        Wavelengths up to original_max_position_embeddings / high_freq_factor tokens stay, those
        from original_max_position_embeddings / low_freq_factor on are stretched by `factor`; in
        between the frequency is mixed linearly in original_max_position_embeddings / wavelength.
        """
        if self._kind != "llama3":
            return None
        factor = self._factor()
        low = self._fields.number("low_freq_factor")
        high = self._fields.number("high_freq_factor")
        original = self._fields.integer("original_max_position_embeddings")
        if not 0 < low < high:
            self._fields.fail(
                "high_freq_factor",
                f"must be above low_freq_factor={low}, and that above 0, not {high}",
            )
        if not 0 < original <= 1 << 28:
            self._fields.fail(
                "original_max_position_embeddings", f"must be from 1 to {1 << 28}, not {original}"
            )
        # original_max_position_embeddings / wavelength
        periods = original * frequencies(config.ropes[0]).astype(np.float64) / (2 * math.pi)
        # The part of a frequency that is not stretched.
        kept = np.clip((periods - low) / (high - low), 0.0, 1.0)
        return (1 / ((1 - kept) / factor + kept)).astype(np.float32)

    def _factor(self) -> float:
        factor = self._fields.number("factor")
        if not MIN_DIVISOR < factor <= 1e6:
            self._fields.fail(
                "factor", f"must be a number above {MIN_DIVISOR} and up to 1e6, not {factor}"
            )
        return factor
