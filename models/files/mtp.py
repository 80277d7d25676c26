"""Loads the multi-token-prediction (MTP) layer of a GGUF file, for speculative decoding."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_q4k import GGUFError, gguf

from ..config import Config
from ..config.tensors import check_tensors, float_array
from ..runner.speculative.mtp import Drafter, NextTokens

if TYPE_CHECKING:
    from ..network.decoder import Decoder

#: Tensor of an MTP layer after `blk.N.nextn.` -> the tensor used instead if a file lacks it.
_OWN = {
    "eh_proj": None,
    "enorm": None,
    "hnorm": None,
    "shared_head_norm": "output_norm.weight",
    "embed_tokens": "token_embd.weight",
    "shared_head_head": "output.weight",
}
_PREFIX = "blk.0."


def load_nextn(path: str | os.PathLike[str], *, tokens: int | None = None) -> NextTokens:
    """Loads the multi-token-prediction layer of a GGUF file, for `generate(..., draft=)`.

    Reads nothing else of the file.

    Args:
      tokens: tokens per draft; None means a default for the device.

    Raises:
      jax_q4k.GGUFError: the file is malformed, has no such layer or several, or the layer's tensors
        are wrong. OSError: it cannot be read.
    """
    file = os.fsdecode(path)
    header = gguf.read_header(path)
    trunk = Config.from_metadata(header.metadata, file)
    key = f"{trunk.architecture}.nextn_predict_layers"
    count = header.metadata.get(key, 0)
    if not trunk.kind.predicts_further or count != 1:
        problem = f"is {count}; drafts need one such layer, in a qwen35 or qwen35moe model"
        raise GGUFError(file, key, problem)
    prefix = f"blk.{trunk.num_layers}."
    pattern = re.compile(re.escape(prefix) + r"nextn\.(\w+)\.weight")

    def select(header: gguf.Header) -> dict[str, gguf.TensorInfo]:
        return {n: info for n, info in header.tensors.items() if n.startswith(prefix)}

    read = gguf.read(path, select=select).tensors
    config = dataclasses.replace(trunk, num_layers=1, mixers=None)
    layer, weights = {}, {}
    for name, tensor in read.items():
        if match := pattern.fullmatch(name):
            weights[match[1]] = tensor
        else:
            layer[name.replace(prefix, _PREFIX, 1)] = tensor
    _check(config, layer, weights, file, prefix)
    held = {n: t if len(t.shape) > 1 else float_array(t) for n, t in layer.items()}
    norms = ("enorm", "hnorm", "shared_head_norm")
    weights = {n: float_array(t) if n in norms else t for n, t in weights.items()}
    merge = functools.partial(_drafter, config)
    return NextTokens(config, held | weights, merge, tokens)


def _drafter(config: Config, weights: Mapping[str, Any], trunk: Decoder) -> Drafter:
    """Builds a Drafter from `weights`, which may be tracers, and modules of the main model."""
    from ..network.build import build  # imports Flax, which only programs need
    from ..network.layers import AdaptedLinear, Linear, RMSNorm

    tensors = {n: t for n, t in weights.items() if n.startswith(_PREFIX)}
    tensors["output_norm.weight"] = weights.get("shared_head_norm", trunk.norm.weight[...])
    tensors["token_embd.weight"] = weights.get("embed_tokens", trunk.embedding.get_value())
    head, output = weights.get("shared_head_head"), trunk.output
    while isinstance(output, AdaptedLinear):  # drafts may ignore adapters
        output = output.base
    if head is None and output is not None:
        head = output.weight.get_value()
    if head is not None:
        tensors["output.weight"] = head
    decoder = build(config, tensors)
    eps = config.norm_eps
    norms = (RMSNorm(weights[name], eps) for name in ("enorm", "hnorm"))
    return Drafter(decoder, Linear(weights["eh_proj"]), *norms)


def _check(
    config: Config,
    layer: Mapping[str, Any],
    extra: Mapping[str, Any],
    file: str,
    prefix: str,
) -> None:
    """Raises GGUFError unless the tensors of layer and MTP are complete and have their shapes."""
    size, vocab = config.hidden_size, config.vocab_size
    expected: dict[str, tuple[int, ...]] = {"eh_proj": (size, 2 * size)}
    expected |= dict.fromkeys(("enorm", "hnorm", "shared_head_norm"), (size,))
    expected |= dict.fromkeys(("embed_tokens", "shared_head_head"), (vocab, size))
    for name, shape in expected.items():
        full = f"{prefix}nextn.{name}.weight"
        if name not in extra:
            if _OWN[name] is None:
                problem = f"is missing, expected with shape {shape}"
                raise GGUFError(file, f"tensor {full!r}", problem)
        elif tuple(extra[name].shape) != shape:
            problem = f"has shape {tuple(extra[name].shape)}, expected {shape}"
            raise GGUFError(file, f"tensor {full!r}", problem)
    if unknown := extra.keys() - expected.keys():
        name = f"{prefix}nextn.{min(unknown)}.weight"
        raise GGUFError(file, f"tensor {name!r}", "is not part of a multi-token-prediction layer")
    zeros = jax.ShapeDtypeStruct((vocab, size), jnp.float32)
    main = {"token_embd.weight": zeros, "output_norm.weight": jax.ShapeDtypeStruct((size,), "f4")}
    check_tensors(config, main | dict(layer), file)
