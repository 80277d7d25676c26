"""Describes a quantized block format: packed struct, byte planes, decoders, kernel readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .unpack.packed_block import Dequantize
from .unpack.packed_row import PackedRow
from .unpack.packed_tile import F16Tile, Int8Groups, ReadMinimums

WIDEST_LOAD = 16  # bytes, ld.global.v4.b32


@dataclasses.dataclass(frozen=True)
class Plane:
    """Bytes of every quantization block that are stored as one array, so that loads are aligned."""

    name: str
    bytes_per_block: int
    offset_runs: tuple[tuple[int, int], ...]  # (offset in the block, length), in the plane's order

    @property
    def alignment(self) -> int:
        """Alignment of quantization blocks in this plane: a power of two of bytes, up to 16."""
        return min(self.bytes_per_block & -self.bytes_per_block, WIDEST_LOAD)


@dataclasses.dataclass(frozen=True)
class FormatTuning:
    """Properties of a format that selection rules and instruction budgets use.

    Attributes:
      gemv_lanes: lanes that share 256 weights, for one row of activations.
      gemv_fewest_lanes: minimum of `gemv_lanes`, for any rows of activations.
      gemv_rows: weight rows per warp for one row of activations, if there are enough rows to fill a
        device; they share the activations' loads and sums.
      gemv_two_parts: maximum rows of activations for which a GEMV multiplies two parts of the
        quants, each by one dp4a per four weights.
      gemv_sum_dots: additional dp4a per four weights for sums of activations, shared by the weight
        rows of a warp.
      gemv_resident_blocks: thread blocks per multiprocessor for one or two rows of activations (six
        for one row with eight lanes); more would spill.
      gemv_ahead: whether a GEMV kernel that also quantizes one row of activations can load weights
        in advance (`MatvecConfig.ahead`) without spilling.
      gemm_rows: minimum rows of activations for which tensor cores replace mat-vecs.
      gemm_tiles: tiles of 16 weight rows per warp, int8 products; more spill or need too much
        memory.
      gemm_few_rows: maximum rows of activations per thread block, int8 products of up to 64; more
        spill.
      gemm_unrolled: maximum activations times tiles of a warp for which a step of 256 columns is
        unrolled; more would spill.
      gemm_pair_rows: maximum rows of activations for which two matrices, or joined ones, need no
        more than 128 registers, int8 products.
      gemm_f16_rows: maximum rows of activations per thread block, f16 products; more spill.
      int8_issue_slots: issue slots of an int8 product of 16 x 8 x 32, including its share of
        everything in a step (`benchmarks.tensor_cores`); None if not measured.
      instruction_budgets: {rows of activations: maximum instructions of a GEMV's hot loop per byte
        of quants and lane}.
    """

    gemv_lanes: int = 8
    gemv_fewest_lanes: int = 4
    gemv_rows: int = 2
    gemv_two_parts: int = 0
    gemv_sum_dots: int = 0
    gemv_resident_blocks: int = 5
    gemv_ahead: bool = False
    gemm_rows: int = 4
    gemm_tiles: int = 2
    gemm_few_rows: int = 64
    gemm_unrolled: int = 16
    gemm_pair_rows: int = 16
    gemm_f16_rows: int = 64
    int8_issue_slots: float | None = None
    instruction_budgets: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One ggml block format: its byte layout, decoder, and kernel readers.

    `struct` lists (field, bytes) in file order; `layout` lists (plane, its fields). `weights` turns
    {field: uint8 (..., blocks, bytes)} into float32 (..., blocks, block_size), with the operations
    of the given array module (NumPy or jax.numpy).

    Kernels read quantization blocks by lane (`row`, GEMV), one block per call (`dequantize`), or,
    for GEMM, by tiles of 16 rows. `int8_tile` reads a tile as integers. `f16_tile` reads a tile as
    f16 with a factor per 256 columns. Each is None if there is no such kernel. `int8_minimums`
    reads all minimums of a tile at once, if they are integers with a factor per 256 columns.
    """

    name: str
    block_size: int  # weights
    block_bytes: int
    struct: tuple[tuple[str, int], ...]
    layout: tuple[tuple[str, tuple[str, ...]], ...]
    f16_fields: tuple[str, ...]  # scales and minimums, which must be finite in a valid file
    weights: Callable[[Mapping[str, Any], Any], Any] = dataclasses.field(repr=False)
    quant_bits: int  # per weight, without scales
    row: type[PackedRow]
    dequantize: Dequantize
    dequantize_threads: int  # per block
    int8_tile: Int8Groups | None
    int8_minimums: ReadMinimums | None = None
    f16_tile: F16Tile | None = None
    e8m0_fields: tuple[str, ...] = ()  # scales of one byte: 2^(e - 127), and NaN at 255
    spread_fields: tuple[str, ...] = ()  # the top nibbles of their u16 are an f16, lowest first
    broadcast_header: bool = False  # whether `row` can broadcast a block's header (16 B)
    tuning: FormatTuning = FormatTuning()
    planes: tuple[Plane, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        assert sum(size for _, size in self.struct) == self.block_bytes, self.name
        stored = [field for _, fields in self.layout for field in fields]
        assert sorted(stored) == sorted(field for field, _ in self.struct), self.name
        planes = []
        for plane, fields in self.layout:
            runs: list[tuple[int, int]] = []
            for field in fields:
                offset, size = self.offset(field), self.size(field)
                if runs and sum(runs[-1]) == offset:
                    runs[-1] = (runs[-1][0], runs[-1][1] + size)
                else:
                    runs.append((offset, size))
            planes.append(Plane(plane, sum(size for _, size in runs), tuple(runs)))
        object.__setattr__(self, "planes", tuple(planes))

    @property
    def super_block_bytes(self) -> int:
        """Bytes of 256 packed weights."""
        return 256 // self.block_size * self.block_bytes

    def size(self, field: str) -> int:
        """Returns the bytes of a field of the packed struct."""
        return dict(self.struct)[field]

    def offset(self, field: str) -> int:
        """Returns the byte offset of a field in the block as stored in the file."""
        names = [name for name, _ in self.struct]
        return sum(size for _, size in self.struct[: names.index(field)])

    def split(self, raw: Any, xp: Any = np) -> tuple[Any, ...]:
        """Splits uint8 (..., blocks, block_bytes) into planes, uint8 (..., blocks, bytes) each.

        The planes are views if possible. `xp` is `numpy` or `jax.numpy`.
        """
        parts = (
            [raw[..., offset : offset + size] for offset, size in p.offset_runs]
            for p in self.planes
        )
        return tuple(part[0] if len(part) == 1 else xp.concatenate(part, axis=-1) for part in parts)

    def join(self, planes: Sequence[np.ndarray]) -> np.ndarray:
        """Joins planes to uint8 (..., blocks, block_bytes): the exact inverse of `split`."""
        raw = np.empty((*planes[0].shape[:-1], self.block_bytes), np.uint8)
        for plane, data in zip(self.planes, planes, strict=True):
            start = 0
            for offset, size in plane.offset_runs:
                raw[..., offset : offset + size] = data[..., start : start + size]
                start += size
        return raw

    def fields(self, planes: Sequence[Any]) -> dict[str, Any]:
        """Returns the fields of the planes (NumPy or JAX): {name: uint8 (..., blocks, its bytes)}.

        The planes are uint8 (..., blocks, bytes).
        """
        found = {}
        for (_, names), data in zip(self.layout, planes, strict=True):
            start = 0
            for name in names:
                found[name] = data[..., start : start + self.size(name)]
                start += self.size(name)
        return found

    def decode(self, planes: Sequence[Any], xp: Any = np) -> Any:
        """Decodes planes to float32 (..., blocks * block_size), equal under NumPy and jax.numpy.

        Every product of scale and quant is exact in float32 (at most 11 + 7 + 5 significant bits),
        so a compiler's contraction of multiply and subtract changes no bit.
        """
        values = self.weights(self.fields(planes), xp)
        return values.reshape(*values.shape[:-2], values.shape[-2] * self.block_size)

    def finite(self, planes: Sequence[np.ndarray]) -> np.ndarray:
        """Returns bool (..., blocks): whether all scales and minimums of each block are finite."""
        fields = self.fields(planes)
        good = [
            (fields[name].view(np.uint16)[..., 0] & 0x7C00) != 0x7C00 for name in self.f16_fields
        ]
        good += [fields[name][..., 0] != 0xFF for name in self.e8m0_fields]
        good += [
            # bits 10 to 14 of the f16: three in the last nibble, two in the one before it
            ((fields[name][..., 7] & 0x70) != 0x70) | ((fields[name][..., 5] & 0xC0) != 0xC0)
            for name in self.spread_fields
        ]
        return np.logical_and.reduce([np.ones(planes[0].shape[:-1], bool), *good])

    @property
    def scale_fields(self) -> tuple[str, ...]:
        """Names of the fields that hold a float: scales and minimums."""
        return self.f16_fields + self.e8m0_fields + self.spread_fields

    def store_scale(self, raw: np.ndarray, field: str, values: Any) -> None:
        """Writes floats (...) into a field of packed blocks, uint8 (..., block_bytes), in place.

        Each value is rounded to the field's type: to the nearest f16, or to the power of two below
        its magnitude.
        """
        values = np.broadcast_to(np.asarray(values, np.float32), raw.shape[:-1])
        if field in self.f16_fields:
            stored = values.astype("<f2")[..., None].view(np.uint8)
        elif field in self.spread_fields:
            words = raw[..., self.offset(field) : self.offset(field) + 8].copy().view("<u2")
            nibbles_of = values.astype("<f2").view("<u2")[..., None] >> np.arange(0, 16, 4)
            stored = ((words & 0xFFF) | (nibbles_of << 12).astype("<u2")).view(np.uint8)
        else:
            exponent = np.where(values == 0, 0, np.clip(np.frexp(values)[1] + 126, 0, 254))
            stored = np.where(np.isfinite(values), exponent, 255).astype(np.uint8)[..., None]
        raw[..., self.offset(field) : self.offset(field) + self.size(field)] = stored


def f16_array(data: Any) -> Any:
    """Converts little-endian f16 bytes, uint8 (..., 2), to float32 (..., 1)."""
    return data.view(np.float16).astype(np.float32)


def nibbles(data: Any, xp: Any) -> Any:
    """Splits uint8 (..., n) into nibbles, uint8 (..., 2n): all low ones, then all high ones."""
    data = data[..., None, :]
    return xp.where(xp.arange(2)[:, None] == 0, data & 0xF, data >> 4).reshape(
        *data.shape[:-2], 2 * data.shape[-1]
    )


def bits(data: Any, count: int, width: int, xp: Any) -> Any:
    """Extracts bit fields: uint8 (..., n) -> uint8 (..., count, n), field i from bit i * width."""
    shifts = xp.arange(0, count * width, width, dtype=np.uint8)[:, None]
    return (data[..., None, :] >> shifts) & ((1 << width) - 1)
