"""Models of a given shape with random packed weights, for timing without a large file."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import QuantizedArray
from jax_q4k.models.architectures.base import MixerKind
from jax_q4k.models.config import Config
from jax_q4k.models.config.attention_fields import Latent
from jax_q4k.models.config.expert_fields import Experts
from jax_q4k.models.config.mixer_fields import Delta
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.quantizing import recipes
from jax_q4k.models.network.build import build
from jax_q4k.models.runner.model import Model
from ptx_kernels import formats


def hybrid(layers: int) -> tuple[MixerKind, ...]:
    """Returns attention for every fourth layer, gated delta nets for the others."""
    return tuple("attention" if i % 4 == 3 else "delta" for i in range(layers))


LLAMA_3_1_8B = Config(
    architecture="llama",
    vocab_size=128256,
    context_length=131072,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500000.0,
)

#: 1.04 billion parameters: Llama 3.2 1B with a smaller vocabulary.
LLAMA_1B = Config(
    architecture="llama",
    vocab_size=32000,
    context_length=4096,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=500000.0,
)

#: 1.0 billion parameters, 0.3 of them embeddings: Gemma 3 1B.
GEMMA_3_1B = Config(
    architecture="gemma3",
    vocab_size=262144,
    context_length=32768,
    hidden_size=1152,
    intermediate_size=6912,
    num_layers=26,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    norm_eps=1e-6,
    rope_theta=1e6,
    window=512,
    local_rope_theta=10000.0,
)

#: 11.8 billion parameters, 1.0 of them embeddings: Gemma 3 12B.
GEMMA_3_12B = Config(
    architecture="gemma3",
    vocab_size=262144,
    context_length=131072,
    hidden_size=3840,
    intermediate_size=15360,
    num_layers=48,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    norm_eps=1e-6,
    rope_theta=1e6,
    window=1024,
    local_rope_theta=10000.0,
)

#: 3.1 billion parameters, of which a token uses 0.6: 2 of 16 experts.
MOE_3B = Config(
    architecture="qwen3moe",
    vocab_size=32000,
    context_length=4096,
    hidden_size=2048,
    intermediate_size=1792,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    experts=Experts(count=16, used=2, size=1792),
)

QWEN_3_30B_A3B = Config(
    architecture="qwen3moe",
    vocab_size=151936,
    context_length=40960,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    experts=Experts(count=128, used=8, size=768),
)

#: 0.75 billion parameters, 0.25 of them embeddings: Qwen 3.5 0.8B. Three of four layers are
#: recurrent.
QWEN_3_5_800M = Config(
    architecture="qwen35",
    vocab_size=248320,
    context_length=32768,
    hidden_size=1024,
    intermediate_size=3584,
    num_layers=24,
    num_heads=8,
    num_kv_heads=2,
    head_dim=256,
    norm_eps=1e-6,
    rope_theta=1e7,
    rope_dim=64,
    mixers=hybrid(24),
    delta=Delta(key_heads=16, value_heads=16, head_dim=128, width=4, value_dim=128),
)

QWEN_3_6_35B_A3B = Config(
    architecture="qwen35moe",
    vocab_size=248320,
    context_length=262144,
    hidden_size=2048,
    intermediate_size=512,
    num_layers=40,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    norm_eps=1e-6,
    rope_theta=1e7,
    rope_dim=64,
    experts=Experts(count=256, used=8, size=512, shared_size=512),
    mixers=hybrid(40),
    delta=Delta(key_heads=16, value_heads=32, head_dim=128, width=4, value_dim=128),
)

GEMMA_4_31B = Config(
    architecture="gemma4",
    vocab_size=262144,
    context_length=262144,
    hidden_size=5376,
    intermediate_size=21504,
    num_layers=60,
    num_heads=32,
    num_kv_heads=16,
    head_dim=512,
    norm_eps=1e-6,
    rope_theta=1e6,
    window=1024,
    local_rope_theta=10000.0,
    final_soft_cap=30.0,
    kv_heads=tuple(16 if i % 6 < 5 else 4 for i in range(60)),
    local_head_dim=256,
    local_rope_dim=256,
)

#: GLM 4.7 Flash: latent attention, and experts in all layers but the first.
GLM_4_7_FLASH = Config(
    architecture="deepseek2",
    vocab_size=154880,
    context_length=202752,
    hidden_size=2048,
    intermediate_size=10240,
    num_layers=47,
    num_heads=20,
    num_kv_heads=1,
    head_dim=256,
    norm_eps=1e-5,
    rope_theta=1e6,
    rope_dim=64,
    experts=Experts(
        count=64,
        used=4,
        size=1536,
        shared_size=1536,
        dense_layers=1,
        gating="sigmoid",
        scale=1.8,
    ),
    latent=Latent(rank=512, query_rank=768, value_dim=256),
)


def first_layers(config: Config, count: int) -> Config:
    """Returns the shape reduced to its first layers."""
    by_layer = {
        name: values[:count]
        for name in ("mixers", "kv_heads", "windowed_layers", "rotated_layers", "inner_sizes")
        if (values := getattr(config, name)) is not None
    }
    return dataclasses.replace(config, num_layers=count, **by_layer)


#: Values of the f16 fields that give random bytes zero mean and about unit variance.
_SCALES = {
    "Q4_K": {"d": 1 / 260, "dmin": 7.5 / 260},
    "Q6_K": {"d": 1 / 1400},
    "Q5_0": {"d": 1 / 9.2},
    "Q8_0": {"d": 1 / 74},
}

#: Types of tensors that are not packed.
_FLOATS = {"F32": jnp.float32, "BF16": jnp.bfloat16}


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def random_weight(key: jax.Array, format: str, *shape: int) -> QuantizedArray:
    """Generates packed weights (..., k) on the device, with zero mean and variance about 1 / k."""
    block, (*leading, k) = formats.get(format), shape
    planes = []
    for plane, (_, fields) in zip(block.planes, block.layout, strict=True):
        key, draw = jax.random.split(key)
        axes = *leading, k // block.block_size, plane.bytes_per_block
        data = jax.random.bits(draw, axes, jnp.uint8)
        start = 0
        for field in fields:
            if field in block.f16_fields:
                scale = np.array([_SCALES[format][field] / k**0.5], np.float16).view(np.uint8)
                data = data.at[..., start : start + 2].set(scale)
            start += block.size(field)
        planes.append(data)
    return QuantizedArray(format, shape, planes)


def tensor_types(config: Config) -> dict[str, str]:
    """Returns tensor name -> ggml's type name, for a Q4_K_M file with a separate output matrix."""
    shapes = {
        name: tensor.shape
        for name, tensor in expected_tensors(config).items()
        if _is_held(config, name, tensor.required)
    }
    return recipes.tensor_types(recipes.get("Q4_K_M"), config, shapes)


