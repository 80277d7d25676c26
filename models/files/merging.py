"""Merges LoRA adapters into the weights of a model file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_q4k import GGUFError, QuantizedArray, formats

from ..config import Config
from ..network.adapters import named_linears
from ..runner.adapters import Pair, check_scale
from .lora import adapters as lora_files
from .quantizing import recipes
from .quantizing.quantize import Importance, convert
from .rows import Parts, in_rows
from .sources import TensorSource, open_source

_ROWS = 1 << 10  # rows to which an adapter is added at a time

#: GGUF name of a matrix -> its adapters, each with a factor.
Adapters = Mapping[str, list[tuple[float, Pair]]]


def merge(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    lora: Any,
    type: str = recipes.COPY,
    importance: Importance | None = None,
    *,
    max_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Adds LoRA adapters to a model's weights from file to file, one tensor in memory at a time.

    W becomes W + scale * B A in float32. A packed matrix is decoded and quantized again, which adds
    error: merge into floats and quantize them if you can. Other tensors keep their bytes.

    Args:
      source: a GGUF file, the folder of a Hugging Face checkpoint, or one .safetensors file in it.
      path: the GGUF file to write; a failure leaves it unchanged.
      lora: a path, (path, scale), or a list of these; see `with_lora`.
      type: recipe for all tensors, as in `quantize_file`. "COPY" keeps each tensor's type.
      importance: weights of columns, as in `quantize`.
      max_bytes, progress: as in `quantize_file`.

    Returns:
      The files that were written.

    Raises:
      ValueError: as `quantize` and `with_lora` do. jax_q4k.GGUFError, jax_q4k.CheckpointError: a
        file is invalid, or an adapter does not belong to the model. OSError: a file cannot be read
        or written. TypeError: `lora` is no path.
    """
    recipes.check_name(type)
    specs = list(lora_files.adapter_specs(lora))
    with open_source(source) as opened:
        config = Config.from_metadata(opened.metadata, opened.name)
        adapters = _adapters(config, specs, opened.tensors)
        merged = _Merged(opened, adapters)
        return convert(merged, path, type, importance, max_bytes=max_bytes, progress=progress)


def _adapters(
    config: Config,
    specs: list[tuple[str | os.PathLike[str], float]],
    tensors: Mapping[str, Any],
) -> Adapters:
    """Reads adapters, which must be of matrices in `tensors`."""
    found: dict[str, list[tuple[float, Pair]]] = {}
    for path, scale in specs:
        check_scale(scale)
        pairs = lora_files.read(path, config, frozenset(named_linears(config)))
        check_scale(scale, pairs)
        for name, pair in pairs.items():
            if name not in tensors:
                tied = ": its output is tied to the embedding" if name == "output.weight" else ""
                problem = f"the model has no such matrix{tied}"
                raise GGUFError(os.fsdecode(path), f"adapter of {name!r}", problem)
            found.setdefault(name, []).append((scale * pair.scale, pair))
    return found


class _Merged(TensorSource):
    """A source whose adapted matrices are the sums of weights and adapters, in float32."""

    def __init__(self, source: TensorSource, adapters: Adapters) -> None:
        self._source, self._adapters = source, adapters

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._source.metadata

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.tensors

    @property
    def packed(self) -> Mapping[str, str]:
        return self._source.packed

    @property
    def types(self) -> Mapping[str, str]:
        return self._source.types

    def read(self, name: str) -> QuantizedArray | np.ndarray:
        tensor = self._source.read(name)
        if not (pairs := self._adapters.get(name)):
            return tensor
        if isinstance(tensor, QuantizedArray):
            tensor = formats.get(tensor.format).decode(tensor.planes)
        floats = np.array(tensor, np.float32)
        for factor, pair in pairs:
            a = pair.a.astype(np.float32)
            for at in range(0, len(floats), _ROWS):
                b = pair.b[at : at + _ROWS].astype(np.float32)
                floats[at : at + _ROWS] += np.float32(factor) * (b @ a)
        return floats

    def parts(self, name: str, rows: int) -> Parts:
        if name not in self._adapters:
            return self._source.parts(name, rows)
        return in_rows(self.read(name), rows)
