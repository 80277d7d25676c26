"""Converts config.json of a Hugging Face checkpoint to GGUF metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_q4k import CheckpointError, GGUFError
from jax_q4k.gguf import REQUIRED, Fields

from ...architectures import ARCHITECTURES, layer_types
from ...architectures.base import (
    CHECKPOINT_INTERLEAVED,
    MAX_LAYERS,
    QUERY_FACTOR,
    Architecture,
    CheckpointClass,
)
from ...config import Config, layer_patterns
from ...support.json_fields import JSONFields
from ...support.warn import warn_of_keys
from . import config_keys
from .packed import methods
from .rope_json import Rope

MAX_CONFIG = 1 << 22  # bytes of config.json, and of each other file of settings

_CONTEXT = "max_position_embeddings"
#: GGUF key -> (key of config.json, reader, default or REQUIRED).
_KEYS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "vocab_size": ("vocab_size", Fields.integer, REQUIRED),
    "context_length": (_CONTEXT, Fields.integer, REQUIRED),
    "embedding_length": ("hidden_size", Fields.integer, REQUIRED),
    "block_count": ("num_hidden_layers", Fields.integer, REQUIRED),
    "feed_forward_length": ("intermediate_size", Fields.integer, REQUIRED),
    "attention.head_count": ("num_attention_heads", Fields.integer, REQUIRED),
    "attention.head_count_kv": ("num_key_value_heads", Fields.integer, None),
    "attention.key_length": ("head_dim", Fields.integer, None),
}
#: GGUF keys of `CheckpointClass.keys` that do not hold a float -> reader.
_READERS: dict[str, Callable[..., Any]] = {
    "expert_weights_norm": Fields.boolean,
} | dict.fromkeys(
    (
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_shared_count",
        "expert_group_count",
        "expert_group_used_count",
        "moe_every_n_layers",
        "leading_dense_block_count",
        "attention.kv_lora_rank",
        "attention.sliding_window",
        "attention.q_lora_rank",
        "attention.value_length_mla",
        "rope.dimension_count",
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
        "shortconv.l_cache",
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "full_attention_interval",
    ),
    Fields.integer,
)

#: Key of one transformers version -> its name in the other version.
_SAME = {
    "num_experts": "num_local_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_local_experts",
}

#: `Architecture.activation` -> value of hidden_act.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu_pytorch_tanh",
    "gelu_erf": "gelu",
    "swiglu_oai": "silu",
}
#: Keys for which null turns something off; for others it selects the default.
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
#: Token mixer -> value in layer_types.
_MIXERS = {"delta": "linear_attention", "convolution": "conv"}


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint's decoder as config.json describes it: GGUF metadata, and further properties."""

    config: Config
    checkpoint: CheckpointClass
    metadata: dict[str, Any]
    biases: tuple[str, ...]  # groups of biases, in addition to the architecture's own
    zero_biases: tuple[str, ...]  # groups of biases and names of vectors that it lacks
    tensors: tuple[str, ...]  # GGUF names of optional tensors that it holds
    lacking: frozenset[str]  # tensors that layers lack, such as "blk.0.attn_v"
    tied: bool  # the embedding is the output layer, unless the files hold another
    rope_divisors: dict[str, np.ndarray]  # GGUF name -> float32 (rope_dim / 2,)
    multimodal: bool  # it holds more than the decoder, whose names have a prefix
    further_layers: int  # multi-token-prediction layers after the last, which are not run


