"""Builds the Decoder from a model's tensors by GGUF name, and returns a Decoder's tensors."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jax_q4k import QuantizedArray

from ..architectures.tensor_tables import OF_A_LAYER, SCALES, Tensor
from ..config import Config, rope
from ..config.tensors import float_array, layer_tensors, table
from . import flax_types
from .decoder import Decoder, RopeDivisors
from .encoder import Encoder, TaskAdapters
from .layers import (
    MLP,
    Attention,
    DecoderLayer,
    Dense,
    DenseBesideExperts,
    ExpertLinear,
    Experts,
    GatedDeltaNet,
    Head,
    LatentAttention,
    LayerNorm,
    Linear,
    PerLayer,
    PerLayerEmbedding,
    RMSNorm,
    ShortConvolution,
)
from .parts import HasDecoder


def build(
    config: Config,
    tensors: Mapping[str, QuantizedArray | jax.Array],
    rope_frequencies: Sequence[jax.Array] | None = None,
    tasks: Mapping[str, Mapping[str, jax.Array]] | None = None,
) -> Decoder:
    """Builds the decoder from tensors that `check_tensors` has accepted.

    rope_frequencies: as in `Decoder`; None means that config and tensors determine them.
    tasks: LoRA adapters of an encoder's tasks: GGUF name -> arrays of its TaskAdapters.
    """

    own = {tensor.name for tensor, *_ in table(config)}

    def held(tensor: Tensor, prefix: str = "") -> Any:
        """Builds the module or variable of one tensor; None if the model lacks the tensor."""
        weight = tensors.get(prefix + tensor.name)
        bias = tensors.get(f"{prefix}{tensor.gguf}.bias")
        if weight is None:
            return None
        bias = None if bias is None or tensor.suffix == "bias" else float_array(bias)
        if tensor.is_norm and config.kind.layer_norm:
            return LayerNorm(float_array(weight), config.norm_eps, bias)
        if tensor.is_norm:
            return RMSNorm(float_array(weight), config.norm_eps)
        weight = float_array(weight) if tensor.exact else weight
        dimensions = len(tensor.shape.split())
        if dimensions == 1 or tensor.table:
            return flax_types.variable(weight)
        names = [f"{tensor.gguf}.{suffix}" for suffix in SCALES]
        # Gemma 4 calls the factors of its router's input ffn_gate_inp.scale.
        scales = (None if name in own else tensors.get(prefix + name) for name in names)
        optional = bias, *(None if scale is None else float_array(scale) for scale in scales)
        return Linear(weight, *optional) if dimensions == 2 else ExpertLinear(weight, *optional)

    def owners(tensors: Iterable[tuple[Tensor, str]]) -> dict[str, dict[str, Any]]:
        """Builds tensors' modules: path of the owning module -> attribute -> module or variable."""
        parts: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        for tensor, prefix in tensors:
            owner, _, attribute = tensor.module.rpartition(".")
            parts[owner][attribute] = held(tensor, prefix)
        return parts

    top = owners((tensor, "") for tensor, _, _, at in table(config) if at is None)
    layers = (
        _layer(config, i, owners((tensor, f"blk.{i}.") for tensor in layer_tensors(config, i)))
        for i in range(config.num_layers)
    )
    if rope_frequencies is None:
        rope_frequencies = [jax.device_put(f) for f in rope.tables(config.ropes, tensors)]
    found = top.get("head", {})
    common: dict[str, Any] = {
        "layers": nnx.List(list(layers)),
        "rope_frequencies": nnx.List([nnx.Variable(f) for f in rope_frequencies]),
        "rope_divisors": RopeDivisors(**top.get("rope_divisors", {})),
        "head": Head(**found, activation=config.kind.head_activation) if _any(found) else None,
    }
    if config.kind.bidirectional:
        dense = top.get("dense", {})
        parts = {"norm": None, **top[""], "dense": Dense(**dense) if _any(dense) else None}
        adapters = {name: TaskAdapters(**arrays) for name, arrays in (tasks or {}).items()}
        parts["tasks"] = nnx.Dict(adapters) if adapters else None
        return Encoder(config, **parts, **common, output=None)
    per_layer = PerLayerEmbedding(**top["per_layer"]) if "per_layer" in top else None
    return Decoder(config, **top[""], **common, per_layer=per_layer)


def _any(modules: Mapping[str, Any]) -> bool:
    return any(module is not None for module in modules.values())


