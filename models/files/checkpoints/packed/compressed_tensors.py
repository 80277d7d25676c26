"""Decodes checkpoints of compressed-tensors: FP8, int8, packed integers, NVFP4, MXFP4 and MXFP8.

Source: compressed-tensors' compressors/ and `dequantize` of quantization/lifecycle/forward.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from ....support.json_fields import JSONFields
from ..safetensors import DTYPES, Weights
from .base import FLOATS, PackedTensor, beside, modules, pieces
from .fp4 import SCALES, fp4
from .fp8 import FLOAT8, block_of
from .integers import affine, consecutive, fields, stream
from .scaled import scaled

_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_BITS = range(2, 9)


@dataclasses.dataclass(frozen=True)
class PackedIntegers(PackedTensor):
    """A weight as `weight_packed` int32 (n, words).

    `weight_scale` is (n, groups), and `weight_zero_point` int32 (words, groups), if it is stored.
    Stored numbers are 2^(bits - 1) more than the integers and zero points.

    Attributes:
      is_dense: numbers follow each other bit by bit, as since version 0.18 of compressed-tensors;
        False: each word has 32 // bits of them.
    """

    module: str = ""
    bits: int = 4
    has_zeros: bool = False
    has_order: bool = False
    is_dense: bool = False

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        n, k = self.shape
        first, last, _ = rows.indices(n)
        words = weights.raw(f"{self.module}.weight_packed", rows)
        scales = weights.raw(f"{self.module}.weight_scale")
        scales = scales.reshape(-1, scales.shape[1] if scales.ndim > 1 else 1)
        scales = np.broadcast_to(scales, (n, scales.shape[1]))[first:last]
        groups = self._groups(weights, scales.shape[1])
        zeros: np.ndarray | int = 1 << self.bits - 1
        unpack = stream if self.is_dense else fields
        if self.has_zeros:
            packed = weights.raw(f"{self.module}.weight_zero_point")
            zeros = unpack(np.ascontiguousarray(packed.T), self.bits).T[first:last]
        out = np.empty((last - first, k), DTYPES[self.dtype])
        for piece in pieces(0, len(words), k):
            of_rows = zeros[piece] if isinstance(zeros, np.ndarray) else zeros
            values = unpack(np.ascontiguousarray(words[piece]), self.bits)[:, :k]
            out[piece] = affine(values, of_rows, scales[piece], groups)
        return out

    def _groups(self, weights: Weights, groups: int) -> np.ndarray:
        """Returns the group of each column, int64 (k,)."""
        k, name = self.shape[1], f"{self.module}.weight_g_idx"
        in_order = np.arange(k) // (k // groups)
        if not self.has_order:
            return in_order
        of_columns = weights.raw(name).astype(np.int64)
        if (of_columns == -1).any():  # no order was stored
            return in_order
        if of_columns.min() < 0 or of_columns.max() >= groups:
            weights.fail(name, f"names groups beyond the {groups} of weight_scale")
        return of_columns


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the quantized weights."""
    layout = settings.string("format", "dense")
    if layout not in _FORMATS:
        problem = f"is {layout!r:.100}, which is not supported"
        settings.fail("format", f"{problem}; supported: {', '.join(_FORMATS)}")
    if (transforms := settings.object("transform_config")) is not None and transforms.values:
        settings.fail("transform_config", "rotates weights, which is not supported")
    sparsity = settings.object("sparsity_config")
    if sparsity is not None and (found := sparsity.string("format", "dense")) != "dense":
        sparsity.fail("format", f"is {found!r:.100}, which is not supported")
    bits, blocks = _of_groups(settings)
    dense_first = _is_dense(settings)
    for module in modules(weights, "weight_packed"):
        packed = weights.expect(f"{module}.weight_packed", ("U8", "I32"))
        if len(packed.shape) > 2:
            problem = "has the experts of a layer in one tensor, which is not supported: save a "
            weights.fail(f"{module}.weight_packed", f"{problem}module per expert")
        if packed.dtype == "I32":
            yield _integers(weights, module, bits, dense_first, beside(weights, module))
        else:
            yield _floats(weights, module, beside(weights, module))
    for module in modules(weights, "weight_scale"):
        name, zero = f"{module}.weight", f"{module}.weight_zero_point"
        if f"{module}.weight_packed" in weights.stored:
            continue
        stored = weights.expect(name, ("I8", *FLOAT8))
        yield scaled(
            weights,
            name,
            f"{module}.weight_scale",
            zero=zero if zero in weights.stored else None,
            block=blocks,
            label="int8" if stored.dtype == "I8" else None,
            further=beside(weights, module),
        )