def describe(fields: JSONFields) -> Description:
    """Describes the decoder of a config.json, and warns of unknown keys.

    Raises CheckpointError that names the invalid key.
    """
    architecture, checkpoint = _architecture(fields)
    unknown = config_keys.check(fields, checkpoint)
    if (quantization := methods.settings_of(fields)) is not None:
        methods.method_of(quantization)
    tied = is_tied(fields, checkpoint)
    fields = _of_the_decoder(fields, checkpoint)
    unknown += config_keys.check(fields, checkpoint)
    activations = _ACTIVATIONS[architecture.activation], *checkpoint.activations
    for key in ("hidden_act", "hidden_activation"):
        _accept(fields, key, activations)
    values = _values(fields, architecture, checkpoint)
    rope = Rope(fields, architecture, checkpoint)
    values |= rope.values
    warn_of_keys(fields.file, unknown + rope.unknown)
    prefix = f"{architecture.name}."
    metadata = {"general.architecture": architecture.name} | {
        key if key.startswith(("jax_q4k.", "tokenizer.")) else prefix + key: value
        for key, value in values.items()
    }
    interleave = checkpoint.interleave_key
    if interleave is not None and not fields.boolean(interleave, True):
        metadata[CHECKPOINT_INTERLEAVED] = False
    try:
        config = Config.from_metadata(metadata, fields.file)
    except GGUFError as error:
        key = error.field.removeprefix(prefix)
        others = {
            "rope.freq_base": "rope_theta",
            "attention.sliding_window": "sliding_window",
            layer_patterns.WINDOWED: "layer_types",
            QUERY_FACTOR: "query_pre_attn_scalar",
        }
        others |= {**checkpoint.keys, **checkpoint.optional_keys}
        keys = _keys(architecture, checkpoint)
        json_key = keys[key][0] if key in keys else others.get(key, key)
        raise CheckpointError(fields.file, fields.prefix + json_key, error.problem) from None
    for key, value_of in checkpoint.implied.items():
        _accept(fields, key, (value_of(config),))
    further = checkpoint.further_layers
    if "num_mtp_layers" in fields:  # another name for the same key
        further = further and "num_mtp_layers"
    return Description(
        config=config,
        checkpoint=checkpoint,
        metadata=config.to_metadata() | _without_patterns(metadata, prefix),
        biases=checkpoint.held_biases + _asked_for(fields, checkpoint.biases),
        zero_biases=_asked_for(fields, checkpoint.zero_biases, unless=True),
        tensors=checkpoint.held + _asked_for(fields, checkpoint.tensors),
        lacking=frozenset(
            f"blk.{layer}.{tensor}"
            for key, without in checkpoint.lacking.items()
            if fields.boolean(key, False)
            for layer in range(config.num_layers)
            for tensor in without(config, layer)
        ),
        tied=tied,
        rope_divisors=rope.divisors(config),
        multimodal=checkpoint.text_config,
        further_layers=0 if further is None else fields.integer(further, 0, least=0, most=1024),
    )


