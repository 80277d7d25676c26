"""Measurements of the benchmark of stacked layers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.implementations import needs_native

from benchmarks import stacked_layers
from tools import aot


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in dict(SHAPES=((3, 256),), ROWS=(1,), SECONDS=0.0, ROUNDS=1).items():
        monkeypatch.setattr(stacked_layers, name, value)


def test_programs_compute_the_same():
    stack, each = stacked_layers.weights(3, 256)
    x = np.ones((1, 256), np.float32)
    want = stacked_layers.unrolled(x, each)
    assert np.isfinite(want).all() and np.any(want)
    for function in (stacked_layers.sliced, stacked_layers.indexed):
        np.testing.assert_array_equal(jax.jit(function)(x, stack), want)


@needs_native
def test_a_measurement():
    (found,) = stacked_layers.measure()
    assert min(found["milliseconds"].values()) > 0
    copied, inplace = (found["temporary_bytes"][name] for name in ("sliced", "indexed"))
    assert inplace < 256 * 144 <= copied


@pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
def test_programs_for_a_gpu():
    copied, inplace = stacked_layers.compiled_for_a_gpu()
    assert copied["packed_bytes_written"] >= 256 * 144 > inplace["packed_bytes_written"] == 0
