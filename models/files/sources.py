"""Reads a model's tensors from files one at a time, for quantization."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jax_q4k import QuantizedArray, gguf

from ..config.tensors import without_unused_layers
from . import legacy_layouts
from .checkpoints.checkpoint import CheckpointSource
from .gguf import described_config, used_tensors
from .rows import Parts, in_rows, ranges


class TensorSource(Protocol):
    """Protocol of model files whose tensors are read one at a time."""

    @property
    def name(self) -> str:
        """Name in error messages."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Complete GGUF metadata."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """GGUF name -> row-major shape."""

    @property
    def packed(self) -> Mapping[str, str]:
        """GGUF name -> type of the tensors that are already quantized, for warnings."""

    @property
    def types(self) -> Mapping[str, str]:
        """GGUF name -> ggml type name that stores what `read` returns without loss."""

    def read(self, name: str) -> QuantizedArray | np.ndarray:
        """Reads one tensor into host memory, packed or float32, float16 or bfloat16.

        Raises an error that names the tensor if it is not finite.
        """

    def parts(self, name: str, rows: int) -> Parts:
        """Yields functions that return at most `rows` rows of a tensor, like `read`.

        Several threads may call them.
        """


class GGUFSource(gguf.TensorFile):
    """A GGUF file as a `TensorSource`; raises GGUFError if it is malformed or not supported."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fsdecode(path)
        super().__init__(path, select=functools.partial(used_tensors, file=self.name))
        header = self.header
        config = described_config(header, self.name)
        described = legacy_layouts.described(config, header.tensors, self.name)
        metadata = without_unused_layers(header.metadata)
        self.metadata = legacy_layouts.current_metadata(config, metadata)
        self.tensors = {name: info.shape for name, info in described.items()}
        self.types = {name: info.type.name for name, info in described.items()}
        self.packed = {name: kind for name, kind in self.types.items() if kind not in gguf.PLAIN}
        self._fused = {
            part: (name, take)
            for name in header.tensors
            for part, take in legacy_layouts.parts_of(config, name).items()
        }

    def read(self, name: str) -> QuantizedArray | np.ndarray:
        """Reads one tensor, see `TensorSource.read`."""
        if name not in self._fused:
            return super().read(name)
        fused, take = self._fused[name]
        return jax.tree.map(np.asarray, take(super().read(fused)))

    def parts(self, name: str, rows: int) -> Parts:
        """Yields functions that read some rows, see `TensorSource.parts`."""
        if name in self._fused or self.header.tensors[name].row_axis:  # not of whole rows
            yield from in_rows(self.read(name), rows)
            return
        for start, stop in ranges(self.tensors[name], rows):
            yield start, functools.partial(self.read_rows, name, start, stop)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a checkpoint (a folder or a .safetensors file), not a GGUF file."""
    return os.path.isdir(path) or os.fsdecode(path).endswith(".safetensors")


def open_source(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[TensorSource]:
    """Opens a GGUF file, or a checkpoint by its folder or a .safetensors file, as TensorSource."""
    return CheckpointSource(path) if is_checkpoint(path) else GGUFSource(path)
