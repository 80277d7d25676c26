"""Reads and checks the tensor descriptions of a GGUF header: name, shape, type and offset."""

from __future__ import annotations

import dataclasses
import struct

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ptx_kernels import formats

from .. import float_types
from .source import Cursor, Source

MAX_DIMS = 4
MAX_NAME = 63  # bytes; ggml's GGML_MAX_NAME of 64 includes the terminator
MIN_ENTRY = 8 + 1 + 4 + 4 + 8  # bytes of the shortest description: a scalar with a one-byte name
#: ggml's name -> type, for tensors that are not packed.
PLAIN = float_types.GGML

_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_I32, _U32, _U64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor; `shape` is row-major, (..., n, k), the reverse of the file's order.

    `part` describes a tensor that is only some rows of the file's tensor `file_name`: they begin at
    `first_row` of its `file_rows` rows along `row_axis`.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the tensor data
    nbytes: int
    first_row: int = 0
    file_rows: int | None = None  # None means all rows, as in `shape`
    file_name: str | None = None  # None means `name`
    row_axis: int = 0

    def part(self, name: str, first: int, rows: int, axis: int) -> TensorInfo:
        """Returns the description of a tensor `name` made of some rows of this one along `axis`.

        On the last axis, `first` and `rows` must be multiples of the type's block size. A part of
        a part must be along the same axis.
        """
        shape = (*self.shape[:axis], rows, *self.shape[axis + 1 :])
        nbytes = self.nbytes * rows // self.shape[axis]
        part_of = first, self.shape[axis], self.name, axis
        if self.file_rows is not None:
            if axis != self.row_axis:
                raise ValueError(f"axis={axis} must be {self.row_axis}, that of the first part")
            part_of = self.first_row + first, self.file_rows, self.file_name or self.name, axis
        return TensorInfo(name, self.type, shape, self.offset, nbytes, *part_of)

    @property
    def block_size(self) -> int:
        """Number of elements of a quantization block along the last axis."""
        return GGML_QUANT_SIZES[self.type][0]

    @property
    def supported(self) -> bool:
        """Whether `read` can load this type."""
        return self.type.name in supported_types()


def supported_types() -> tuple[str, ...]:
    """Returns ggml's names of the tensor types that `read` can load."""
    return (*PLAIN, *formats.names())


def read_info(cursor: Cursor, index: int) -> TensorInfo:
    """Reads the next tensor description; `check_ranges` later checks its range in the file."""
    name = cursor.string(f"tensor {index}: name", MAX_NAME)
    if not name:
        cursor.fail(f"tensor {index}: name", "must not be empty")
    field = f"tensor {name!r}"
    count = cursor.unpack(_U32, f"{field}: dimension count")
    if count > MAX_DIMS:
        cursor.fail(f"{field}: dimension count", f"must be at most {MAX_DIMS}, not {count}")
    dims = [cursor.unpack(_U64, f"{field}: dimensions") for _ in range(count)]
    kind = _tensor_type(cursor, f"{field}: type")
    offset = cursor.unpack(_U64, f"{field}: offset")
    return TensorInfo(name, kind, tuple(reversed(dims)), offset, _nbytes(cursor, field, dims, kind))


def _tensor_type(cursor: Cursor, field: str) -> GGMLQuantizationType:
    number = cursor.unpack(_I32, field)
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        known = f"{_REMOVED[number]}, removed from ggml" if number in _REMOVED else "unknown"
        cursor.fail(field, f"{number} ({known}); supported: {', '.join(supported_types())}")


def _nbytes(cursor: Cursor, field: str, dims: list[int], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    for dim in dims:
        if not 0 < dim < 1 << 63:
            signed = dim - (1 << 64) if dim >> 63 else dim
            problem = f"{dims}: every dimension must be positive, not {signed}"
            cursor.fail(f"{field}: dimensions", problem)
    first = dims[0] if dims else 1
    if first % block:
        problem = f"{dims}: the first must be a multiple of {block}, the block of {kind.name}"
        cursor.fail(f"{field}: dimensions", problem)
    nbytes = block_bytes
    for factor in (first // block, *dims[1:]):
        nbytes *= factor
        if nbytes > cursor.source.size:
            have = f"the file has {cursor.source.size}"
            problem = f"{dims} of {kind.name} take at least {nbytes} bytes; {have}"
            cursor.fail(f"{field}: dimensions", problem)
    return nbytes


def check_ranges(
    source: Source, tensors: list[TensorInfo], data_start: int, alignment: int
) -> None:
    """Raises GGUFError for tensors that are not aligned, not inside the file, or overlap."""
    available = max(source.size - data_start, 0)
    for info in tensors:
        field = f"tensor {info.name!r}: offset"
        if info.offset % alignment:
            source.fail(field, f"{info.offset} must be a multiple of the alignment, {alignment}")
        if info.offset > available or info.nbytes > available - info.offset:
            where = f"(from byte {data_start} of {source.size})"
            rule = f"must lie within the {available} bytes of tensor data {where}"
            source.fail(field, f"{info.offset} + {info.nbytes} bytes {rule}")
    placed = sorted(tensors, key=lambda info: info.offset)
    for before, after in zip(placed, placed[1:], strict=False):
        end = before.offset + before.nbytes
        if after.offset < end:
            problem = f"{after.offset} overlaps tensor {before.name!r}, which ends at {end}"
            source.fail(f"tensor {after.name!r}: offset", problem)
