"""Quantizes models and model files."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import QuantizedArray, formats, gguf, quantizers

from ...config import Config
from ...config.fused_names import parts_of
from ...config.tensors import check_tensors
from ...runner.model import Model
from ...support.warn import warn
from .. import fused, rope_divisors
from ..gguf import completed, describe, file_type_of
from ..llama_cpp import warn_of_differences
from ..rows import Parts, in_rows
from ..sources import TensorSource, open_source
from . import recipes
from .plan import Choices, QuantizationPlan, Types, choose_types, copied_types

_PIECE = 1 << 20  # weights that a thread reads and quantizes at a time; a few megabytes

#: GGUF tensor name -> non-negative weights (k,) of its columns' squared errors. A stack of matrices
#: has one row per matrix, (matrices, k) or flat, or one for all, (k,).
Importance = Mapping[str, Any]


def quantize(
    model: Model,
    type: str,
    importance: Importance | None = None,
    *,
    types: Types | None = None,
) -> Model:
    """Quantizes a model's matrices by llama.cpp's recipe for `type`.

    Norms and biases become float32. A matrix that already has its type keeps its bytes. A matrix of
    another packed type is decoded first, which adds its error to the new one: start from float
    weights if possible.

    Args:
      type: "Q4_K_M", "Q8_0" or another name of `recipes.RECIPES`.
      importance: GGUF tensor name -> non-negative weights (k,), or (experts, k) for experts, as
        returned by `read_imatrix`. Tensors without an entry are quantized without weights, and
        entries of other tensors are ignored, both with a warning. The name of a fused tensor
        applies to all its parts.
      types: regular expression -> ggml type, such as {"attn_v": "Q8_0", r"^output\\.": "Q4_K"}, for
        matrices in whose name it is found; the first one counts. A type whose block does not
        divide the rows is replaced, as in the recipe.

    Returns:
      A new model with the same configuration and tokenizer; `general.file_type` in its metadata
      names `type`.

    Raises:
      ValueError: an unknown type; an expression in `types` that no name has; importance of unknown
        tensors only, or of a wrong shape; NaN, infinite or too large weights, with the tensor's
        name. jax_q4k.GGUFError, a ValueError: the decoder's tensors do not match its configuration.
        TypeError: not a Model. jax_q4k.UnavailableError: IQ1 to IQ3 without the C++ library.
    """
    # imports Flax, which files do not need
    from ...network.build import build, named_tensors, task_arrays

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
    args = recipe, Choices(types), model.config, shapes, importance, packed
    for name, kind in choose_types(*args).items():
        shape, weights = shapes[name], importance.get(name)
        tensor = jax.tree.map(np.asarray, named[name])
        parts = in_rows(tensor, _rows_of_piece(shape, weights))
        pieces = [make() for make in _pieces(name, shape, parts, kind, weights)]
        tensors[name] = _array(pieces, kind, shape)
    metadata = completed(model.metadata, recipes.file_type(type))
    decoder = build(model.config, tensors, tasks=task_arrays(model.decoder()))
    return Model(decoder, model.tokenizer, metadata, tasks=model.tasks)


def quantize_file(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    type: str,
    importance: Importance | None = None,
    *,
    types: Types | None = None,
    max_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Quantizes from file to file like `quantize`; reads, quantizes and writes at the same time.

    Some rows of a GGUF file are in memory at a time, or up to two tensors of a checkpoint.

    Args:
      source: a GGUF file, the folder of a Hugging Face checkpoint, or one .safetensors file in it.
      path: the GGUF file to write; a failure leaves it unchanged.
      type: as in `quantize`, or "COPY" for each tensor's own type, of a checkpoint's packed weights
        the type of what they are decoded to.
      importance, types: as in `quantize`.
      max_bytes: limit per file, as in `save_gguf`.
      progress: called with (bytes written, total bytes).

    Returns:
      The files that were written.

    Raises:
      ValueError: as in `quantize`. jax_q4k.GGUFError, jax_q4k.CheckpointError: the source is
        invalid; everything except the values of weights is checked before anything is written.
        OSError: a file cannot be read or written.
    """
    recipes.check_name(type)  # raises before the source is read
    choices = Choices(types)
    with open_source(source) as opened:
        return convert(
            opened, path, type, importance, choices, max_bytes=max_bytes, progress=progress
        )


