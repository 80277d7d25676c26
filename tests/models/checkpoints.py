"""Hugging Face folders of golden models: decoded weights, with rows in a checkpoint's order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import jax_q4k as jq
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.architectures.base import CheckpointClass
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.checkpoints import tensor_locations

from .golden_files import path

CLASSES = {
    architecture.name: architecture.checkpoints[0].name
    for architecture in ARCHITECTURES.values()
    if architecture.checkpoints
}


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Moves row 2i + j of every head to row j * half + i.

    That undoes llama.cpp's order, element by element.
    """
    out, size = np.empty_like(rows), len(rows) // heads
    for row in range(len(rows)):
        head, at = divmod(row, size)
        out[head * size + at % 2 * (size // 2) + at // 2] = rows[row]
    return out


def config_json(config: Config, name: str | None = None) -> dict[str, Any]:
    """config.json as transformers 4 writes it, for the class `name` or the architecture's own."""
    described = {
        "architectures": [name or CLASSES[config.architecture]],
        "hidden_act": {"silu": "silu", "gelu": "gelu_pytorch_tanh"}[config.kind.activation],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
    }
    if config.window is not None:
        windowed = [config.window_of(layer) is not None for layer in range(config.num_layers)]
        described["sliding_window"] = config.window
        described["layer_types"] = [("full_attention", "sliding_attention")[w] for w in windowed]
    if config.kind.attention_scale is not None:
        described["query_pre_attn_scalar"] = round(config.attention_scale**-2)
    if config.rope_factor != 1:
        described["rope_scaling"] = {"rope_type": "linear", "factor": config.rope_factor}
    others = {
        "rope_local_base_freq": config.local_rope_theta,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
    }
    return described | {key: value for key, value in others.items() if value is not None}


def decoded(tensor: Any) -> np.ndarray:
    """Converts a tensor to float32."""
    return np.asarray(
        tensor.dequantize() if isinstance(tensor, jq.QuantizedArray) else tensor, np.float32
    )


def weights(name: str) -> tuple[dict[str, np.ndarray], Config, np.ndarray | None]:
    """Returns a golden model's weights by checkpoint names, its config, and its rope divisors."""
    file = jq.gguf.read(path(name))
    config = Config.from_metadata(file.metadata)
    arrays = {name: decoded(tensor) for name, tensor in file.tensors.items()}
    divisors = arrays.pop("rope_freqs.weight", None)
    return stored(arrays, config, config.kind.checkpoints[0]), config, divisors


def stored(
    arrays: dict[str, np.ndarray], config: Config, checkpoint: CheckpointClass
) -> dict[str, np.ndarray]:
    """Converts tensors of a GGUF file to those of a checkpoint of this class."""
    expected, tensors = expected_tensors(config), {}
    for name, place in tensor_locations.locations(config, checkpoint).items():
        if name not in arrays:
            continue
        rows, entry = arrays[name], expected[name].entry
        if entry.is_norm and not expected[name].is_bias:
            rows = rows - np.float32(config.kind.norm_offset)
        if entry.rotated and config.interleaved_rope and not checkpoint.interleaved_rope:
            rows = halves(rows, getattr(config, entry.rotated))
        for i, whole in enumerate(place.names):
            tensor = tensors.setdefault(whole, np.full(place.shape, np.nan, np.float32))
            held = rows[i] if len(place.names) > 1 else rows
            if not place.of_experts or len(place.names) > 1:
                tensor.reshape(-1, *held.shape[1:])[place.rows] = held
            else:
                into = tensor if place.transposed is False else tensor.swapaxes(1, 2)
                into[:, place.rows] = held
    return tensors


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> Path:
    """Writes a checkpoint without a tokenizer, with its tensors split into `shards` files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
