"""Means over tokens with their standard errors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean over tokens, or a function of means.

    Attributes:
      error: its standard error, assuming independent tokens; 0 for fewer than 11 tokens.
    """

    value: float
    error: float


def mean_of(values: np.ndarray) -> Estimate:
    """Returns the mean of values (n,)."""
    average, count = float(values.mean()), len(values)
    variance = float((values**2).mean()) - average**2
    error = math.sqrt(max(variance, 0.0) / (count - 1)) if count > 10 else 0.0
    return Estimate(average, error)


def exponential(estimate: Estimate) -> Estimate:
    """Returns the exponential of an estimate; infinite beyond float64."""
    try:
        value = math.exp(estimate.value)
    except OverflowError:
        return Estimate(math.inf, math.inf)
    return Estimate(value, value * estimate.error)
