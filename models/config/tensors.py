"""Lists the tensors that a model of a given Config has, with names, shapes and module paths.

The table also has the axis of each tensor that tensor parallelism splits (`sharding/plan.py`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_q4k import GGUFError, QuantizedArray
from jax_q4k.gguf import Metadata

from ..architectures.base import MAX_LAYERS
from ..architectures.tensor_tables import OPTIONAL_BIASES, SCALES, Tensor
from .config import Config

#: Tensors of vision, audio and multi-token prediction, which text generation does not use.
_UNUSED = re.compile(r"(v|mm|a)\..*|blk\.\d+\.nextn\..*")

#: (tensor, other tensor that it requires).
_TOGETHER = (
    ("rope_factors_long.weight", "rope_factors_short.weight"),
    ("rope_factors_short.weight", "rope_factors_long.weight"),
)


def layer_tensors(config: Config, layer: int) -> tuple[Tensor, ...]:
    """Returns the tensors of a layer."""
    kind, mixer = config.kind, config.mixer_of(layer)
    tensors = {"attention": kind.attention, "delta": kind.delta, "convolution": kind.convolution}
    network = kind.experts if config.has_experts(layer) else kind.mlp
    norms = tuple(_of_mixer(tensor, mixer) for tensor in kind.norms)
    lengths = sizes(config, layer)
    every = (*tensors[mixer], *norms, *network, *kind.further)
    return tuple(tensor for tensor in every if _exists(tensor, lengths))


def _exists(tensor: Tensor, lengths: Mapping[str, int]) -> bool:
    """Returns whether a model with these sizes has the tensor."""
    needed = (*tensor.shape.split(), *tensor.where.split())
    return all(lengths[name] for name in needed) and not lengths.get(tensor.unless, 0)


def _of_mixer(tensor: Tensor, mixer: str) -> Tensor:
    """Returns the tensor with its module path in `mixer` instead of attention."""
    owner, _, attribute = tensor.module.partition(".")
    module = f"{mixer}.{attribute}" if owner == "attention" else tensor.module
    return dataclasses.replace(tensor, module=module)


def sizes(config: Config, layer: int | None) -> dict[str, int]:
    """Returns the length of each named axis; tensors with an axis of length 0 do not exist.

    layer: None for tensors outside the layers.
    """
    at = 0 if layer is None else layer
    head_dim, kv_heads = config.head_dim_of(at), config.kv_heads_of(at)
    owns_kv = layer is None or config.kv_layer_of(at) == at
    q = config.num_heads * head_dim
    lengths = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "hidden*3": 3 * config.hidden_size,
        "inner": config.inner_size_of(at),
        "q": q,
        "gated_q": 2 * q,
        "kv": kv_heads * head_dim * owns_kv,
        "head": head_dim,
        "k_head": head_dim * owns_kv,
        "heads": config.num_heads,
        "kv_heads": kv_heads * owns_kv,
        "rope_pairs": config.rope_dim // 2,
        "experts": 0 if config.experts is None else config.experts.count,
        "expert": 0 if config.experts is None else config.experts.size,
        "shared": 0 if config.experts is None else config.experts.shared_size,
        "convolution_width": config.convolution_width,
        "per_layer": config.per_layer_size,
        "per_layer*layers": config.per_layer_size * config.num_layers,
        "one": 1,
        "later_layer": int(at > 0),
        "context": config.context_length,
        "token_types": config.token_types,
        "labels": config.labels,
        "dense": config.dense_size,
    }
    if (delta := config.delta) is not None:
        lengths |= {
            "delta_channels": delta.channels,
            "delta_values": delta.values,
            "delta_heads": delta.value_heads,
            "delta_heads*2": 2 * delta.value_heads,
            "delta_head": delta.value_dim,
            "delta_key": delta.head_dim,
            "delta_width": delta.width,
            "key_heads": delta.key_heads,
            "values_of_key_head": delta.values // delta.key_heads,
        }
    if (latent := config.latent) is not None:
        lengths |= {
            "query_rank": latent.query_rank,
            "latent": latent.rank,
            "latent_key": latent.rank + config.rope_dim,
            "key_part": head_dim - config.rope_dim,
            "value": latent.value_dim,
            "values": config.num_heads * latent.value_dim,
        }
    return lengths


def table(config: Config) -> Iterator[tuple[Tensor, str, str, int | None]]:
    """Yields all tensors of a model.

    Yields (tensor, prefix of its GGUF name, prefix of its checkpoint name, layer or None).
    """
    lengths, kind = sizes(config, None), config.kind
    held = (tensor for tensor in kind.input if _exists(tensor, lengths))
    yield from ((tensor, "", "", None) for tensor in held)
    for i in range(config.num_layers):
        for tensor in layer_tensors(config, i):
            yield tensor, f"blk.{i}.", f"model.layers.{i}.", i
    held = (tensor for tensor in kind.output if _exists(tensor, lengths))
    yield from ((tensor, "", "", None) for tensor in held)


class Expected(NamedTuple):
    """Shape and properties of a tensor that a model's file may hold.

    required: whether every GGUF file holds it. split: see `Tensor.split`. entry: the weight's entry
    in the table; for a bias or scale, that of its weight. suffix: "bias" or one of SCALES for a
    bias or scale of `entry`; None for `entry` itself.
    """

    shape: tuple[int, ...]
    required: bool
    split: int | None
    entry: Tensor
    suffix: str | None

    @property
    def is_bias(self) -> bool:
        """Whether this tensor is the bias of `entry`."""
        return self.suffix == "bias"


def expected_tensors(config: Config) -> dict[str, Expected]:
    """Returns every tensor that a file of this configuration may hold, by GGUF name."""
    expected: dict[str, Expected] = {}
    biases = config.kind.biases
    of_layer = {layer: sizes(config, layer) for layer in (None, *range(config.num_layers))}
    for tensor, gguf, _, layer in table(config):
        lengths = of_layer[layer]
        shape = tuple(lengths[name] for name in tensor.shape.split())
        expected[gguf + tensor.name] = Expected(shape, tensor.required, tensor.split, tensor, None)
        if tensor.bias in (*biases, *OPTIONAL_BIASES):
            split = 0 if tensor.split == 0 else None  # with columns split, added after the sum
            expected[f"{gguf}{tensor.gguf}.bias"] = Expected(
                shape[:-1] or shape,
                tensor.required and tensor.bias in biases,
                split,
                tensor,
                "bias",
            )
        if tensor.is_matrix:
            one = shape[:1] if tensor.of_experts else (1,)
            for suffix in SCALES:
                name = f"{gguf}{tensor.gguf}.{suffix}"
                expected[name] = Expected(one, False, None, tensor, suffix)
    return expected


def unused_tensors(metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the names of tensors in a GGUF file that text generation does not use.

    These are the tensors of vision (`v.`, `mm.`), audio (`a.`) and multi-token prediction: the last
    `nextn_predict_layers` layers.
    """
    layers, further = _layer_counts(metadata)
    last = tuple(f"blk.{i}." for i in range(layers - further, layers))
    return [name for name in names if _UNUSED.fullmatch(name) or name.startswith(last)]


