"""The decoder of a model's tensors, and the tensors of a decoder."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jax_q4k import QuantizedArray

from . import flax_types, rope
from .config import Config
from .decoder import Decoder
from .layers import MLP, Attention, DecoderLayer, Linear, RMSNorm
from .model import Model
from .tensors import ALL_OF_A_LAYER, float_vector, layer_tensors, table


def build(
    config: Config,
    tensors: Mapping[str, QuantizedArray | jax.Array],
    rope_frequencies: Sequence[jax.Array] | None = None,
) -> Decoder:
    """The decoder of tensors that `check_tensors` has passed.

    rope_frequencies: as Decoder has them; None: what config and tensors say.
    """

    def module(name: str) -> Any:
        weight, bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
        if weight is None:
            return None
        if len(weight.shape) == 1:
            return RMSNorm(float_vector(weight), config.rms_norm_eps)
        return Linear(weight, None if bias is None else float_vector(bias))

    def layer(i: int) -> DecoderLayer:
        parts: dict[str, dict[str, Any]] = {"attention": {}, "mlp": {}}
        for tensor in layer_tensors(config.kind):
            owner, _, place = tensor.module.partition(".")
            parts[owner][place] = module(f"blk.{i}.{tensor.gguf}")
        attention = Attention(
            **parts["attention"],
            head_dim=config.head_dim,
            window=config.window_of(i),
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        )
        return DecoderLayer(attention, MLP(**parts["mlp"], activation=config.kind.activation))

    given = tensors.get("rope_freqs.weight")
    divisors = None if given is None else float_vector(given)
    if rope_frequencies is None:
        rope_frequencies = [jax.device_put(f) for f in rope.tables(config, divisors)]
    return Decoder(
        config,
        embedding=flax_types.variable(tensors["token_embd.weight"]),
        layers=nnx.List([layer(i) for i in range(config.num_layers)]),
        norm=module("output_norm"),
        output=module("output"),
        rope_frequencies=nnx.List([nnx.Variable(f) for f in rope_frequencies]),
        rope_divisors=None if divisors is None else nnx.Variable(divisors),
    )


def named_tensors(model: Model | Decoder) -> dict[str, QuantizedArray | jax.Array]:
    """GGUF's names -> a decoder's tensors: the inverse of `build`.

    Tensors that its architecture has not, such as norms of a llama's queries, are among them:
    `check_tensors` refuses these.

    TypeError where another module stands in a Linear's or a RMSNorm's place, such as an adapter
    around it.
    """
    decoder = model.decoder() if isinstance(model, Model) else model
    tensors: dict[str, Any] = {}
    for tensor, prefix, _, layer in table(decoder.config, ALL_OF_A_LAYER):
        name, root = prefix + tensor.gguf, decoder if layer is None else decoder.layers[layer]
        module = operator.attrgetter(tensor.module)(root)
        if module is None:  # a norm that the layer has not, an output tied to the embedding
            continue
        if isinstance(module, nnx.Variable):
            tensors[f"{name}.weight"] = module.get_value()
            continue
        if not isinstance(module, (Linear, RMSNorm)):
            problem = f"{name} is a {type(module).__name__}"
            raise TypeError(f"{problem}; a GGUF file holds what Linear and RMSNorm hold")
        tensors[f"{name}.weight"] = module.weight.get_value()
        if isinstance(module, Linear) and module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.get_value()
    return tensors