def _of_groups(settings: JSONFields) -> tuple[frozenset[int], tuple[int, int] | None]:
    """Returns the numbers of bits in config_groups, and (rows, columns) of blocks with a scale."""
    bits, blocks = set(), set()
    groups = settings.object("config_groups")
    for name in [] if groups is None else groups.values:
        group = groups.object(name) if groups is not None else None
        described = None if group is None else group.object("weights")
        if described is not None:
            bits.add(described.integer("num_bits", 8))
            blocks.add(block_of(described, "block_structure"))
    sizes = blocks - {None}
    if len(sizes) > 1:
        settings.fail("config_groups", "has blocks of several sizes, which is not supported")
    return frozenset(bits), next(iter(sizes), None)


def _is_dense(settings: JSONFields) -> bool:
    """Returns whether the version that wrote the folder packs integers without gaps."""
    numbers = re.findall(r"\d{1,9}", settings.string("version", "0"))[:2]
    return tuple(map(int, numbers)) >= (0, 18)


def _words(count: int, bits: int, is_dense: bool) -> int:
    """Returns the number of int32 words that hold `count` integers."""
    return -(-count * bits // 32) if is_dense else -(-count // (32 // bits))


def _floats(weights: Weights, module: str, further: tuple[str, ...]) -> PackedTensor:
    """Describes a weight in NVFP4 or MXFP4, after checking its parts."""
    scale = f"{module}.weight_scale"
    kinds = {dtype: kind for kind, dtypes in SCALES.items() for dtype in dtypes}
    kind = kinds[weights.expect(scale, tuple(kinds)).dtype]
    common = f"{module}.weight_global_scale" if kind == "NVFP4" else None
    names = f"{module}.weight", kind, f"{module}.weight_packed", scale
    return fp4(weights, *names, common=common, inverse=True, further=further)


def _integers(
    weights: Weights,
    module: str,
    bits: frozenset[int],
    dense_first: bool,
    further: tuple[str, ...],
) -> PackedIntegers:
    """Describes a weight of packed integers, after checking its parts.

    bits: numbers of bits in config.json, of which the shapes select one. dense_first: layout that
    counts if both have the same number of words.
    """
    packed, scale, shape_name, zero, order = (
        f"{module}.weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
    )
    stored = weights.expect(packed, ("I32",)).shape
    weights.expect(shape_name, ("I64", "I32"), (2,))
    n, k = (int(size) for size in weights.raw(shape_name))
    layouts = {
        b: [dense for dense in (dense_first, not dense_first) if stored == (n, _words(k, b, dense))]
        for b in sorted(bits & set(_BITS))
    }
    fitting = [b for b, found in layouts.items() if found]
    if n < 1 or k < 1 or len(fitting) != 1:
        listed = ", ".join(map(str, sorted(bits)))
        problem = f"has shape {stored}, which does not fit {(n, k)} weights of {listed} bits"
        weights.fail(packed, problem)
    is_dense = layouts[fitting[0]][0]
    found = weights.expect(scale, FLOATS)
    groups = found.shape[1] if len(found.shape) == 2 else 1
    if found.shape not in ((), (1,), (1, 1), (n, groups)):
        weights.fail(scale, f"has shape {found.shape}, expected ({n}, groups)")
    consecutive(weights, scale, k, groups)
    parts = [packed, scale, shape_name, *further]
    if has_zeros := zero in weights.stored:
        weights.expect(zero, ("I32",), (_words(n, fitting[0], is_dense), groups))
        parts.append(zero)
    if has_order := order in weights.stored:
        weights.expect(order, ("I32", "I64"), (k,))
        parts.append(order)
    of_all = f"{module}.weight", (n, k), found.dtype, tuple(parts), f"int{fitting[0]}", None
    return PackedIntegers(*of_all, module, fitting[0], has_zeros, has_order, is_dense)
