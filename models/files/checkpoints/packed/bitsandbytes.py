"""Decodes bitsandbytes checkpoints: NF4, FP4 and int8.

Source: `QuantState` and `dequantize_4bit` of bitsandbytes (bitsandbytes/functional.py), and
`int8_vectorwise_dequant` (bitsandbytes/backends/default/ops.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_q4k import CheckpointError

from ....support.json_fields import JSONFields
from ..safetensors import DTYPES, Weights
from .base import PackedTensor, modules, pieces

_KINDS = ("nf4", "fp4")
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INT8_SCALE = np.float32(1 / 127)
_MAX_STATE = 1 << 16  # bytes of a weight's settings


@dataclasses.dataclass(frozen=True)
class FourBits(PackedTensor):
    """A weight as 4-bit indices of a table, times the largest magnitude of their block.

    Attributes:
      blocksize: consecutive weights of a block.
      nested_blocksize: magnitudes with one magnitude of their own; 0: magnitudes are floats.
      offset: added to magnitudes after they are decoded.
    """

    blocksize: int = 64
    nested_blocksize: int = 0
    offset: float = 0.0

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        n, k = self.shape
        first, last, _ = rows.indices(n)
        stored = np.frombuffer(weights.raw(self.name).tobytes(), np.uint8)
        table = weights.raw(f"{self.name}.quant_map").astype(np.float32)
        largest = self._largest(weights)
        out = np.empty((last - first, k), DTYPES[self.dtype])
        for piece in pieces(first, last, k):
            begin, end = piece.start * k, piece.stop * k
            held = stored[begin // 2 : -(-end // 2)]  # the first index is in the high half
            indices = np.stack((held >> 4, held & 15), axis=-1).reshape(-1)
            indices = indices[begin % 2 :][: end - begin]
            of_blocks = largest[np.arange(begin, end) // self.blocksize]
            with np.errstate(over="ignore", invalid="ignore"):
                values = (table[indices] * of_blocks).astype(out.dtype)
            out[piece.start - first : piece.stop - first] = values.reshape(-1, k)
        return out

    def _largest(self, weights: Weights) -> np.ndarray:
        """Returns the largest magnitude of each block, float32."""
        stored = weights.raw(f"{self.name}.absmax")
        if not self.nested_blocksize:
            return stored.astype(np.float32)
        table = weights.raw(f"{self.name}.nested_quant_map").astype(np.float32)
        nested = weights.raw(f"{self.name}.nested_absmax").astype(np.float32)
        of_each = nested[np.arange(len(stored)) // self.nested_blocksize]
        return table[stored] * of_each + np.float32(self.offset)


@dataclasses.dataclass(frozen=True)
class EightBits(PackedTensor):
    """A weight in int8 (n, k), with the largest magnitude of each row in `SCB` (n,)."""

    module: str = ""

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        largest = weights.raw(f"{self.module}.SCB", rows).astype(np.float32)
        return weights.raw(self.name, rows).astype(np.float32) * largest[:, None] * _INT8_SCALE


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the quantized weights."""
    for kind in _KINDS:
        ending = f"quant_state.bitsandbytes__{kind}"
        for name in modules(weights, ending):
            yield _four_bits(weights, name, f"{name}.{ending}")
    for module in modules(weights, "SCB"):
        yield _eight_bits(weights, module)


def _four_bits(weights: Weights, name: str, state: str) -> FourBits:
    """Describes a weight whose settings are JSON in tensor `state`, after checking its parts."""
    bytes_of_state = math.prod(weights.expect(state, ("U8",)).shape)
    if bytes_of_state > _MAX_STATE:
        weights.fail(state, f"has {bytes_of_state} bytes, at most {_MAX_STATE} are supported")
    settings = _settings(weights, state)
    shape = tuple(settings.array("shape"))
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        settings.fail("shape", f"is {list(shape)!r:.100}, expected two positive integers")
    kind = settings.string("dtype")
    if kind not in _TYPES:
        settings.fail("dtype", f"is {kind!r:.100}; supported: {', '.join(_TYPES)}")
    count, blocksize = math.prod(shape), settings.integer("blocksize", least=1)
    codes = weights.expect(name, ("U8", "I8", "F16", "BF16", "F32"))  # bytes, of whatever type
    if codes.nbytes != -(-count // 2):
        weights.fail(name, f"has {codes.nbytes} bytes, expected {-(-count // 2)} for {shape}")
    parts, blocks = [name, state], -(-count // blocksize)
    table = f"{name}.quant_map"
    weights.expect(table, ("F32",), (16,))
    absmax = f"{name}.absmax"
    nested, offset = 0, 0.0
    if f"{name}.nested_absmax" in weights.stored:
        nested = settings.integer("nested_blocksize", least=1)
        offset = float(settings.number("nested_offset"))
        weights.expect(absmax, ("U8",), (blocks,))
        weights.expect(f"{name}.nested_absmax", ("F32",), (-(-blocks // nested),))
        weights.expect(f"{name}.nested_quant_map", ("F32",), (256,))
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    else:
        weights.expect(absmax, ("F32",), (blocks,))
    parts += [table, absmax]
    label = "4-bit bitsandbytes"
    packed = name, shape, _TYPES[kind], tuple(parts), label, None
    return FourBits(*packed, blocksize, nested, offset)


def _settings(weights: Weights, state: str) -> JSONFields:
    """Returns the JSON object that a uint8 tensor holds."""
    file = str(weights.stored[state].file)
    try:
        values: Any = json.loads(weights.raw(state).tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"tensor {state!r}", f"is no JSON: {error}") from None
    return JSONFields(values, file, f"tensor {state!r}: ")


def _eight_bits(weights: Weights, module: str) -> EightBits:
    """Describes an int8 weight, after checking its parts."""
    name, scales, layout = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    shape = weights.expect(name, ("I8",)).shape
    if len(shape) != 2:
        weights.fail(name, f"has shape {shape}, expected a matrix")
    weights.expect(scales, ("F32", "F16", "BF16"), shape[:1])
    parts = [name, scales]
    if layout in weights.stored:
        if weights.expect(layout, ("U8",)).shape not in ((), (1,)):
            weights.fail(layout, f"has shape {weights.stored[layout].shape}, expected one number")
        if (value := int(weights.raw(layout).reshape(()))) != 0:
            weights.fail(layout, f"is {value}, expected 0, which is rows")
        parts.append(layout)
    return EightBits(name, shape, "F32", tuple(parts), "int8 bitsandbytes", None, module)