def convert(
    opened: TensorSource,
    path: str | os.PathLike[str],
    type: str,
    importance: Importance | None = None,
    choices: Choices | None = None,
    *,
    max_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Converts an open source like `quantize_file`."""
    choices = choices or Choices()
    metadata, tensors = _described(opened, type, choices, importance, os.fsdecode(path))
    if type == recipes.COPY:
        number = file_type_of(metadata, tensors.values())
    else:
        number = recipes.file_type(type)
    metadata = completed(metadata, number)
    return gguf.write(path, metadata, tensors, max_bytes=max_bytes, progress=progress)


def quantization_plan(
    source: str | os.PathLike[str],
    type: str,
    importance: Importance | None = None,
    *,
    types: Types | None = None,
) -> QuantizationPlan:
    """Returns what `quantize_file` would write, without reading the weights.

    Takes the arguments of `quantize_file` and raises its errors.
    """
    recipes.check_name(type)
    choices = Choices(types)
    with open_source(source) as opened:
        _, tensors = _described(opened, type, choices, importance, opened.name)
    return QuantizationPlan(
        {name: tensor.type for name, tensor in tensors.items()},
        {name: tensor.shape for name, tensor in tensors.items()},
    )


def _described(
    opened: TensorSource,
    type: str,
    choices: Choices,
    importance: Importance | None,
    file: str,
) -> tuple[Mapping[str, Any], dict[str, gguf.TensorPieces]]:
    """Returns the metadata and the tensors of the file to write."""
    shapes = opened.tensors
    described = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    config, _ = describe(opened.metadata, described, opened.name)
    weights = _checked(importance, config, shapes)

    def pieces(name: str, kind: str) -> Iterator[Callable[[], Any]]:
        parts = opened.parts(name, _rows_of_piece(shapes[name], weights.get(name)))
        return _pieces(name, shapes[name], parts, kind, weights.get(name), threads=1)

    if type == recipes.COPY:
        kinds = copied_types(choices, shapes, opened.types, opened.packed)
    else:
        args = recipes.get(type), choices, config, shapes, weights, opened.packed
        kinds = choose_types(*args)
    tensors = {
        name: gguf.TensorPieces(kind, shapes[name], functools.partial(pieces, name, kind))
        for name, kind in kinds.items()
    }
    tensors = fused.joined(config, tensors, file)
    metadata, tensors = rope_divisors.in_metadata(config, opened.metadata, tensors)
    warn_of_differences(file, config, metadata, tensors)
    return metadata, tensors


def _rows_of_piece(shape: tuple[int, ...], importance: Any) -> int:
    """Returns how many rows, or matrices of a stack, to process at a time.

    It is one matrix if each has an importance of its own.
    """
    return 1 if np.ndim(importance) > 1 else max(1, _PIECE // math.prod(shape[1:]))


def _pieces(
    name: str,
    shape: tuple[int, ...],
    parts: Parts,
    kind: str,
    importance: Any,
    *,
    threads: int | None = None,
) -> Iterator[Callable[[], Any]]:
    """Yields functions that return the parts of a tensor as bytes or arrays of type `kind`."""
    matrix_rows = math.prod(shape[1:-1])
    for start, read in parts:
        weights = importance[start] if np.ndim(importance) > 1 else importance
        yield functools.partial(_piece, name, start * matrix_rows, read, kind, weights, threads)


def _piece(
    name: str,
    start: int,
    read: Callable[[], QuantizedArray | np.ndarray],
    kind: str,
    importance: Any,
    threads: int | None,
) -> Any:
    part = read()
    if isinstance(part, QuantizedArray):
        if part.format == kind:
            return part.to_gguf_bytes()
        part = formats.get(part.format).decode(part.planes)
    rows = part.reshape(-1, part.shape[-1])
    try:
        if kind in gguf.PLAIN:
            return quantizers.convert(rows, kind, threads=threads)
        return quantizers.quantize(rows, kind, importance, threads=threads)
    except ValueError as error:
        raise ValueError(f"tensor {name!r}, rows from {start} on: {error}") from error


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
    """Checks importance matrices; returns tensor name -> weights (k,), or (matrices, k).

    Ignores those of other models' tensors with a warning; raises ValueError if all are.
    """
    checked: dict[str, np.ndarray] = {}
    weights_of, foreign = importance or {}, []
    for name, weights in weights_of.items():
        parts = [part for part in parts_of(config, name) if part in shapes]
        if any(part in weights_of and part != name for part in parts):
            parts = []
        if not parts and name not in shapes:
            foreign.append(name)
            continue
        for part in parts or [name]:
            checked[part] = _of_matrices(name, np.asarray(weights), shapes[part])
    if foreign:
        problem = f"importance names {foreign[0]!r}, which is not a tensor of the model"
        if not checked:
            raise ValueError(problem)
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        warn(
            f"{len(foreign)} of {len(weights_of)} entries of importance are ignored, whose "
            f"tensors the model does not have: {shown}"
        )
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
