"""Defines the Flax Variable type of packed weights."""

from __future__ import annotations

from typing import Any

from flax import nnx

import jax_q4k as jq


class Packed(nnx.Variable[jq.QuantizedArray]):
    """Flax Variable of packed weights: bytes without gradients, which no optimizer updates.

    A separate Variable type, so that `nnx.Param` selects exactly the trainable weights.
    """


def variable(weight: Any) -> nnx.Variable[Any]:
    """Wraps a weight in Packed if it is packed, else in nnx.Param."""
    return Packed(weight) if jq.is_quantized(weight) else nnx.Param(weight)
