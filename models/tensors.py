"""A model's tensors: one table, which building, naming and checking walk over.

It also says how tensor parallelism splits each (`place.py`).
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

from .architecture import Architecture
from .config import MAX_LAYERS, Config


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the model, or of each layer: a matrix is a Linear's, a vector a norm's.

    Attributes:
      gguf: its name in GGUF files, without `blk.LAYER.` before it and `.weight` behind.
      module: its place in Decoder, or in DecoderLayer.
      checkpoint: its name in checkpoints, without `model.layers.LAYER.` and `.weight`; None: it is
        not stored there.
      shape: row-major, (n, k) of a matrix, by the names of `_sizes`.
      split: the axis along which tensor parallelism splits it; None: every device has all of it.
      bias: facts of an Architecture or a config.json, any of which gives it a bias; (): only GGUF
        files may hold one; None: it has none.
      rotated: which number of heads its rows are, where rope rotates them.
      required: whether every file holds it.
    """

    gguf: str
    module: str
    checkpoint: str | None
    shape: str
    split: int | None = None
    bias: tuple[str, ...] | None = None
    rotated: str | None = None
    required: bool = True


INPUT = (
    Tensor("token_embd", "embedding", "model.embed_tokens", "vocab hidden", 0),
    Tensor("rope_freqs", "rope_divisors", None, "rope_pairs", required=False),
)
OUTPUT = (
    Tensor("output_norm", "norm", "model.norm", "hidden"),
    Tensor("output", "output", "lm_head", "vocab hidden", 0, (), required=False),  # else tied
)

_QKV, _ATTENTION, _MLP = ("qkv_bias", "attention_bias"), ("attention_bias",), ("mlp_bias",)
MATRICES = (
    Tensor("attn_q", "attention.query", "self_attn.q_proj", "q hidden", 0, _QKV, "num_heads"),
    Tensor("attn_k", "attention.key", "self_attn.k_proj", "kv hidden", 0, _QKV, "num_kv_heads"),
    Tensor("attn_v", "attention.value", "self_attn.v_proj", "kv hidden", 0, _QKV),
    Tensor("attn_output", "attention.output", "self_attn.o_proj", "hidden q", 1, _ATTENTION),
    Tensor("ffn_gate", "mlp.gate", "mlp.gate_proj", "inner hidden", 0, _MLP),
    Tensor("ffn_up", "mlp.up", "mlp.up_proj", "inner hidden", 0, _MLP),
    Tensor("ffn_down", "mlp.down", "mlp.down_proj", "hidden inner", 1, _MLP),
)
NORMS = (
    Tensor("attn_norm", "attention.norm", "input_layernorm", "hidden"),
    Tensor("ffn_norm", "mlp.norm", "post_attention_layernorm", "hidden"),
)
NORMS_AND_POST_NORMS = (
    Tensor("attn_norm", "attention.norm", "input_layernorm", "hidden"),
    Tensor("post_attention_norm", "attention.post_norm", "post_attention_layernorm", "hidden"),
    Tensor("ffn_norm", "mlp.norm", "pre_feedforward_layernorm", "hidden"),
    Tensor("post_ffw_norm", "mlp.post_norm", "post_feedforward_layernorm", "hidden"),
)
QK_NORMS = (
    Tensor("attn_q_norm", "attention.q_norm", "self_attn.q_norm", "head"),
    Tensor("attn_k_norm", "attention.k_norm", "self_attn.k_norm", "head"),
)
#: Every tensor that a DecoderLayer has a place for, in whatever architecture.
ALL_OF_A_LAYER = MATRICES + NORMS_AND_POST_NORMS + QK_NORMS

#: Vision, audio, and the prediction of further tokens: what generating text does not use.
_UNUSED = re.compile(r"(v|mm|a)\..*|blk\.\d+\.nextn\..*")


def layer_tensors(kind: Architecture) -> tuple[Tensor, ...]:
    """The tensors of each layer."""
    norms = NORMS_AND_POST_NORMS if kind.post_norms else NORMS
    return MATRICES + norms + (QK_NORMS if kind.qk_norm else ())


