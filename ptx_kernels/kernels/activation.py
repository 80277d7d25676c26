"""Emits sigmoid, softplus, tanh and the gates of feed-forward networks (silu, gelu, swiglu)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from ..ptx import Builder, Value, f32, u32

LOG2_E = math.log2(math.e)
SWIGLU_OAI_LIMIT, SWIGLU_OAI_SLOPE = 7.0, 1.702
#: tanh(x) = x + x^3 P(x^2) for |x| < 0.625 within 2^-26 relative. The coefficients minimize the
#: relative error; lowest power first.
_TANH = (-0.333332819, 0.133314422, -0.0537397122, 0.0206390787, -0.00570497837)
#: log(1 + t) = s (2 + s^2 P(s^2)) with s = t / (2 + t), for t from 0 to 1 within 2^-27 relative.
#: The coefficients minimize the relative error; lowest power first.
_LOG_1P = (0.666664183, 0.400215268, 0.280018061, 0.280119896)


def tanh(k: Builder, x: Value) -> Value:
    """Emits tanh(x), with an error of a few ulp (`tanh.approx`: 2^-11); NaN stays NaN.

    Uses a polynomial near 0, and 2^x elsewhere.
    """
    magnitude = k.abs(x)
    power = k.exp2(magnitude * (-2 * LOG2_E))
    large = (1.0 - power) * k.reciprocal(power + 1.0)
    signed = (large.bits(u32) | (x.bits(u32) & 0x80000000)).bits(f32)
    square = x * x
    series = _polynomial(k, _TANH, square)
    return k.select(magnitude < 0.625, k.fma(x * square, series, x), signed)


def _polynomial(k: Builder, coefficients: Sequence[float], x: Value) -> Value:
    """Emits a polynomial of x by Horner's rule; coefficients with the lowest power first."""
    *rest, last = coefficients
    return functools.reduce(lambda total, c: k.fma(total, x, c), reversed(rest), k.const(f32, last))


def sigmoid(k: Builder, x: Value) -> Value:
    """Emits 1 / (1 + exp(-x)), within a few ulp."""
    return k.reciprocal(k.exp2(x * -LOG2_E) + 1.0)


def softplus(k: Builder, x: Value) -> Value:
    """Emits log(1 + exp(x)), accurate for large and small x.

    It is computed as max(x, 0) + log(1 + exp(-|x|)).
    """
    power = k.exp2(k.abs(x) * -LOG2_E)
    s = power * k.reciprocal(power + 2.0)
    square = s * s
    return k.maximum(x, 0.0) + s * k.fma(square, _polynomial(k, _LOG_1P, square), 2.0)


def silu(k: Builder, x: Value) -> Value:
    """Emits x / (1 + exp(-x)), within a few ulp.

    The result is -0 for large negative x, where exp(-x) overflows.
    """
    return x * sigmoid(k, x)


def gelu(k: Builder, x: Value) -> Value:
    """Emits GELU: x / 2 * (1 + tanh(z)), z = sqrt(2 / pi) * (x + 0.044715 x^3).

    This is the tanh approximation of Hendrycks and Gimpel 2016, computed as x / (1 + exp(-2 z)).
    Large |x| give x and -0, even if x^3 overflows.
    """
    scale = 2 * math.sqrt(2 / math.pi)
    z2 = x * k.fma(x * x, 0.044715 * scale, scale)
    return x * sigmoid(k, z2)


def swiglu_oai(k: Builder, gate: Value, up: Value) -> Value:
    """Emits g / (1 + exp(-1.702 g)) * (u + 1) with g = min(gate, 7), u = clip(up, -7, 7).

    NaN stays NaN. This is the gate of gpt-oss (https://github.com/openai/gpt-oss, `swiglu`).
    """
    limit = k.const(f32, SWIGLU_OAI_LIMIT)
    g = k.select(gate > SWIGLU_OAI_LIMIT, limit, gate)
    u = k.select(up > SWIGLU_OAI_LIMIT, limit, up)
    u = k.select(u < -SWIGLU_OAI_LIMIT, -limit, u)
    return g * sigmoid(k, g * SWIGLU_OAI_SLOPE) * (u + 1.0)


#: Name -> gate(k, gate, up) of the products with the two matrices.
GATES: dict[str, Callable[[Builder, Value, Value], Value]] = {
    "silu": lambda k, gate, up: silu(k, gate) * up,
    "gelu": lambda k, gate, up: gelu(k, gate) * up,
    "swiglu_oai": swiglu_oai,
}
