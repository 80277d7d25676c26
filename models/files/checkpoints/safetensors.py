"""Reads tensors of safetensors files one at a time.

The safetensors package checks that every tensor lies inside its file and that none overlap. Files
are read instead of memory-mapped, because mapped pages count as resident memory, and a mapped file
that shrinks kills the process.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from jax_q4k import CheckpointError, gguf

from ...support.json_fields import JSONFields

#: Supported types; safetensors and ggml use the same names.
TYPES = gguf.PLAIN
PACKED = "U8"  # blocks and scales of packed weights
MAX_INDEX = 1 << 24  # bytes; an index has one line per tensor
_MAX_ELEMENTS = np.iinfo(np.intp).max // 8  # NumPy's limit, which ignores axes of size 0
_CHUNK = 1 << 20  # elements checked at a time
_COMPARED = 1 << 24  # elements compared at a time

T = TypeVar("T")


class Stored(NamedTuple):
    """Description of a stored tensor: its file, dtype and shape."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file; only for PACKED and TYPES."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy dtype; only for PACKED and TYPES."""
        return np.dtype(np.uint8 if self.dtype == PACKED else TYPES[self.dtype].dtype)


class Weights:
    """Reader of the tensors of one file, or of all files of an index.

    `stored` maps tensor names to Stored.
    """

    def __init__(self, path: Path) -> None:
        """Lists the tensors of a .safetensors file, or of a folder with one file or an index."""
        self._open: tuple[Path, Any] | None = None
        self._stack = contextlib.ExitStack()
        self.stored: dict[str, Stored] = {}
        self._prefixes: dict[Path, str] = {}
        index = path / "model.safetensors.index.json"
        if path.is_file() or (path / "model.safetensors").exists():
            self._list(path if path.is_file() else path / "model.safetensors")
        elif index.exists():
            self._list_shards(index)
        else:
            problem = "is missing, and so is model.safetensors.index.json"
            others = "other kinds of weights are not supported"
            raise CheckpointError(str(path), "model.safetensors", f"{problem}; {others}")

    def add(self, file: Path, prefix: str) -> None:
        """Lists the tensors of a further file, with a prefix before their names."""
        self._prefixes[file] = prefix
        self._list(file)

    def close(self) -> None:
        """Closes the last file."""
        self._open = None
        self._stack.close()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads a tensor, or the rows of a slice with step 1.

        The dtype must be in TYPES or PACKED. Raises CheckpointError if a value is NaN or infinite.
        """
        stored = self.stored[name]
        file, shape = str(stored.file), stored.shape
        if rows is None or not shape:
            first, complete, wanted = 0, True, shape
        else:
            first, last, _ = rows.indices(shape[0])
            part, wanted = slice(first, last), (last - first, *shape[1:])
            complete = wanted == shape

        def values_of() -> np.ndarray:
            handle = self._handle(stored.file)
            return handle.get_tensor(inner) if complete else handle.get_slice(inner)[part]

        inner = name.removeprefix(self._prefixes.get(stored.file, ""))
        values = _checked(stored.file, f"tensor {name!r}", values_of)
        if values.shape != wanted or values.dtype != stored.numpy_dtype:
            raise CheckpointError(file, f"tensor {name!r}", "changed while the file was read")
        if stored.dtype == PACKED:
            return values
        flat, before = values.reshape(-1), first * math.prod(shape[1:])
        for start in range(0, flat.size, _CHUNK):
            finite = np.isfinite(flat[start : start + _CHUNK])
            if not finite.all():
                at = before + start + int(finite.argmin())
                raise CheckpointError(file, f"tensor {name!r}", f"element {at} is NaN or infinite")
        return values

    def equal(self, first: str, second: str) -> bool:
        """Returns whether two tensors have equal types, shapes and values.

        False for unsupported types. Compares in parts to save memory. Raises like `read`.
        """
        one, other = self.stored[first], self.stored[second]
        if one[1:] != other[1:] or one.dtype not in TYPES or not one.shape:
            return False
        count = max(1, _COMPARED // max(1, math.prod(one.shape[1:])))
        parts = [slice(at, at + count) for at in range(0, one.shape[0], count)]
        read = self.read
        return all(np.array_equal(read(first, part), read(second, part)) for part in parts)

    def _handle(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, self._stack.enter_context(_opened(file))
        return self._open[1]

    def _list(self, file: Path) -> None:
        with _opened(file) as handle:
            for name in handle.keys():
                part, name = handle.get_slice(name), self._prefixes.get(file, "") + name
                dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
                if math.prod(size for size in shape if size) > _MAX_ELEMENTS:
                    problem = f"has shape {shape}, beyond the {_MAX_ELEMENTS} elements of an array"
                    raise CheckpointError(str(file), f"tensor {name!r}", problem)
                if name in self.stored:
                    problem = f"is also in {self.stored[name].file.name}"
                    raise CheckpointError(str(file), f"tensor {name!r}", problem)
                self.stored[name] = Stored(file, dtype, shape)

    def _list_shards(self, index: Path) -> None:
        fields = JSONFields.read(index, MAX_INDEX)
        weight_map: dict[str, str] = fields.mapping("weight_map")
        for name, shard in weight_map.items():
            is_name = isinstance(shard, str) and Path(shard).name == shard
            if not is_name or not shard.endswith(".safetensors"):
                problem = f"must name a .safetensors file in its folder, not {shard!r:.200}"
                fields.fail(f"weight_map[{name[:100]!r}]", problem)
        for shard in dict.fromkeys(weight_map.values()):
            if not (index.parent / shard).exists():
                fields.fail("weight_map", f"names {shard!r}, which is missing")
            self._list(index.parent / shard)
        for name, shard in weight_map.items():
            if name not in self.stored or self.stored[name].file.name != shard:
                problem = f"names {shard!r}, which does not hold the tensor"
                fields.fail(f"weight_map[{name[:100]!r}]", problem)
        for name, stored in self.stored.items():
            if name not in weight_map:
                problem = f"is not in {index.name}"
                raise CheckpointError(str(stored.file), f"tensor {name!r}", problem)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not os.path.isfile(file):  # a pipe could block forever
        raise CheckpointError(str(file), "path", "must be a regular file")
    with _checked(file, "header", lambda: safe_open(file, "numpy", backend="pread")) as handle:
        yield handle


def _checked(file: Path, field: str, call: Callable[[], T]) -> T:
    """Returns the result of `call`, with errors of safetensors turned into CheckpointError."""
    try:
        return call()
    except SafetensorError as error:
        raise CheckpointError(str(file), field, f"safetensors rejects it: {error}") from None
