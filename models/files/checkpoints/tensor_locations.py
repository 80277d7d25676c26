"""Finds and reads the checkpoint tensors that hold each GGUF tensor.

A checkpoint tensor may hold the rows of several GGUF tensors, each expert may have its own tensor,
and matrices may be transposed. Besides the result, only the rows that are read or one expert are in
memory. If heads or their parts are in another order, the whole checkpoint tensor is in memory.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Mapping

import numpy as np

from jax_q4k import CheckpointError, formats

from ...architectures.base import CheckpointClass, Stored
from ...architectures.tensor_tables import SCALES, Tensor
from ...config import Config
from ...config.tensors import Expected, expected_tensors, sizes, table
from .packed.weights import DecodedWeights


@dataclasses.dataclass(frozen=True)
class Location:
    """Location of a GGUF tensor in a checkpoint: rows of a tensor, or of one tensor per expert.

    Attributes:
      names: names in the checkpoint; several names are experts that are stacked.
      shape: required shape of the checkpoint tensor, or of each expert's tensor.
      rows: rows of this tensor, within each expert if `of_experts`.
      of_experts: the tensor is (experts, n, k), or a bias (experts, n).
      flat: the tensor is (experts * n, k) instead.
      transposed, as_row, channels, logarithms, plain: as in `Stored`.
      tiled: (axis, key heads, value heads, elements per value head) if GGUF files order the heads
        differently; None means the same order.
      groups: number of groups that the rows are split into; 0: none.
      parts: rows of this tensor in each group.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: slice
    of_experts: bool = False
    flat: bool = False
    transposed: bool | None = False
    as_row: bool = False
    channels: bool = False
    logarithms: bool = False
    plain: bool = False
    tiled: tuple[int, int, int, int] | None = None
    groups: int = 0
    parts: tuple[slice, ...] = ()

    def resolved(self, stored: tuple[int, ...], blocks: bool) -> Location:
        """Returns a copy with `transposed` decided by `stored`, the shape in the checkpoint.

        blocks: the tensor has blocks along its rows, which are never transposed.
        """
        if self.groups or self.flat or self.transposed is False or (self.transposed and not blocks):
            return self
        *experts, k, n = self.shape
        if blocks:
            return dataclasses.replace(self, transposed=False, shape=(*experts, n, k))
        if stored == self.shape or stored != (*experts, n, k):
            return dataclasses.replace(self, transposed=True)
        return dataclasses.replace(self, transposed=False, shape=stored)


def locations(
    config: Config,
    checkpoint: CheckpointClass,
    held: Container[str] | None = None,
) -> dict[str, Location]:
    """Returns GGUF name -> Location of every tensor that checkpoints of this class may hold.

    held: names in the checkpoint, which decide between alternative locations; None means all names.
    """
    expected, found = expected_tensors(config), {}
    stored: dict[tuple[str, str | None], list[Stored]] = collections.defaultdict(list)
    for entry in checkpoint.stored:
        for name in entry.holds:
            stored[name, entry.suffix].append(entry)
    for tensor, gguf, prefix, layer in table(config):
        for suffix in dict.fromkeys((tensor.suffix, "bias", *SCALES)):
            name = f"{gguf}{tensor.gguf}.{suffix}" if suffix else f"{gguf}{tensor.gguf}"
            where = next(iter(stored[tensor.gguf, suffix]), None)
            if where is None and (suffix == tensor.suffix or suffix not in SCALES):
                where = _usual(tensor, stored[tensor.gguf, None], prefix, held)
            if where is None or name not in expected:
                continue
            full = prefix + where.name + _suffix(where, tensor, suffix)
            ending = f".{suffix}" if suffix else ""
            held_parts = [expected[f"{gguf}{part}{ending}"] for part in where.holds]
            location = _location(where, full, held_parts, where.holds.index(tensor.gguf))
            if where.value_heads or where.groups:
                location = _ordered(config, where, location, tensor, sizes(config, layer))
            found[name] = location
    return found


def _usual(
    tensor: Tensor, candidates: list[Stored], prefix: str, held: Container[str] | None
) -> Stored | None:
    """Returns how a checkpoint stores a tensor; None if it does not store the tensor.

    candidates: the class's `Stored` for the tensor, of which optional ones must be held; then
    follows the default name.
    """
    for where in candidates:
        name = prefix + where.name + ("" if where.bare else ".weight")
        if not where.optional or held is None or name in held:
            return where
    if tensor.checkpoint is not None:
        return Stored(tensor.checkpoint, (tensor.gguf,))
    return None


def _suffix(where: Stored, tensor: Tensor, suffix: str) -> str:
    if where.suffix is not None or suffix == tensor.suffix == "bias":  # the name is complete
        return ""
    if where.bare:
        return "" if suffix == "weight" else f"_{suffix}"
    return f".{suffix}"


