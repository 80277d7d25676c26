"""Loads tensors of a GGUF file, still packed: one at a time, or all as JAX arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import jax
import numpy as np

from .. import cpus
from ..arrays import QuantizedArray
from .header import Header, open_source
from .memory import Scratch
from .metadata import Metadata
from .parts import opened
from .source import Source
from .tensor_reader import TensorReader
from .tensors import PLAIN, TensorInfo, supported_types

THREADS = min(cpus.available(), 8)  # number of threads that read tensors
QUANTIZATION_VERSION = 2  # ggml's GGML_QNT_VERSION for the supported block layouts

#: Header -> the tensors to read: those of the header, or parts of them.
Select = Callable[[Header], Mapping[str, TensorInfo]]
#: Tensor -> its sharding; None means the default device. Packed tensors have axes (..., n, blocks).
ShardingOf = Callable[[TensorInfo], jax.sharding.Sharding | None]


@dataclasses.dataclass(frozen=True, repr=False)
class GGUFFile:
    """A loaded GGUF file: its header with metadata, and its tensors by name in file order."""

    header: Header
    tensors: dict[str, QuantizedArray | jax.Array]

    @property
    def metadata(self) -> Metadata:
        """The file's metadata by key.

        Scalars are int, float, bool or str; arrays are lists of str or NumPy arrays (n,).
        """
        return self.header.metadata

    def __repr__(self) -> str:
        architecture = self.metadata.get("general.architecture")
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        return f"GGUFFile({architecture}, {len(self.tensors)} tensors, {nbytes} bytes)"


class TensorFile:
    """An open GGUF file with a checked header; reads tensors into host memory one at a time.

    Is a context manager. The file, or every part of a split model, stays open until exit, so that
    the bytes read are those of the checked file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        select: Select | None = None,
        check_scales: bool = True,
    ) -> None:
        """Opens the file and checks its header; see `gguf.read` for the arguments.

        Raises GGUFError for a malformed file and for unsupported tensor types.
        """
        with contextlib.ExitStack() as stack:
            first = Source(stack.enter_context(open_source(path)), os.fsdecode(path))
            source, header = stack.enter_context(opened(first))
            self.header = _loadable(source, header, select)
            self._files = stack.pop_all()
        self._reader = TensorReader(source, self.header.data_start, check_scales)
        self._scratch = Scratch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str) -> QuantizedArray | np.ndarray:
        """Reads a tensor into host memory, with `gguf.read`'s checks.

        Returns a NumPy array, or a QuantizedArray with NumPy planes if the tensor is packed.
        """
        return self._reader.tensor(self.header.tensors[name])

    def read_rows(self, name: str, first: int, stop: int) -> QuantizedArray | np.ndarray:
        """Reads rows `first` to `stop` of a tensor, along its first axis, like `read`.

        The next call by the same thread overwrites the result.
        """
        info = self.header.tensors[name]
        self._scratch.reuse()
        reader = dataclasses.replace(self._reader, allocate=self._scratch.allocate)
        return reader.tensor(info.part(name, first, stop - first, 0))


def read(
    path: str | os.PathLike[str],
    *,
    select: Select | None = None,
    check: Callable[[Header], object] | None = None,
    check_scales: bool = True,
    progress: Callable[[int, int], object] | None = None,
    place: ShardingOf | None = None,
) -> GGUFFile:
    """Loads a GGUF file: packed tensors as QuantizedArray; F32, F16 and BF16 as jax.Array.

    For a model in several files, NAME-00001-of-00003.gguf, ..., `path` is the first; the others
    must be in the same folder.

    Shapes are row-major: a matrix is (n, k), and y = x @ w.T. Everything in the file is checked
    before it is used.

    Args:
      select: called with the header; returns the tensors to read, by name. `TensorInfo.part` makes
        a tensor from some rows of another.
      check: called with the header before any tensor is read; may raise.
      check_scales: rejects NaN or infinite block scales, and NaN or infinite elements of tensors
        that are not packed.
      progress: called after every tensor with (bytes of tensor data loaded, total bytes).
      place: called with each tensor's `TensorInfo`; returns the sharding to read the tensor into,
        shard by shard; None means the default device. A process reads only the shards of its own
        devices.

    Raises:
      GGUFError: the first problem in the file. OSError: the file cannot be read.
    """
    with open_source(path) as file:
        return load(
            Source(file, os.fsdecode(path)),
            select=select,
            check=check,
            check_scales=check_scales,
            progress=progress,
            place=place,
        )


def load(
    source: Source,
    *,
    select: Select | None = None,
    check: Callable[[Header], object] | None = None,
    check_scales: bool = True,
    progress: Callable[[int, int], object] | None = None,
    place: ShardingOf | None = None,
) -> GGUFFile:
    """Like `read`, but loads from an open source."""
    with opened(source) as (tensor_source, header):
        header = _loadable(tensor_source, header, select)
        if check is not None:
            check(header)
        return GGUFFile(header, _tensors(tensor_source, header, check_scales, progress, place))


def _tensors(
    source: Source,
    header: Header,
    check_scales: bool,
    progress: Callable[[int, int], object] | None,
    place: ShardingOf | None,
) -> dict[str, QuantizedArray | jax.Array]:
    infos = header.tensors.values()
    total, done = sum(info.nbytes for info in infos), 0
    reader = TensorReader(source, header.data_start, check_scales)
    tensors: dict[str, QuantizedArray | jax.Array] = {}

    def tensor_of(info: TensorInfo) -> QuantizedArray | jax.Array:
        sharding = None if place is None else place(info)
        return (
            jax.device_put(reader.tensor(info))
            if sharding is None
            else reader.placed(info, sharding)
        )

    if progress is not None:
        progress(done, total)
    with ThreadPoolExecutor(THREADS) as pool:
        for info, tensor in zip(infos, pool.map(tensor_of, infos), strict=True):
            tensors[info.name] = tensor
            done += info.nbytes
            if progress is not None:
                progress(done, total)
    return tensors


def _loadable(source: Source, header: Header, select: Select | None) -> Header:
    if select is not None:
        header = dataclasses.replace(header, tensors=dict(select(header)))
    _check_loadable(source, header)
    return header


def _check_loadable(source: Source, header: Header) -> None:
    """Raises GGUFError for unsupported tensor types and unknown block layouts."""
    for info in header.tensors.values():
        if not info.supported:
            problem = (
                f"{info.type.name} is not supported; supported: {', '.join(supported_types())}"
            )
            source.fail(f"tensor {info.name!r}: type", problem)
    version = header.metadata.get("general.quantization_version", QUANTIZATION_VERSION)
    packed = any(info.type.name not in PLAIN for info in header.tensors.values())
    if packed and not (isinstance(version, int) and version == QUANTIZATION_VERSION):
        source.fail(
            "general.quantization_version", f"must be {QUANTIZATION_VERSION}, not {version!r}"
        )
