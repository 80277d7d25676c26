"""Reads tensors of safetensors files one at a time.

The safetensors package checks that every tensor lies inside its file and that none overlap. Files
are read instead of memory-mapped, because mapped pages count as resident memory, and a mapped file
that shrinks kills the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_q4k import CheckpointError, gguf

from ...support.json_fields import JSONFields

#: Types that models keep; safetensors and ggml use the same names.
TYPES = gguf.PLAIN
#: Types that safetensors' NumPy backend does not read.
_FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
#: Types that can be read -> NumPy dtype.
DTYPES: dict[str, np.dtype[Any]] = (
    {name: of.dtype for name, of in TYPES.items()}
    | {"F64": np.dtype(np.float64)}
    | {name: np.dtype(dtype) for name, dtype in _FLOAT8.items()}
    | {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}
    | {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
)
MAX_INDEX = 1 << 24  # bytes; an index has one line per tensor
_MAX_ELEMENTS = np.iinfo(np.intp).max // 8  # NumPy's limit, which ignores axes of size 0
_CHUNK = 1 << 20  # elements checked at a time

T = TypeVar("T")


class Stored(NamedTuple):
    """Description of a stored tensor: its file, dtype and shape."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file; only for DTYPES."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy dtype; only for DTYPES."""
        return DTYPES[self.dtype]


class Weights:
    """Reader of the tensors of one file, or of all files of an index.

    `stored` maps tensor names to Stored.
    """

    def __init__(self, path: Path) -> None:
        """Lists the tensors of a .safetensors file, or of a folder with one file or an index."""
        self._open: tuple[Path, Any, _Places] | None = None
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

    def raw(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads a tensor of any of DTYPES, or the rows of a slice with step 1, unchecked."""
        stored = self.stored[name]
        file, shape = str(stored.file), stored.shape
        if rows is None or not shape:
            first, complete, wanted = 0, True, shape
        else:
            first, last, _ = rows.indices(shape[0])
            part, wanted = slice(first, last), (last - first, *shape[1:])
            complete = wanted == shape

        def values_of() -> np.ndarray:
            handle, places = self._handle(stored.file)
            if stored.dtype in _FLOAT8:
                return places.read(inner, stored, first, wanted)
            return handle.get_tensor(inner) if complete else handle.get_slice(inner)[part]

        inner = name.removeprefix(self._prefixes.get(stored.file, ""))
        values = _checked(stored.file, f"tensor {name!r}", values_of)
        if values.shape != wanted or values.dtype != stored.numpy_dtype:
            raise CheckpointError(file, f"tensor {name!r}", "changed while the file was read")
        return values

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads a tensor of one of TYPES, or of float64 as float32; see `raw`.

        Raises CheckpointError if a value is NaN or infinite, or too large for float32.
        """
        values, before = self.raw(name, rows), 0
        if rows is not None and values.ndim:
            before = rows.indices(self.stored[name].shape[0])[0] * math.prod(values.shape[1:])
        if values.dtype == np.float64:
            with np.errstate(over="ignore"):  # infinities are reported below
                values = values.astype(np.float32)
        if (at := first_not_finite(values)) is not None:
            self.fail(name, f"element {before + at} is NaN or infinite")
        return values

    def expect(
        self, name: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None
    ) -> Stored:
        """Returns a tensor's description; raises CheckpointError for another dtype or shape.

        shape: None accepts any shape.
        """
        if (stored := self.stored.get(name)) is None:
            expected = "" if shape is None else f", expected with shape {shape}"
            file = next(iter(self.stored.values())).file
            raise CheckpointError(str(file), f"tensor {name!r}", f"is missing{expected}")
        if stored.dtype not in dtypes:
            known = " or ".join(dtypes)
            self.fail(name, f"has dtype {stored.dtype}, expected {known}")
        if shape is not None and stored.shape != shape:
            self.fail(name, f"has shape {stored.shape}, expected {shape}")
        return stored

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raises CheckpointError about a stored tensor."""
        raise CheckpointError(str(self.stored[name].file), f"tensor {name!r}", problem)

    def _handle(self, file: Path) -> tuple[Any, _Places]:
        if self._open is None or self._open[0] != file:
            self.close()
            handle = self._stack.enter_context(_opened(file))
            self._open = file, handle, _Places(file)
        return self._open[1:]

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


def first_not_finite(values: np.ndarray) -> int | None:
    """Returns the index of the first NaN or infinite element of a flattened array, if any."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        finite = np.isfinite(flat[start : start + _CHUNK])
        if not finite.all():
            return start + int(finite.argmin())
    return None


class _Places:
    """Finds the bytes of tensors of types that safetensors' NumPy backend does not read."""

    def __init__(self, file: Path) -> None:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                self._header = json.loads(stream.read(length))
            except ValueError:  # safetensors has read it before
                problem = "changed while the file was read"
                raise CheckpointError(str(file), "header", problem) from None
        self._file, self._start = file, 8 + length

    def read(self, name: str, stored: Stored, first: int, shape: tuple[int, ...]) -> np.ndarray:
        """Reads rows from `first` on; returns an empty array if the file has changed."""
        found = self._header.get(name)
        if found is None or (found["dtype"], tuple(found["shape"])) != stored[1:]:
            return np.empty(0)
        dtype = stored.numpy_dtype
        with open(self._file, "rb") as stream:
            row = math.prod(shape[1:]) * dtype.itemsize
            stream.seek(self._start + found["data_offsets"][0] + first * row)
            data = stream.read(math.prod(shape) * dtype.itemsize)
        complete = len(data) == math.prod(shape) * dtype.itemsize
        return np.frombuffer(data, dtype).reshape(shape) if complete else np.empty(0)


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
