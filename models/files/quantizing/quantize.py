"""Quantizes models and model files."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import QuantizedArray, formats, gguf, quantizers

from ...config import Config
from ...config.tensors import check_tensors, expected_tensors
from ...network.build import build, named_tensors
from ...runner.model import Model
from ...support.warn import warn
from .. import fused, rope_divisors
from ..gguf import completed, describe
from ..sources import open_source
from . import recipes

_PIECE = 1 << 21  # weights decoded and quantized at a time; a few tens of megabytes

#: GGUF tensor name -> non-negative weights (k,) of its columns' squared errors. A stack of matrices
#: has one row per matrix, (matrices, k) or flat, or one for all, (k,).
Importance = Mapping[str, Any]


def quantize(model: Model, type: str, importance: Importance | None = None) -> Model:
    """Quantizes a model's matrices by llama.cpp's recipe for `type`.

    Norms and biases become float32. A matrix that already has its type keeps its bytes. A matrix of
    another packed type is decoded first, which adds its error to the new one: start from float
    weights if possible.

    Args:
      type: "Q4_K_M", "Q8_0" or another name of `recipes.RECIPES`.
      importance: GGUF tensor name -> non-negative weights (k,), or (experts, k) for experts, as
        returned by `read_imatrix`. Tensors without an entry are quantized without weights. The name
        of a fused tensor applies to all its parts.

    Returns:
      A new model with the same configuration and tokenizer; `general.file_type` in its metadata
      names `type`.

    Raises:
      ValueError: an unknown type; importance of an unknown tensor or a wrong shape; NaN, infinite
        or too large weights, with the tensor's name. jax_q4k.GGUFError, a ValueError: the decoder's
        tensors do not match its configuration. TypeError: not a Model. jax_q4k.UnavailableError:
        IQ1 to IQ3 without the C++ library.
    """
    recipe = recipes.get(type)
    if not isinstance(model, Model):
        raise TypeError(
            f"model is a {model.__class__.__name__}; it must be a Model (quantize_file takes paths)"
        )
    named = named_tensors(model)
    check_tensors(model.config, named, "model")
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    importance = _checked(importance, model.config, shapes)
    packed = {n: t.format for n, t in named.items() if isinstance(t, QuantizedArray)}
    tensors = {}
    for name, kind in _types(recipe, model.config, shapes, importance, packed).items():
        pieces = list(
            _pieces(name, jax.tree.map(np.asarray, named[name]), kind, importance.get(name))
        )
        tensors[name] = _array(pieces, kind, shapes[name])
    metadata = completed(model.metadata, recipes.file_type(type))
    return Model(build(model.config, tensors), model.tokenizer, metadata)


def quantize_file(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    type: str,
    importance: Importance | None = None,
    *,
    max_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Quantizes from file to file with one tensor in memory at a time, like `quantize`.

    Args:
      source: a GGUF file, the folder of a Hugging Face checkpoint, or one .safetensors file in it.
      path: the GGUF file to write; a failure leaves it unchanged.
      type, importance: as in `quantize`.
      max_bytes: limit per file, as in `save_gguf`.
      progress: called with (bytes written, total bytes).

    Returns:
      The files that were written.

    Raises:
      ValueError: as in `quantize`. jax_q4k.GGUFError, jax_q4k.CheckpointError: the source is
        invalid; everything except the values of weights is checked before anything is written.
        OSError: a file cannot be read or written.
    """
    recipe = recipes.get(type)
    with open_source(source) as opened:
        shapes = opened.tensors
        described = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
        }
        config, _ = describe(opened.metadata, described, opened.name)
        importance = _checked(importance, config, shapes)

        def pieces(name: str, kind: str) -> Iterator[np.ndarray]:
            return _pieces(name, opened.read(name), kind, importance.get(name))

        tensors = {
            name: gguf.TensorPieces(kind, shapes[name], functools.partial(pieces, name, kind))
            for name, kind in _types(recipe, config, shapes, importance, opened.packed).items()
        }
        tensors = fused.joined(config, tensors, os.fsdecode(path))
        metadata, tensors = rope_divisors.in_metadata(config, opened.metadata, tensors)
        metadata = completed(metadata, recipes.file_type(type))
        return gguf.write(path, metadata, tensors, max_bytes=max_bytes, progress=progress)