def _sizes(config: Config) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "head": config.head_dim,
        "rope_pairs": config.rope_dim // 2,
    }


def table(
    config: Config, of_a_layer: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, str, str, int | None]]:
    """(tensor, what is before its name in GGUF files and in checkpoints, layer) of all of them."""
    yield from ((tensor, "", "", None) for tensor in INPUT)
    for i in range(config.num_layers):
        for tensor in of_a_layer:
            yield tensor, f"blk.{i}.", f"model.layers.{i}.", i
    yield from ((tensor, "", "", None) for tensor in OUTPUT)


class Expected(NamedTuple):
    """A tensor that a model may hold; `required`: as GGUF files do.

    checkpoint: its name there. split: as `Tensor.split`. entry: the table's. is_bias: whether it is
    the entry's bias.
    """

    shape: tuple[int, ...]
    required: bool
    checkpoint: str | None
    split: int | None
    entry: Tensor
    is_bias: bool


def expected_tensors(config: Config) -> dict[str, Expected]:
    """GGUF's name -> every tensor that a file of this configuration may hold."""
    sizes, expected = _sizes(config), {}
    for tensor, gguf, checkpoint, _ in table(config, layer_tensors(config.kind)):
        shape = tuple(sizes[name] for name in tensor.shape.split())
        stored = None if tensor.checkpoint is None else checkpoint + tensor.checkpoint
        expected[f"{gguf}{tensor.gguf}.weight"] = Expected(
            shape, tensor.required, stored and f"{stored}.weight", tensor.split, tensor, False
        )
        if tensor.bias is not None:
            must_be = any(getattr(config.kind, fact, False) for fact in tensor.bias)
            split = 0 if tensor.split == 0 else None  # partial sums are added before it is
            expected[f"{gguf}{tensor.gguf}.bias"] = Expected(
                shape[:1], must_be, stored and f"{stored}.bias", split, tensor, True
            )
    return expected


def unused_tensors(metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of a GGUF file's tensors that generating text does not use.

    They are those of vision (`v.`, `mm.`) and audio (`a.`), and the last layers, which predict
    further tokens, as many as `nextn_predict_layers` says.
    """
    layers, further = _layer_counts(metadata)
    last = tuple(f"blk.{i}." for i in range(layers - further, layers))
    return [name for name in names if _UNUSED.fullmatch(name) or name.startswith(last)]


def without_unused_layers(metadata: Mapping[str, Any]) -> Metadata:
    """Metadata of a file without its `unused_tensors`."""
    layers, further = _layer_counts(metadata)
    trunk, architecture = Metadata(metadata), metadata.get("general.architecture")
    if further:
        trunk[f"{architecture}.block_count"] = layers - further
        del trunk[f"{architecture}.nextn_predict_layers"]
    return trunk


def _layer_counts(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(layers, those of them that predict further tokens); (0, 0) where `Config` refuses them."""
    architecture = metadata.get("general.architecture")
    keys = (f"{architecture}.{key}" for key in ("block_count", "nextn_predict_layers"))
    layers, further = (metadata.get(key, 0) for key in keys)
    counts = all(isinstance(count, int) for count in (layers, further))
    return (layers, further) if counts and 0 <= further < layers <= MAX_LAYERS else (0, 0)


def check_tensors(config: Config, tensors: Mapping[str, Any], file: str) -> None:
    """Raises GGUFError unless `tensors` are those of `config`, all and no others.

    `tensors` holds anything with `.shape`.
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
    if "output.bias" in tensors and "output.weight" not in tensors:
        raise GGUFError(file, "tensor 'output.bias'", "is there without 'output.weight'")


def float_vector(tensor: QuantizedArray | jax.Array) -> jax.Array:
    """A norm's weight or a bias as float32."""
    if isinstance(tensor, QuantizedArray):
        return tensor.dequantize()
    return jnp.asarray(tensor).astype(jnp.float32)