def _location(where: Stored, name: str, held: list[Expected], at: int) -> Location:
    """Returns the Location of GGUF tensor `held[at]` in a checkpoint tensor with all their rows."""
    entry, shape = held[at].entry, held[at].shape
    of_experts = entry.bias == "experts" and held[at].suffix not in SCALES
    experts, leading = (shape[0], shape[:1]) if of_experts else (1, ())
    counts = [part.shape[len(leading)] for part in held]
    start = where.skipped + sum(counts[:at])
    rows = slice(at, None, len(held)) if where.alternating else slice(start, start + counts[at])
    stored = (where.skipped + sum(counts), *shape[len(leading) + 1 :])
    transposed = False if held[at].is_bias else where.transposed
    stored = stored if transposed is False else stored[::-1]
    if "{expert}" in where.name:
        names, leading = tuple(name.format(expert=i) for i in range(experts)), ()
    else:
        names = (name,)
    stored = (1, *stored) if where.as_row else stored
    stored = (*stored[:-1], 1, stored[-1]) if where.channels else stored
    if where.flat:
        stored, leading = (experts * stored[0], *stored[1:]), ()
    return Location(
        names,
        (*leading, *stored),
        rows,
        of_experts,
        where.flat,
        transposed,
        where.as_row,
        where.channels,
        where.logarithms,
        where.plain,
    )


def _ordered(
    config: Config,
    where: Stored,
    location: Location,
    tensor: Tensor,
    lengths: Mapping[str, int],
) -> Location:
    """Returns a copy with `tiled`, `groups` and `parts` set if `where` has heads or groups."""
    if where.value_heads is not None and config.kind.tiled_heads and config.delta is not None:
        axis, size = where.value_heads
        heads = config.delta.key_heads, config.delta.value_heads
        location = dataclasses.replace(location, tiled=(axis, *heads, lengths[size]))
    if where.groups:
        groups, stop, parts = lengths[where.groups], 0, []
        for name, size in where.parts:
            start, stop = stop, stop + lengths[size]
            if name == tensor.gguf:
                parts.append(slice(start, stop))
        columns = lengths[tensor.shape.split()[1 if location.transposed else -1]]
        shape = groups * stop, columns
        location = dataclasses.replace(location, shape=shape, groups=groups, parts=tuple(parts))
    return location


def block_format(weights: DecodedWeights, location: Location) -> str | None:
    """Returns the block format in which `read` can return a GGUF tensor; None: only as floats."""
    formats_of = {
        None if (packed := weights.packed.get(name)) is None else packed.format
        for name in location.names
    }
    plain = not (location.transposed or location.as_row or location.channels or location.groups)
    plain &= not location.flat
    in_rows = location.tiled is None or location.tiled[0] == 0
    only = formats_of.pop() if len(formats_of) == 1 else None
    return only if plain and in_rows and not location.logarithms else None


def read(
    weights: DecodedWeights,
    location: Location,
    shape: tuple[int, ...],
    format: str | None = None,
) -> np.ndarray:
    """Reads a GGUF tensor of this shape from its location in the checkpoint.

    format: returns its blocks, uint8 (..., bytes of a row), as `block_format` says. None: floats.
    """
    take = weights.read if format is None else weights.blocks
    if location.of_experts:
        return _experts(weights, location, shape, format)
    [name] = location.names
    if location.as_row:
        return weights.read(name)[0]
    if location.groups:
        values = _parts(weights.read(name), location, shape)
    else:
        values = take(name, location.rows)
    values = values[..., 0, :] if location.channels else values
    values = values if location.tiled is None else _tiled(values, *location.tiled)
    if location.logarithms:
        with np.errstate(over="ignore"):  # infinities are reported below
            values = -np.exp(values.astype(np.float32))
        if not np.isfinite(values).all():
            stored = weights.stored[name]
            problem = "holds logarithms of numbers that are too large"
            raise CheckpointError(str(stored.file), f"tensor {name!r}", problem)
    return values


def _parts(values: np.ndarray, location: Location, shape: tuple[int, ...]) -> np.ndarray:
    """Extracts a tensor's rows from every group of rows of a checkpoint tensor.

    Returns a matrix of the concatenated rows, or a stack with one matrix per group.
    """
    groups = values.reshape(location.groups, -1, values.shape[-1])
    if len(shape) == 2:
        parts = [groups[:, part].reshape(-1, values.shape[-1]) for part in location.parts]
        return np.concatenate(parts)
    [part] = location.parts
    stack = groups[:, part]
    return np.ascontiguousarray(stack.swapaxes(1, 2) if location.transposed else stack)


def _tiled(
    values: np.ndarray, axis: int, key_heads: int, value_heads: int, size: int
) -> np.ndarray:
    """Reorders value heads along an axis: first by index within their key head, then by key head.

    The value heads are the last `value_heads * size` elements along the axis.
    """
    start = values.shape[axis] - value_heads * size
    at = np.arange(values.shape[axis])
    of_heads = at[start:].reshape(key_heads, -1, size).swapaxes(0, 1)
    return np.take(values, np.concatenate([at[:start], of_heads.reshape(-1)]), axis)


def _experts(
    weights: DecodedWeights, location: Location, shape: tuple[int, ...], format: str | None
) -> np.ndarray:
    """Stacks the experts' matrices or biases, or the blocks of their matrices."""
    take = weights.read if format is None else weights.blocks
    dtype, size = weights.stored[location.names[0]].numpy_dtype, shape[-1]
    if format is not None:
        block = formats.get(format)
        dtype, size = np.dtype(np.uint8), size // block.block_size * block.block_bytes
    stacked = np.empty((*shape[:-1], size), dtype)
    for expert in range(shape[0]):
        if len(location.names) > 1:
            values = take(location.names[expert])
        elif location.flat:
            rows = location.shape[0] // shape[0]
            values = take(location.names[0], slice(expert * rows, (expert + 1) * rows))
        else:
            values = take(location.names[0], slice(expert, expert + 1))[0]
        stacked[expert] = (values.T if location.transposed else values)[location.rows]
    return stacked