def without_unused_layers(metadata: Mapping[str, Any]) -> Metadata:
    """Returns a file's metadata as it would be without the layers in `unused_tensors`."""
    layers, further = _layer_counts(metadata)
    trunk, architecture = Metadata(metadata), metadata.get("general.architecture")
    if further:
        trunk[f"{architecture}.block_count"] = layers - further
        del trunk[f"{architecture}.nextn_predict_layers"]
    return trunk


def _layer_counts(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many layers, and how many MTP layers among them, the metadata declares.

    (0, 0) if `Config` would reject these numbers.
    """
    architecture = metadata.get("general.architecture")
    keys = (f"{architecture}.{key}" for key in ("block_count", "nextn_predict_layers"))
    layers, further = (metadata.get(key, 0) for key in keys)
    counts = all(isinstance(count, int) for count in (layers, further))
    return (layers, further) if counts and 0 <= further < layers <= MAX_LAYERS else (0, 0)


def check_tensors(config: Config, tensors: Mapping[str, Any], file: str) -> None:
    """Raises GGUFError unless `tensors` are exactly those of `config`.

    tensors: values may be anything with `.shape`.
    """
    expected = expected_tensors(config)
    for name, (shape, required, *_) in expected.items():
        if name in tensors:
            got = tuple(tensors[name].shape)
            if got != shape:
                raise GGUFError(file, f"tensor {name!r}", f"has shape {got}, expected {shape}")
        elif required:
            raise GGUFError(file, f"tensor {name!r}", f"is missing, expected with shape {shape}")
    for name in tensors:
        if name not in expected:
            problem = f"is not part of a {config.architecture} model"
            raise GGUFError(file, f"tensor {name!r}", problem)
    suffixed = (
        (name, f"{name.rpartition('.')[0]}.{what.entry.suffix}")
        for name, what in expected.items()
        if what.suffix
    )
    for name, other in (*_TOGETHER, *suffixed):
        if name in tensors and other not in tensors:
            raise GGUFError(file, f"tensor {name!r}", f"is present without {other!r}")


def float_array(tensor: QuantizedArray | jax.Array) -> jax.Array:
    """Converts the weight of a norm, a bias or a router to float32."""
    if isinstance(tensor, QuantizedArray):
        return tensor.dequantize()
    return jnp.asarray(tensor).astype(jnp.float32)
