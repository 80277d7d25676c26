"""Loads models from GGUF files, and saves them."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import LlamaFileType
from jax.sharding import Mesh

from jax_q4k import GGUFError, QuantizedArray, gguf
from jax_q4k.collecting import gc_throttled

from .. import tokenizer
from ..config import Config, metadata_keys, other_files
from ..config.rope import DIVISORS
from ..config.rope_fields import MIN_DIVISOR
from ..config.tensors import (
    Expected,
    check_tensors,
    expected_tensors,
    float_array,
    unused_tensors,
    without_unused_layers,
)
from ..network.lazy import lazy_decoder
from ..runner.model import Model
from ..sharding.placement import Placement
from ..sharding.plan import Rules, plan_sharding
from ..support.warn import warn, warn_of_keys
from ..tokenizer import Tokenizer
from . import fused, legacy_layouts, rope_divisors
from .llama_cpp import warn_of_differences

_FLOAT_FILES = (LlamaFileType.ALL_F32, LlamaFileType.MOSTLY_F16, LlamaFileType.MOSTLY_BF16)


@gc_throttled()
def from_gguf(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
    check_scales: bool = True,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Model:
    """Loads a model of one of the `architectures`; weights stay packed as in the file.

    Metadata and tensor shapes are checked before any tensor is read. Tensors that text generation
    does not use are skipped with a warning: vision, audio, multi-token prediction.

    Args:
      path: a GGUF file, or the first of several, NAME-00001-of-00003.gguf.
      progress: called with (bytes done, total bytes) while tensors are read.
      check_scales: reject NaN and infinite block scales.
      mesh, rules: sharding over devices, as in `load`.

    Returns:
      The model; its tokenizer is None if the file has no vocabulary.

    Raises:
      jax_q4k.GGUFError: the file is malformed or not supported. OSError: it cannot be read.
    """
    file = os.fsdecode(path)
    described: list[tuple[Config, Tokenizer | None]] = []
    placements: list[Placement] = []
    held: list[str] = []

    def select(header: gguf.Header) -> dict[str, gguf.TensorInfo]:
        held.extend(header.tensors)
        return used_tensors(header, file)

    def check(header: gguf.Header) -> None:
        config = described_config(header, file)
        tensors = legacy_layouts.described(config, header.tensors, file)
        described.append(describe(header.metadata, tensors, file))
        if mesh is not None:
            placements.append(plan_sharding(described[0][0], tensors, mesh, rules))

    loaded = gguf.read(
        path,
        select=select,
        check=check,
        check_scales=check_scales,
        progress=progress,
        place=None if mesh is None else lambda info: placements[0].tensors.get(info.name),
    )
    config, text_tokenizer = described[0]
    placement = placements[0] if placements else None
    tensors = legacy_layouts.current_tensors(config, loaded.tensors)
    if placement is not None:
        new = tensors.keys() - loaded.tensors.keys()
        tensors |= {name: jax.device_put(tensors[name], placement.tensors[name]) for name in new}
    tensors |= rope_divisors.of_metadata(config, loaded.metadata, file)
    for name in DIVISORS:
        divisors = tensors.get(name)
        if divisors is not None and not (float_array(divisors) > MIN_DIVISOR).all():
            raise GGUFError(file, f"tensor {name!r}", f"must hold numbers above {MIN_DIVISOR}")
    metadata = legacy_layouts.current_metadata(config, without_unused_layers(loaded.metadata))
    model = Model(lazy_decoder(config, tensors), text_tokenizer, metadata, placement)
    model.fused = fused.held_in(config, held)
    return model


def described_config(header: gguf.Header, file: str) -> Config:
    """Returns the Config that a header's metadata describes, and warns of unknown keys.

    Raises:
      GGUFError: the file holds no language model, or one that is not supported.
    """
    if not header.tensors and other_files.kind_of(header.metadata) is None:
        content = "only a vocabulary" if "tokenizer.ggml.model" in header.metadata else "nothing"
        raise GGUFError(file, "file", f"holds {content}: it has no weights")
    config = Config.from_metadata(header.metadata, file)
    warn_of_keys(file, metadata_keys.unknown(header.metadata, config.architecture))
    return config


def used_tensors(header: gguf.Header, file: str) -> dict[str, gguf.TensorInfo]:
    """Returns the tensors that text generation uses, with fused ones split; warns of others."""
    unused = frozenset(unused_tensors(header.metadata, header.tensors))
    if unused:
        kinds = sorted({re.sub(r"\d+", "N", name.rpartition(".")[0]) for name in unused})
        shown = ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
        message = f"{len(unused)} tensors are skipped, which text generation does not use: {shown}"
        if any(".nextn." in name for name in unused):
            message += "; the multi-token-prediction layer is read only for drafts"
        warn(message)
    config = Config.from_metadata(header.metadata, file)
    expected = expected_tensors(config)
    used = {
        name: _without_ones(info, config, expected)
        for name, info in header.tensors.items()
        if name not in unused
    }
    return fused.split(config, used, file)


def _without_ones(
    info: gguf.TensorInfo, config: Config, expected: Mapping[str, Expected]
) -> gguf.TensorInfo:
    """Returns a description with the expected number of axes.

    In ggml, axes of length 1 before the others have no meaning; a file may add or lack them.
    """
    parts = [part for part in (info.name, *fused.parts_of(config, info.name)) if part in expected]
    axes, shape = len(expected[parts[0]].shape) if parts else 2, info.shape
    while len(shape) > axes and shape[0] == 1:
        shape = shape[1:]
    full = (1,) * (axes - len(shape)) + shape
    if info.name in expected and full == expected[info.name].shape:
        shape = full
    return dataclasses.replace(info, shape=shape)


def describe(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], file: str
) -> tuple[Config, Tokenizer | None]:
    """Returns the Config and the tokenizer, None if there is none, after checking metadata.

    Also checks that metadata and tensors are consistent.

    tensors: name -> anything with `.shape`. Raises GGUFError that names the invalid key or tensor.
    """
    config = Config.from_metadata(metadata, file)
    check_tensors(config, tensors, file)
    if not tokenizer.has_tokenizer(metadata):
        return config, None
    text_tokenizer = tokenizer.from_metadata(metadata, file)
    if text_tokenizer.vocab_size != config.vocab_size:
        tokens = text_tokenizer.vocab_size
        problem = f"has {tokens} tokens, but the model's vocab_size is {config.vocab_size}"
        raise GGUFError(file, "tokenizer.ggml.tokens", problem)
    return config, text_tokenizer


def save_gguf(
    model: Model,
    path: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Writes a model for llama.cpp and `from_gguf`; the inverse of `from_gguf`.

    Packed weights keep their bytes, float weights their type (float32, float16 or bfloat16); norms
    and biases are float32. The metadata is the model's. Missing `general.file_type`,
    `general.quantization_version` and `tokenizer.ggml.model` are added, and so are the keys of a
    checkpoint folder's tokenizer. A warning names tokenizer settings that GGUF has no key for and
    most files omit. A failure leaves no partial file.

    Args:
      max_bytes: limit of tensor data per file. For a `path` of NAME.gguf a larger model is split
        into NAME-00001-of-00003.gguf and so on; `load` takes the first of them.
      progress: called with (bytes of tensor data written, total bytes).

    Returns:
      The files that were written.

    Raises:
      ValueError: `model.metadata` describes another decoder, or lacks the tokenizer's keys; a float
        weight is NaN or infinite; `max_bytes` is not a positive integer, or results in more files
        than `load` accepts. jax_q4k.GGUFError, a ValueError: the decoder's tensors do not match its
        configuration. jax_q4k.CheckpointError, a ValueError: GGUF cannot express a checkpoint
        folder's tokenizer.
        TypeError: not a Model, or weights of another type. OSError: the file cannot be written.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; it must be a Model")
    from ..network.build import named_tensors

    metadata = with_tokenizer(model.metadata, model.tokenizer)
    _check_metadata(model, metadata)
    if model.tasks:
        warn_of_tasks(os.fsdecode(path), model.tasks)
    tensors = named_tensors(model)
    check_tensors(model.config, tensors, os.fsdecode(path))
    for name, tensor in tensors.items():
        if not isinstance(tensor, QuantizedArray) and not jnp.isfinite(tensor).all():
            raise ValueError(f"tensor {name!r} holds NaN or infinite weights")
    pieces = {
        name: gguf.TensorPieces.of(name, _vectors_in_float32(tensor))
        for name, tensor in tensors.items()
    }
    pieces = fused.joined(model.config, pieces, os.fsdecode(path))
    metadata, pieces = rope_divisors.in_metadata(model.config, metadata, pieces)
    warn_of_differences(os.fsdecode(path), model.config, metadata, pieces)
    return gguf.write(
        path,
        completed(metadata, file_type_of(metadata, pieces.values())),
        pieces,
        max_bytes=max_bytes,
        progress=progress,
    )


def warn_of_tasks(name: str, tasks: Iterable[str]) -> None:
    """Warns that a GGUF file lacks the adapters of these tasks."""
    listed = ", ".join(tasks)
    warn(f"{name}: a GGUF file holds no adapters of tasks; only the folder has {listed:.200}")


def _vectors_in_float32(tensor: Any) -> Any:
    return tensor if tensor.ndim > 1 else np.asarray(tensor, np.float32)


def with_tokenizer(metadata: Mapping[str, Any], text_tokenizer: Tokenizer | None) -> gguf.Metadata:
    """Returns metadata with the keys of a checkpoint folder's tokenizer added.

    Metadata of GGUF files already has these keys.

    Raises CheckpointError for a tokenizer that GGUF cannot express.
    """
    words = {} if text_tokenizer is None else text_tokenizer.gguf_metadata()
    if needed := words.get("general.name"):  # the folder's own name may lack it
        found = str(metadata.get("general.name", "model"))
        words["general.name"] = found if needed in found.lower() else f"{found} ({needed})"
    full = gguf.Metadata(metadata)
    full.update(words)
    return full


def completed(metadata: Mapping[str, Any], file_type: int) -> gguf.Metadata:
    """Returns metadata with missing keys added that every file needs."""
    full = gguf.Metadata(metadata)
    full["general.file_type"] = file_type
    full.setdefault("general.quantization_version", gguf.QUANTIZATION_VERSION)
    full.setdefault("tokenizer.ggml.model", tokenizer.NO_VOCABULARY[0])
    return full


def _check_metadata(model: Model, metadata: Mapping[str, Any]) -> None:
    described = Config.from_metadata(metadata, "model.metadata")
    for field in dataclasses.fields(Config):
        said, is_ = getattr(described, field.name), getattr(model.config, field.name)
        if said != is_:
            raise ValueError(
                f"model.metadata describes {field.name}={said!r}, but the decoder has {is_!r}"
            )
    if model.tokenizer is not None and not tokenizer.has_tokenizer(metadata):
        raise ValueError(
            "model.metadata holds no tokenizer.ggml.* keys, but the model has a tokenizer"
        )


def file_type_of(metadata: Mapping[str, Any], tensors: Iterable[gguf.TensorPieces]) -> int:
    """Returns `general.file_type`, from the type of most weights.

    Packed models keep the value in the metadata, which names the recipe, unless it is a float type.
    """
    weights: collections.Counter[str] = collections.Counter()
    for tensor in tensors:
        weights[tensor.type] += math.prod(tensor.shape)
    [(common, _)] = weights.most_common(1)
    said = metadata.get("general.file_type")
    if common not in gguf.PLAIN and said is not None and said not in _FLOAT_FILES:
        return said
    names = (f"ALL_{common}", *(f"MOSTLY_{common}{end}" for end in ("", "_M", "_MOE")))
    return next(int(LlamaFileType[name]) for name in names if name in LlamaFileType.__members__)