def _without_patterns(metadata: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Removes patterns of layers, which `Config.to_metadata` has if they are not the default."""
    patterns = {prefix + key for key in (layer_patterns.WINDOWED, layer_patterns.ROTATED)}
    return {key: value for key, value in metadata.items() if key not in patterns}


def is_tied(fields: JSONFields, checkpoint: CheckpointClass) -> bool:
    """Returns whether the embedding is the output layer of files without a head.

    As in transformers 5, the flag of config.json has precedence over the one in text_config.
    Transformers 4 read text_config, which counts if config.json has no flag, or for classes with
    `tied_by_text`.
    """
    of_model = fields.boolean(checkpoint.tied_key, fields.boolean("tie_word_embeddings", None))
    text = fields.object("text_config") if checkpoint.text_config else None
    of_text = text is not None and text.boolean("tie_word_embeddings", False)
    if of_model is None:
        return checkpoint.tied or of_text
    return of_model or (of_text and checkpoint.tied_by_text)


def _of_the_decoder(fields: JSONFields, checkpoint: CheckpointClass) -> JSONFields:
    """Returns the part of config.json that describes the decoder, with the class's defaults."""
    values, prefix = fields.values, ""
    if checkpoint.text_config and not (checkpoint.flat and "text_config" not in fields):
        values, prefix = fields.mapping("text_config"), "text_config."
    said = {k: value for k, value in values.items() if value is not None or k in _NULLABLE}
    for published, name in checkpoint.published.items():
        if published in said and name in said and said[name] != said[published]:
            problem = f"is {said[published]!r:.100}, but {name} is {said[name]!r:.100}"
            fields.fail(published, problem)
        if published in said:
            said[name] = said[published]
    return JSONFields({**checkpoint.defaults, **said}, fields.file, prefix)


def _keys(
    architecture: Architecture, checkpoint: CheckpointClass
) -> dict[str, tuple[str, Callable[..., Any], Any]]:
    """Returns `_KEYS` with this class's names and optional keys."""
    epsilon = f"attention.layer_norm_{'' if architecture.layer_norm else 'rms_'}epsilon"
    keys = _KEYS | {epsilon: ("rms_norm_eps", Fields.number, REQUIRED)}
    renamed = checkpoint.renamed
    return {
        key: (renamed.get(name, name), read, None if name in checkpoint.optional else default)
        for key, (name, read, default) in keys.items()
    }


def _values(
    fields: JSONFields, architecture: Architecture, checkpoint: CheckpointClass
) -> dict[str, Any]:
    """Converts config.json to GGUF metadata, except the rope parameters."""
    values: dict[str, Any] = {}
    for key, (json_key, read, default) in _keys(architecture, checkpoint).items():
        if (value := read(fields, json_key, default)) is not None:
            values[key] = value
    for key in checkpoint.required:
        fields.integer(key)
    for key, json_key in checkpoint.keys.items():
        other = _SAME.get(json_key, json_key)
        said = other if json_key not in fields and other in fields else json_key
        if json_key in fields and other in fields and fields.value(other) != fields.value(json_key):
            problem = f"is {fields.value(other)!r:.100}, but {json_key} is"
            fields.fail(other, f"{problem} {fields.value(json_key)!r:.100}")
        values[key] = _READERS.get(key, Fields.number)(fields, said)
        if key in architecture.scales and values[key] == 0:  # GGUF files use 0 for 1
            fields.fail(said, "must not be 0")
    for key, json_key in checkpoint.optional_keys.items():
        value = _READERS.get(key, Fields.number)(fields, json_key, None)
        if value is not None:
            values[key] = value
    values |= _recurrent_layers(fields, architecture) | _windows(fields, architecture, checkpoint)
    return {**values, **checkpoint.computed(fields)}


def _asked_for(
    fields: JSONFields, asked: Mapping[str, tuple[str, ...]], unless: bool = False
) -> tuple[str, ...]:
    """Returns the names that boolean keys of config.json enable.

    asked: boolean key -> names that it enables. unless: the keys enable names by being false, and
    are true if omitted.
    """
    enabled = (names for key, names in asked.items() if fields.boolean(key, unless) != unless)
    return tuple(name for names in enabled for name in names)


def _architecture(fields: JSONFields) -> tuple[Architecture, CheckpointClass]:
    known = {
        checkpoint.name: (architecture, checkpoint)
        for selects in (False, True)
        for architecture in ARCHITECTURES.values()
        for checkpoint in architecture.checkpoints
        if (key := checkpoint.selected_by) is None or (selects and fields.values.get(key))
    }
    kind = fields.string("model_type", None)
    of_type = config_keys.CLASSES_OF_TYPES.get(kind, ())
    names = fields.array("architectures", list(of_type[:1]) or REQUIRED)
    name = names[0] if len(names) == 1 else None
    if (
        isinstance(name, str) and name not in known and name.endswith("Model")
    ):  # the class without lm_head
        name = f"{name.removesuffix('Model')}ForCausalLM"
    if not isinstance(name, str) or name not in known:
        supported = ", ".join(known)
        fields.fail("architectures", f"{names!r:.200} is not supported; supported: {supported}")
    if of_type and name not in of_type:
        fields.fail("model_type", f"is {kind!r}, the type of {of_type[0]}, not of {name}")
    config_keys.check_code(fields, name)
    return known[name]


def _accept(fields: JSONFields, key: str, values: tuple[Any, ...]) -> None:
    """Raises CheckpointError if a key's value is not one of `values`."""
    value = fields.values.get(key)
    if value is not None and value not in values:
        fields.fail(key, f"is {value!r:.100}, which is not supported")


def _recurrent_layers(fields: JSONFields, architecture: Architecture) -> dict[str, Any]:
    """Returns metadata from layer_types of models with recurrent layers; otherwise checks it."""
    other = _MIXERS.get(_recurrent(architecture), layer_types.WINDOWED)
    layer_types.check(fields, other)
    if other == layer_types.WINDOWED or not fields.array("layer_types", []):
        return {}
    recurrent = layer_types.read(fields, lambda *_: False, other)
    return {"attention.recurrent_layers": np.array(recurrent)} if architecture.delta else {}


def _recurrent(architecture: Architecture) -> str:
    """Returns the name of the mixer that replaces attention in some layers; "" if none does."""
    return "delta" if architecture.delta else "convolution" if architecture.convolution else ""


def _windows(
    fields: JSONFields, architecture: Architecture, checkpoint: CheckpointClass
) -> dict[str, Any]:
    """Returns metadata with the sliding window in tokens, and the layers that have it."""
    enabled = checkpoint.window
    if isinstance(enabled, str):
        enabled = fields.boolean(enabled, False)
    window = fields.integer("sliding_window", None) if enabled else None
    windowed = _windowed_layers(fields, architecture, checkpoint, window)
    by_default = any(layer_patterns.windowed_by_default(architecture, len(windowed)))
    has_effect = window is not None and (by_default or window < fields.integer(_CONTEXT))
    if has_effect and any(windowed):
        return {"attention.sliding_window": window, layer_patterns.WINDOWED: np.array(windowed)}
    none = np.zeros(len(windowed), bool)  # without a pattern, some architectures have windows
    return {layer_patterns.WINDOWED: none} if architecture.window else {}


def _without_fields(windowed: Callable[[int], bool]) -> Callable[[JSONFields, int], bool]:
    """Returns the rule for layers as one that takes config.json, too, and ignores it."""
    return lambda fields, layer: windowed(layer)


def _windowed_layers(
    fields: JSONFields, architecture: Architecture, checkpoint: CheckpointClass, window: int | None
) -> list[bool]:
    """Returns whether each layer has the sliding window."""
    layers = fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    rule, of_architecture = checkpoint.windowed, architecture.windowed
    if rule is None and of_architecture is not None:
        rule = _without_fields(of_architecture)
    if window is None:
        listed = rule is not None and layer_types.WINDOWED in fields.array("layer_types", [])
        if listed and checkpoint.window:
            fields.fail("layer_types", f"lists {layer_types.WINDOWED}, but there is no window")
        return [False] * layers
    return [True] * layers if rule is None else layer_types.read(fields, rule)