def _layer(config: Config, i: int, parts: dict[str, dict[str, Any]]) -> DecoderLayer:
    """Builds a decoder layer from its tensors' modules.

    parts: path of the owning module -> attribute -> module or variable.
    """
    activation, mixer = config.kind.activation, config.mixer_of(i)
    per_layer = parts.get("per_layer")
    mixed: dict[str, Any] = {mixer: _mixer(config, i, parts[mixer])}
    return DecoderLayer(
        _network(config, i, parts),
        **mixed,
        per_layer=PerLayer(**per_layer, activation=activation) if per_layer else None,
        **parts.get("", {}),
    )


def _network(
    config: Config, i: int, parts: dict[str, dict[str, Any]]
) -> MLP | Experts | DenseBesideExperts:
    """Builds the feed-forward network of a layer."""
    options: dict[str, Any] = {"activation": config.kind.activation}
    scaled: dict[str, Any] = {"residual_scale": config.scales.residual}
    if config.experts is None or not config.has_experts(i):
        return MLP(**{"gate": None} | parts["mlp"], **options, **scaled)
    shared = MLP(**parts["mlp.shared"], **options) if "mlp.shared" in parts else None
    options |= {"shared": shared, "shape": config.experts}
    if "mlp.experts" not in parts:
        return Experts(**{"gate": None} | parts["mlp"], **options, **scaled)
    dense = MLP(**parts["mlp.dense"], activation=config.kind.activation)
    experts = Experts(**parts["mlp.experts"], **options)
    return DenseBesideExperts(dense, experts, **parts["mlp"], **scaled)


def _mixer(config: Config, layer: int, parts: dict[str, Any]) -> nnx.Module:
    """Builds the token mixer of a layer: attention, convolution or delta net."""
    kind = config.kind
    if config.mixer_of(layer) == "convolution":
        return ShortConvolution(**parts)
    if config.mixer_of(layer) == "delta":
        assert config.delta is not None
        return GatedDeltaNet(**parts, shape=config.delta, tiled=kind.tiled_heads)
    if config.latent is not None:
        return LatentAttention(
            **parts,
            head_dim=config.head_dim,
            rope_dim=config.rope_dim,
            shape=config.latent,
            scale=config.attention_scale,
        )
    return Attention(
        **parts,
        head_dim=config.head_dim_of(layer),
        value_eps=config.norm_eps if kind.value_norm else None,
        output_gate=kind.output_gate,
        window=config.window_of(layer),
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        residual_scale=config.scales.residual,
    )


def named_tensors(model: HasDecoder | Decoder) -> dict[str, QuantizedArray | jax.Array]:
    """Returns a decoder's tensors by GGUF name; the inverse of `build`.

    Includes tensors that the architecture does not define, such as query norms in a llama;
    `check_tensors` rejects those.

    Raises TypeError if another module, such as an adapter, replaces a Linear or an RMSNorm.
    """
    decoder = model if isinstance(model, Decoder) else model.decoder()
    tensors: dict[str, Any] = {}
    for tensor, prefix, _, layer in _with_foreign_tensors(decoder.config):
        module: Any = decoder if layer is None else decoder.layers[layer]
        for name in tensor.module.split("."):
            module = getattr(module, name, None)
        if module is None:  # an absent norm, or an output tied to the embedding
            continue
        if isinstance(module, nnx.Variable):
            tensors[prefix + tensor.name] = module.get_value()
            continue
        if not isinstance(module, (Linear, ExpertLinear, RMSNorm, LayerNorm)):
            problem = f"{prefix}{tensor.gguf} is a {type(module).__name__}"
            raise TypeError(f"{problem}; a GGUF file holds what Linear and RMSNorm hold")
        tensors[prefix + tensor.name] = module.weight.get_value()
        for suffix in ("bias", *SCALES):
            variable = getattr(module, suffix, None)
            if variable is not None:
                tensors[f"{prefix}{tensor.gguf}.{suffix}"] = variable.get_value()
    return tensors


def task_arrays(decoder: Decoder) -> dict[str, dict[str, jax.Array]]:
    """Returns an encoder's adapters of tasks as `build` takes them; {} for other decoders."""
    tasks = getattr(decoder, "tasks", None) or {}
    return {
        name: {part: getattr(adapters, part).get_value() for part in ("a", "b", "scale")}
        for name, adapters in tasks.items()
    }


def _with_foreign_tensors(config: Config) -> Iterator[tuple[Tensor, str, str, int | None]]:
    """Yields `table(config)`, then other architectures' tensors at module paths that it lacks."""
    yield from table(config)
    for i in range(config.num_layers):
        modules = {tensor.module for tensor in layer_tensors(config, i)}
        for module, tensor in OF_A_LAYER.items():
            if module not in modules:
                yield tensor, f"blk.{i}.", f"model.layers.{i}.", i
