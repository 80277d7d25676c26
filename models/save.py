"""Models -> GGUF files."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf.constants import LlamaFileType

from jax_q4k import QuantizedArray, gguf

from . import tokenizer
from .config import Config
from .load import check_tensors, named_tensors
from .model import Model

_FLOAT_FILES = (LlamaFileType.ALL_F32, LlamaFileType.MOSTLY_F16, LlamaFileType.MOSTLY_BF16)


def save_gguf(
    model: Model,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes a model that llama.cpp and `from_gguf` load: the inverse of `from_gguf`.

    Packed weights keep their bytes, float ones their type (float32, float16 or bfloat16); norms and
    biases are float32. The metadata is the model's, with `general.file_type`,
    `general.quantization_version` and `tokenizer.ggml.model` added where they are missing. A
    failure leaves no half-written file.

    Args:
      progress: called with (bytes of tensor data written, bytes in all).

    Raises:
      ValueError: `model.metadata` describes another decoder, or lacks the tokenizer's keys; a float
        weight is NaN or infinite. jax_q4k.GGUFError, a ValueError: the decoder's tensors are not
        those of its configuration.
        TypeError: no Model, or weights of another type. OSError: the file cannot be written.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; it must be a Model")
    _check_metadata(model)
    tensors = named_tensors(model)
    check_tensors(model.config, tensors, os.fsdecode(path))
    for name, tensor in tensors.items():
        if not isinstance(tensor, QuantizedArray) and not jnp.isfinite(tensor).all():
            raise ValueError(f"tensor {name!r} holds NaN or infinite weights")
    pieces = {
        name: gguf.TensorPieces.of(name, _vectors_in_float32(tensor))
        for name, tensor in tensors.items()
    }
    gguf.write(
        path,
        completed(model.metadata, _file_type(model.metadata, pieces.values())),
        pieces,
        progress=progress,
    )


def _vectors_in_float32(tensor: Any) -> Any:
    return tensor if tensor.ndim > 1 else np.asarray(tensor, np.float32)


def completed(metadata: Mapping[str, Any], file_type: int) -> gguf.Metadata:
    """Metadata with what every file has to say."""
    full = gguf.Metadata(metadata)
    full["general.file_type"] = file_type
    full.setdefault("general.quantization_version", gguf.QUANTIZATION_VERSION)
    full.setdefault("tokenizer.ggml.model", tokenizer.NO_VOCABULARY[0])
    return full


def _check_metadata(model: Model) -> None:
    described = Config.from_metadata(model.metadata, "model.metadata")
    for field in dataclasses.fields(Config):
        said, is_ = getattr(described, field.name), getattr(model.config, field.name)
        if said != is_:
            raise ValueError(
                f"model.metadata describes {field.name}={said!r}, but the decoder has {is_!r}"
            )
    if model.tokenizer is not None and not tokenizer.has_tokenizer(model.metadata):
        raise ValueError(
            "model.metadata holds no tokenizer.ggml.* keys, but the model has a tokenizer"
        )


def _file_type(metadata: Mapping[str, Any], tensors: Iterable[gguf.TensorPieces]) -> int:
    """`general.file_type`: the type of most weights; of packed ones what the metadata says, which
    knows recipes.
    """
    weights: collections.Counter[str] = collections.Counter()
    for tensor in tensors:
        weights[tensor.type] += math.prod(tensor.shape)
    [(most, _)] = weights.most_common(1)
    said = metadata.get("general.file_type")
    if most not in gguf.PLAIN and said is not None and said not in _FLOAT_FILES:
        return said
    names = (f"ALL_{most}", f"MOSTLY_{most}", f"MOSTLY_{most}_M")
    return next(int(LlamaFileType[name]) for name in names if name in LlamaFileType.__members__)
