"""Packs sampling parameters of rows into an int32 matrix, so that a step has one argument."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .stages import SamplingArrays, SamplingStages

_FLOATS = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "biases",
}
#: Field -> the attribute of `SamplingStages` that is its number of columns; others have one.
_WIDTHS = {"bias_ids": "biases", "biases": "biases", "end_ids": "ends"}


def pack(parameters: SamplingArrays) -> np.ndarray:
    """Returns NumPy sampling parameters as int32 (batch, `columns_of`); floats keep their bits."""
    columns = []
    for field in dataclasses.fields(parameters):
        values = np.asarray(getattr(parameters, field.name))
        values = values.reshape(len(values), -1)
        if field.name == "dry_breaks":
            padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 32)))
            values = np.packbits(padded, axis=1, bitorder="little")
        columns.append(np.ascontiguousarray(values).view(np.int32))
    return np.concatenate(columns, axis=1)


def columns_of(stages: SamplingStages, vocab_size: int) -> int:
    """Returns the number of columns of packed parameters for a program with `stages`."""
    return sum(_width(field.name, stages, vocab_size) for field in _fields())


def unpack(rows: jax.Array, stages: SamplingStages, vocab_size: int) -> SamplingArrays:
    """Returns the parameters of packed rows, int32 (batch, `columns_of`), inside jit."""
    arrays, at = {}, 0
    for field in _fields():
        width = _width(field.name, stages, vocab_size)
        values = rows[:, at : at + width]
        at += width
        if field.name == "dry_breaks":
            bits = jnp.arange(32, dtype=jnp.int32)[None, None]
            values = (values[..., None] >> bits & 1).reshape(len(rows), -1) > 0
            arrays[field.name] = values[:, : vocab_size if stages.dry else 0]
            continue
        if field.name in _FLOATS:
            values = jax.lax.bitcast_convert_type(values, jnp.float32)
        elif field.name == "seed":
            values = jax.lax.bitcast_convert_type(values, jnp.uint32)
        arrays[field.name] = values if field.name in _WIDTHS else values[:, 0]
    return SamplingArrays(**arrays)


def _fields() -> tuple[dataclasses.Field[jax.Array], ...]:
    return dataclasses.fields(SamplingArrays)


def _width(name: str, stages: SamplingStages, vocab_size: int) -> int:
    if name == "dry_breaks":
        return -(-vocab_size // 32) if stages.dry else 0
    return getattr(stages, _WIDTHS[name]) if name in _WIDTHS else 1