def _is_held(config: Config, name: str, required: bool) -> bool:
    """Returns whether files of the shape hold the tensor: required ones and the output matrix.

    Gemma 4's windowed layers also have their own values, and all its layers a scale.
    """
    if required or name == "output.weight":
        return True
    if config.architecture != "gemma4" or not name.startswith("blk."):
        return False
    if name.endswith("attn_v.weight"):
        layer = int(name.split(".")[1])
        return config.window_of(layer) is not None and config.kv_layer_of(layer) == layer
    return name.endswith("layer_output_scale.weight")


def random_model(config: Config, seed: int = 0, *, abstract: bool = False) -> Model:
    """Returns a model of `config` with its own output matrix and no tokenizer, as Q4_K_M.

    abstract: packed weights are shapes without data, which suffice to compile programs and take no
    memory.
    """
    tensors: dict[str, Any] = {}
    shapes = {name: tensor.shape for name, tensor in expected_tensors(config).items()}
    for i, (name, kind) in enumerate(tensor_types(config).items()):
        shape, key = shapes[name], jax.random.fold_in(jax.random.key(seed), i)
        if kind in _FLOATS:
            value = -1 if name.endswith("ssm_a") else 1  # a state's decay is negative
            tensors[name] = jnp.full(shape, value, _FLOATS[kind])
        elif abstract:
            make = functools.partial(
                lambda format, shape, key: random_weight(key, format, *shape), kind, shape
            )
            tensors[name] = jax.eval_shape(make, key)
        else:
            tensors[name] = random_weight(key, kind, *shape)
    return Model(build(config, tensors))
