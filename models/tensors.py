"""A model's tensors: their names and shapes, and the modules that hold them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_q4k import GGUFError, QuantizedArray

from . import rope
from .config import Config
from .decoder import Decoder
from .layers import MLP, Attention, DecoderLayer, Linear, RMSNorm
from .model import Model


class _Expected(NamedTuple):
    shape: tuple[int, ...]
    required: bool = True


def expected_tensors(config: Config) -> dict[str, _Expected]:
    """Name -> shape (row-major) of every tensor that a file of this configuration may hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {
        "token_embd.weight": _Expected((config.vocab_size, hidden)),
        "output_norm.weight": _Expected((hidden,)),
        "output.weight": _Expected((config.vocab_size, hidden), required=False),  # absent: tied
        "output.bias": _Expected((config.vocab_size,), required=False),
        "rope_freqs.weight": _Expected((config.rope_dim // 2,), required=False),
    }
    linears = {  # name: (n, k, whether a bias must be there)
        "attn_q": (q_size, hidden, config.qkv_bias),
        "attn_k": (kv_size, hidden, config.qkv_bias),
        "attn_v": (kv_size, hidden, config.qkv_bias),
        "attn_output": (hidden, q_size, False),
        "ffn_gate": (inner, hidden, False),
        "ffn_up": (inner, hidden, False),
        "ffn_down": (hidden, inner, False),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if config.qk_norm:
        norms |= {"attn_q_norm": config.head_dim, "attn_k_norm": config.head_dim}
    for i in range(config.num_layers):
        for name, (n, k, bias) in linears.items():
            tensors[f"blk.{i}.{name}.weight"] = _Expected((n, k))
            tensors[f"blk.{i}.{name}.bias"] = _Expected((n,), bias)
        for name, size in norms.items():
            tensors[f"blk.{i}.{name}.weight"] = _Expected((size,))
    return tensors


def check_tensors(config: Config, tensors: Mapping[str, Any], file: str) -> None:
    """Raises GGUFError unless `tensors` (anything with `.shape`) are those of `config`, all and no
    others.
    """
    expected = expected_tensors(config)
    for name, (shape, required) in expected.items():
        if name in tensors:
            got = tuple(tensors[name].shape)
            if got != shape:
                raise GGUFError(file, f"tensor {name!r}", f"has shape {got}, expected {shape}")
        elif required:
            raise GGUFError(file, f"tensor {name!r}", f"is missing, expected with shape {shape}")
    for name in tensors:
        if name not in expected:
            raise GGUFError(
                file, f"tensor {name!r}", f"is not part of a {config.architecture} model"
            )
    if "output.bias" in tensors and "output.weight" not in tensors:
        raise GGUFError(file, "tensor 'output.bias'", "is there without 'output.weight'")


def build(config: Config, tensors: Mapping[str, QuantizedArray | jax.Array]) -> Decoder:
    """The decoder around tensors that `check_tensors` has passed."""

    def vector(name: str) -> jax.Array:
        return float_vector(tensors[name])

    def linear(name: str) -> Linear:
        return Linear(
            tensors[f"{name}.weight"], vector(f"{name}.bias") if f"{name}.bias" in tensors else None
        )

    def norm(name: str) -> RMSNorm:
        return RMSNorm(vector(f"{name}.weight"), config.rms_norm_eps)

    def layer(prefix: str) -> DecoderLayer:
        attention = Attention(
            head_dim=config.head_dim,
            query=linear(f"{prefix}.attn_q"),
            key=linear(f"{prefix}.attn_k"),
            value=linear(f"{prefix}.attn_v"),
            output=linear(f"{prefix}.attn_output"),
            q_norm=norm(f"{prefix}.attn_q_norm") if config.qk_norm else None,
            k_norm=norm(f"{prefix}.attn_k_norm") if config.qk_norm else None,
            norm=norm(f"{prefix}.attn_norm"),
        )
        mlp = MLP(
            gate=linear(f"{prefix}.ffn_gate"),
            up=linear(f"{prefix}.ffn_up"),
            down=linear(f"{prefix}.ffn_down"),
            norm=norm(f"{prefix}.ffn_norm"),
        )
        return DecoderLayer(attention, mlp)

    divisors = vector("rope_freqs.weight") if "rope_freqs.weight" in tensors else None
    frequencies = rope.frequencies(config, None if divisors is None else np.asarray(divisors))
    return Decoder(
        config,
        embedding=nnx.Param(tensors["token_embd.weight"]),
        layers=nnx.List([layer(f"blk.{i}") for i in range(config.num_layers)]),
        norm=norm("output_norm"),
        output=linear("output") if "output.weight" in tensors else None,
        rope_frequencies=nnx.Variable(jax.device_put(frequencies)),
        rope_divisors=None if divisors is None else nnx.Variable(divisors),
    )


#: Part of a block's tensor names -> its module.
_MODULES = {
    "attn_norm": "attention.norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_output": "attention.output",
    "ffn_norm": "mlp.norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}


def named_tensors(model: Model | Decoder) -> dict[str, QuantizedArray | jax.Array]:
    """GGUF's names -> a decoder's tensors: the inverse of `build`.

    TypeError where another module stands in a Linear's or a RMSNorm's place, such as an adapter
    around it.
    """
    decoder = model.decoder() if isinstance(model, Model) else model
    tensors: dict[str, Any] = {"token_embd.weight": decoder.embedding.get_value()}
    if decoder.rope_divisors is not None:
        tensors["rope_freqs.weight"] = decoder.rope_divisors.get_value()

    def add(name: str, module: Linear | RMSNorm | None) -> None:
        if (
            module is None
        ):  # an output tied to the embedding, or norms that this architecture has not
            return
        if not isinstance(module, (Linear, RMSNorm)):
            raise TypeError(
                f"{name} is a {type(module).__name__}; a GGUF file holds what Linear and RMSNorm hold"
            )
        tensors[f"{name}.weight"] = module.weight.get_value()
        if isinstance(module, Linear) and module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.get_value()

    for i, layer in enumerate(decoder.layers):
        for name, place in _MODULES.items():
            add(f"blk.{i}.{name}", operator.attrgetter(place)(layer))
    add("output_norm", decoder.norm)
    add("output", decoder.output)
    return tensors


def float_vector(tensor: QuantizedArray | jax.Array) -> jax.Array:
    return tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor.astype(jnp.float32)
