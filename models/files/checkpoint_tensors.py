"""Where a checkpoint keeps each tensor of a GGUF file, and how it is read from there.

A checkpoint's tensor may hold the rows of several, an expert may have a tensor of its own, and
matrices may be transposed; rows or one expert are in memory at a time beside the result.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_q4k import QuantizedArray

from ..architecture import CheckpointClass, Stored
from ..architecture_tensors import Tensor
from ..config import Config
from ..tensors import Expected, expected_tensors, table
from .safetensors import Weights

_MXFP4 = 32  # weights of a block: 16 bytes, and one of scale


@dataclasses.dataclass(frozen=True)
class Place:
    """Rows of a checkpoint's tensor, or of one tensor for each expert.

    Attributes:
      names: in checkpoints; several are those of experts, to be stacked.
      shape: that the checkpoint's tensor, or each of them, has to have.
      rows: which are this tensor's, of each expert if it is of experts.
      of_experts: (experts, n, k), or biases (experts, n).
      transposed, as_row: as `Stored` has them.
      packed: names are those of MXFP4's blocks; their scales have the names `scales`.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: slice
    of_experts: bool = False
    transposed: bool | None = False
    as_row: bool = False
    packed: bool = False

    @property
    def scales(self) -> tuple[str, ...]:
        """The names of MXFP4's scales; (): it is not packed."""
        return (self.names[0].removesuffix("_blocks") + "_scales",) if self.packed else ()

    def resolved(self, stored: tuple[int, ...]) -> Place:
        """The place where it is `stored` in this shape, which may tell whether it is transposed."""
        if self.transposed is not None:
            return self
        *experts, k, n = self.shape
        if stored == self.shape or stored != (*experts, n, k):
            return dataclasses.replace(self, transposed=True)
        return dataclasses.replace(self, transposed=False, shape=stored)


def places(config: Config, checkpoint: CheckpointClass, packed: bool = False) -> dict[str, Place]:
    """GGUF's name -> its place, of every tensor that checkpoints of this class may hold.

    packed: experts are MXFP4's blocks and scales.
    """
    expected, found = expected_tensors(config), {}
    stored = {name: entry for entry in checkpoint.stored for name in entry.holds}
    for tensor, gguf, prefix, _ in table(config):
        if tensor.checkpoint is None:
            continue
        where = stored.get(tensor.gguf, Stored(tensor.checkpoint, (tensor.gguf,)))
        for suffix in dict.fromkeys((tensor.suffix, "bias")):
            name = f"{gguf}{tensor.gguf}.{suffix}"
            if name in expected:
                wholes = [expected[f"{gguf}{part}.{suffix}"] for part in where.holds]
                full = prefix + where.name + _suffix(where, tensor, suffix)
                place = _place(where, full, wholes, where.holds.index(tensor.gguf))
                found[name] = _of_blocks(place) if packed and _is_packed(place) else place
    return found


def _suffix(where: Stored, tensor: Tensor, suffix: str) -> str:
    if suffix == tensor.suffix == "bias":  # all that there is of it
        return ""
    if where.bare:
        return "" if suffix == "weight" else f"_{suffix}"
    return f".{suffix}"


def _place(where: Stored, name: str, held: list[Expected], at: int) -> Place:
    """The place of the tensor `held[at]` in one that holds the rows of all of `held`."""
    entry, shape = held[at].entry, held[at].shape
    of_experts = entry.bias == "experts"
    experts, leading = (shape[0], shape[:1]) if of_experts else (1, ())
    counts = [part.shape[len(leading)] for part in held]
    start = sum(counts[:at])
    rows = slice(at, None, len(held)) if where.alternating else slice(start, start + counts[at])
    whole = (sum(counts), *shape[len(leading) + 1 :])
    transposed = False if held[at].is_bias else where.transposed
    whole = whole if transposed is False else whole[::-1]
    if "{expert}" in where.name:
        names, leading = tuple(name.format(expert=i) for i in range(experts)), ()
    else:
        names = (name,)
    whole = (1, *whole) if where.as_row else whole
    return Place(names, (*leading, *whole), rows, of_experts, transposed, where.as_row)


def _is_packed(place: Place) -> bool:
    return place.of_experts and len(place.shape) == 3


def _of_blocks(place: Place) -> Place:
    """MXFP4's: blocks lie along k, so that rows are not transposed; (experts, n, k / 32, 16)."""
    experts, n, k = place.shape
    if place.transposed:
        n, k = k, n
    name, shape = f"{place.names[0]}_blocks", (experts, n, k // _MXFP4, _MXFP4 // 2)
    return dataclasses.replace(place, names=(name,), shape=shape, transposed=False, packed=True)


def read(weights: Weights, place: Place, shape: tuple[int, ...]) -> np.ndarray | QuantizedArray:
    """A tensor of this shape from its place."""
    if place.packed:
        return _mxfp4(weights, place, shape)
    if not place.of_experts:
        [name] = place.names
        if place.as_row:
            return weights.read(name)[0]
        return weights.read(name, place.rows)
    first = weights.stored[place.names[0]]
    stacked = np.empty(shape, first.numpy_dtype)
    for expert in range(shape[0]):
        values = _of_expert(weights, place.names, expert)
        stacked[expert] = (values.T if place.transposed else values)[place.rows]
    return stacked


def _of_expert(weights: Weights, names: tuple[str, ...], expert: int) -> np.ndarray:
    if len(names) > 1:
        return weights.read(names[expert])
    return weights.read(names[0], slice(expert, expert + 1))[0]


def _mxfp4(weights: Weights, place: Place, shape: tuple[int, ...]) -> QuantizedArray:
    """MXFP4 as GGUF has it: its scale before a block, whose byte j has the weights j and j + 16.

    A checkpoint's byte j has the weights 2j and 2j + 1, the first in its lower half, too. A scale
    is that of both formats: of weights in halves, e - 127 is e - 128 of their doubles.
    """
    packed = np.empty((*shape[:2], shape[2] // _MXFP4, 1 + _MXFP4 // 2), np.uint8)
    for expert in range(shape[0]):
        blocks = _of_expert(weights, place.names, expert)[place.rows]
        codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], _MXFP4)
        packed[expert, ..., 0] = _of_expert(weights, place.scales, expert)[place.rows]
        packed[expert, ..., 1:] = codes[..., : _MXFP4 // 2] | codes[..., _MXFP4 // 2 :] << 4
    return QuantizedArray.from_gguf_bytes(packed.reshape(-1), "MXFP4", shape)
