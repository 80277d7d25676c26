"""Helpers that several test modules share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "data" / "golden"


def nmse(got, want) -> float:
    """Mean squared error over mean square of `want`, in float64; NaN if any value is NaN.

    Compare as `nmse(got, want) <= tolerance`, which a NaN fails. An all-zero `want` gives 0 for an
    all-zero `got` and inf otherwise.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {got.shape}, want {want.shape}")
    error, power = np.sum((got - want) ** 2), np.sum(want**2)
    if power == 0:
        return 0.0 if error == 0 else float("nan") if np.isnan(error) else float("inf")
    return float(error / power)
