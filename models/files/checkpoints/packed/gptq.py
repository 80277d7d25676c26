"""Decodes GPTQ checkpoints: integers of 2, 3, 4 or 8 bits in groups, with zero points.

Source: `PackableQuantLinear` of GPTQModel (gptqmodel/nn_modules/qlinear/__init__.py), whose first
format, AutoGPTQ's, stores zero points minus one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ....support.json_fields import JSONFields
from ..safetensors import DTYPES, Weights
from .base import FLOATS, PackedTensor, modules, pieces
from .integers import affine, stream

_BITS = (2, 3, 4, 8)
#: Value of checkpoint_format -> what is added to stored zero points.
_ZEROS = {"gptq": 1, "gptq_v2": 0}


@dataclasses.dataclass(frozen=True)
class GPTQ(PackedTensor):
    """A weight as `qweight`, `qzeros`, `scales` (groups, n) and optional `g_idx`, in `module`.

    Attributes:
      bits: bits of a weight. `qweight` is int32 (k * bits / 32, n), `qzeros` (groups, n * bits /
        32): numbers follow each other bit by bit.
      added: added to stored zero points.
      group: columns of a group, if there is no `g_idx`, which has the group of each column.
    """

    module: str = ""
    bits: int = 4
    added: int = 1
    group: int | None = None

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        quants, zeros, scales = (
            weights.raw(f"{self.module}.{part}", None) for part in ("qweight", "qzeros", "scales")
        )
        n, k = self.shape
        first, last, _ = rows.indices(n)
        groups = self._groups(weights, k, len(scales))
        zeros = (stream(zeros, self.bits).astype(np.int16) + self.added).T
        out = np.empty((last - first, k), DTYPES[self.dtype])
        for piece in pieces(first, last, k):
            values = stream(np.ascontiguousarray(quants[:, piece].T), self.bits)
            at = slice(piece.start - first, piece.stop - first)
            out[at] = affine(values, zeros[piece], scales[:, piece].T, groups)
        return out

    def _groups(self, weights: Weights, k: int, groups: int) -> np.ndarray:
        """Returns the group of each column, int64 (k,)."""
        if self.group is not None:
            return np.arange(k) // self.group
        name = f"{self.module}.g_idx"
        of_columns = weights.raw(name).astype(np.int64)
        wrong = (of_columns < 0) | (of_columns >= groups)
        if wrong.any():
            at = int(wrong.argmax())
            weights.fail(name, f"element {at} is {of_columns[at]}, but there are {groups} groups")
        return of_columns


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the quantized weights."""
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    layout = settings.string(key, "gptq")
    if layout not in _ZEROS or settings.boolean("is_marlin_format", False):
        supported = ", ".join(_ZEROS)
        found = "marlin" if layout in _ZEROS else layout
        settings.fail(key, f"is {found!r:.100}, which is not supported; supported: {supported}")
    usual = settings.integer("bits")
    for module in modules(weights, "qweight"):
        yield _described(weights, settings, module, usual, _ZEROS[layout])


def _described(weights: Weights, settings: JSONFields, module: str, usual: int, added: int) -> GPTQ:
    """Describes a module's weight, after checking the shapes of its parts.

    usual: bits of most modules; those of this one follow from `g_idx`.
    """
    quants, zeros, scales, index = (
        f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    shape = weights.expect(quants, ("I32",)).shape
    if len(shape) != 2:
        weights.fail(quants, f"has shape {shape}, expected a matrix")
    words, n = shape
    bits = usual
    if indexed := index in weights.stored:
        of_index = weights.expect(index, ("I32", "I64")).shape
        if len(of_index) == 1 and of_index[0] and words * 32 % of_index[0] == 0:
            bits = words * 32 // of_index[0]
    if bits not in _BITS:
        supported = ", ".join(map(str, _BITS))
        weights.fail(quants, f"has weights of {bits} bits; supported: {supported}")
    k = words * 32 // bits
    if indexed:
        weights.expect(index, ("I32", "I64"), (k,))
    found = weights.expect(scales, FLOATS)
    if len(found.shape) != 2 or found.shape[1] != n or not found.shape[0]:
        weights.fail(scales, f"has shape {found.shape}, expected (groups, {n})")
    groups = found.shape[0]
    if words * 32 % bits or n * bits % 32:
        weights.fail(quants, f"has shape {shape}, which {bits} bits do not fill")
    group = None
    if not indexed:
        group = settings.integer("group_size")
        group = k if group < 1 else group
        if -(-k // group) != groups:
            weights.fail(scales, f"has {groups} groups, expected {-(-k // group)}")
    weights.expect(zeros, ("I32",), (groups, n * bits // 32))
    parts = quants, zeros, scales, *((index,) if indexed else ())
    label = f"GPTQ of {bits} bits"
    return GPTQ(
        f"{module}.weight", (n, k), found.dtype, parts, label, None, module, bits, added, group
    )