def _types(
    recipe: recipes.Recipe,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    importance: Importance,
    packed: Mapping[str, str],
) -> dict[str, str]:
    """Returns tensor name -> ggml type name, the same for all parts of a fused tensor.

    Warns of tensors that cannot have the recipe's type, and of tensors that are already packed.
    packed: name -> type of the latter.
    """
    has_importance = bool(importance)

    def choose(in_files: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        args = recipe, config, in_files
        types = recipes.tensor_types(*args, importance=has_importance)
        _warn_of_fallbacks(recipes.wanted_types(*args, importance=has_importance), types)
        return types

    types = fused.types_by_file(config, shapes, choose)
    _warn_of_packed(packed, types)
    if has_importance:
        _warn_of_unweighted(config, types, importance)
    return types


def _warn_of_fallbacks(wanted: Mapping[str, str], types: Mapping[str, str]) -> None:
    """Warns of tensors that get another type than the recipe's, like llama-quantize."""
    pairs = Counter((kind, types[name]) for name, kind in wanted.items() if types[name] != kind)
    if pairs:
        shown = ", ".join(f"{n} {kind} -> {got}" for (kind, got), n in sorted(pairs.items()))
        warn(
            f"{sum(pairs.values())} of {len(types)} tensors have rows that are not a multiple of "
            f"their type's block, and get another type: {shown}"
        )


def _warn_of_unweighted(config: Config, types: Mapping[str, str], importance: Importance) -> None:
    """Warns of matrices without an entry in the importance matrix, like llama-quantize."""
    expected = expected_tensors(config)
    matrices = [
        name
        for name, kind in types.items()
        if kind not in gguf.PLAIN and not expected[name].entry.table
    ]
    if missing := [name for name in matrices if name not in importance]:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        message = f"importance has no weights for {len(missing)} of {len(matrices)} matrices"
        warn(f"{message}, which are quantized without: {shown}")


def _warn_of_packed(packed: Mapping[str, str], types: Mapping[str, str]) -> None:
    again = Counter(
        kind
        for name, kind in packed.items()
        if types.get(name, kind) not in (kind, *gguf.PLAIN)  # floats hold what is packed
    )
    if again:
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(again.items()))
        problem = f"{sum(again.values())} tensors are already quantized ({shown})"
        advice = "quantizing them again adds error; start from a float model if there is one"
        warn(f"{problem}: {advice}")


def _pieces(
    name: str, tensor: QuantizedArray | np.ndarray, kind: str, importance: Any
) -> Iterator[np.ndarray]:
    """Yields the bytes of a tensor in type `kind`, some rows at a time, as NumPy arrays."""
    if isinstance(tensor, QuantizedArray) and tensor.format == kind:
        yield from gguf.TensorPieces.of(name, tensor).pieces()
        return
    of_each = np.ndim(importance) > 1
    for start, rows in _decoded(tensor, one_by_one=of_each):
        weights = importance[start // math.prod(tensor.shape[1:-1])] if of_each else importance
        try:
            yield (
                _floats(rows, kind)
                if kind in gguf.PLAIN
                else quantizers.quantize(rows, kind, weights)
            )
        except ValueError as error:
            raise ValueError(f"tensor {name!r}, rows from {start} on: {error}") from error


def _decoded(
    tensor: QuantizedArray | np.ndarray, *, one_by_one: bool
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, floats (rows, k)) of a matrix or stack; a vector counts as one row.

    one_by_one: never yields rows of several experts together.
    """
    of_one = math.prod(tensor.shape[1:-1])  # rows of an expert
    step = 1 if one_by_one else max(1, _PIECE // (of_one * tensor.shape[-1]))
    for start in range(0, tensor.shape[0] if tensor.ndim > 1 else 1, step):
        part = tensor[start : start + step] if tensor.ndim > 1 else tensor
        rows = (
            formats.get(part.format).decode(part.planes)
            if isinstance(part, QuantizedArray)
            else part
        )
        yield start * of_one, rows.reshape(-1, tensor.shape[-1])


def _floats(rows: np.ndarray, kind: str) -> np.ndarray:
    dtype = gguf.PLAIN[kind].dtype
    with np.errstate(over="ignore"):  # infinities are reported below
        values = rows.astype(dtype)
    bad = np.argwhere(~np.isfinite(values))
    if bad.size:
        row, column = bad[0]
        limit = jnp.finfo(dtype).max
        raise ValueError(
            f"w[{row}, {column}] is {rows[row, column]}; {kind} takes finite values up to {limit:g}"
        )
    return values


def _array(pieces: list[Any], kind: str, shape: tuple[int, ...]) -> QuantizedArray | jax.Array:
    data = np.concatenate(
        [np.frombuffer(np.ascontiguousarray(piece), np.uint8) for piece in pieces]
    )
    if kind in formats.names():
        return QuantizedArray.from_gguf_bytes(data, kind, shape)
    return jax.device_put(data.view(gguf.PLAIN[kind].dtype).reshape(shape))


def _checked(
    importance: Importance | None, config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Checks importance matrices; returns tensor name -> weights (k,), or (matrices, k)."""
    checked: dict[str, np.ndarray] = {}
    weights_of = importance or {}
    for name, weights in weights_of.items():
        parts = [part for part in fused.parts_of(config, name) if part in shapes]
        if any(part in weights_of and part != name for part in parts):
            parts = []
        if not parts and name not in shapes:
            raise ValueError(f"importance names {name!r}, which is not a tensor of the model")
        for part in parts or [name]:
            checked[part] = _of_matrices(name, np.asarray(weights), shapes[part])
    return checked


def _of_matrices(name: str, weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reshapes a tensor's importance weights to (k,), or (matrices, k) for a stack."""
    k = shape[-1]
    of_each = (shape[0], k) if len(shape) == 3 else (k,)
    if weights.shape == (math.prod(of_each),):
        return weights.reshape(of_each)
    if weights.shape not in ((k,), of_each):
        expected = " or ".join(str(allowed) for allowed in dict.fromkeys((of_each, (k,))))
        raise ValueError(f"importance of {name!r} has shape {weights.shape}; it must be {expected}")
    return weights
