"""Activation functions of f32 in registers."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..ptx import Builder, Value


def silu(k: Builder, x: Value) -> Value:
    """x / (1 + exp(-x)); large negative x, whose exponential overflows, give -0."""
    return x / (k.instruction("ex2.approx.f32", x * -math.log2(math.e)) + 1.0)


def gelu(k: Builder, x: Value) -> Value:
    """x / 2 * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 x^3), computed as x / (1 + exp(-2 z)).

    The tanh approximation of Hendrycks and Gimpel 2016. Large |x| give x and -0, also where x^3 overflows.
    """
    scale = 2 * math.sqrt(2 / math.pi)
    z2 = x * k.fma(x * x, 0.044715 * scale, scale)
    return x / (k.instruction("ex2.approx.f32", z2 * -math.log2(math.e)) + 1.0)


ACTIVATIONS: dict[str, Callable[[Builder, Value], Value]] = {"silu": silu, "gelu": gelu}
