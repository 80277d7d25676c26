"""Activation functions in registers against float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import nmse
from oracles import gated

from ptx_kernels import simulator
from ptx_kernels.kernels.activation import ACTIVATIONS
from ptx_kernels.ptx import Builder, f32, kernel


@kernel
def apply(k: Builder, *, name: str, count: int) -> None:
    x = k.input("x", f32, (count,))
    y = k.output("y", f32, (count,))
    k.launch((count // 32,), 32)
    thread = k.block_id() * 32 + k.thread_id
    y.store(thread, ACTIVATIONS[name](k, x.load(thread)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_float64(name: str) -> None:
    x = np.linspace(-12, 12, 1024, dtype=np.float32)
    (y,) = simulator.run(apply(name=name, count=1024), x)
    assert nmse(y, gated(name, x.astype(np.float64), np.float64(1))) <= 1e-13
    near = np.abs(x) < 3
    np.testing.assert_allclose(
        y[near], gated(name, x.astype(np.float64), np.float64(1))[near], rtol=1e-5
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_and_special_values(name: str) -> None:
    x = np.zeros(32, np.float32)
    x[:7] = [-200, 200, -3e38, 3e38, np.inf, np.nan, -0.0]
    (y,) = simulator.run(apply(name=name, count=32), x)
    np.testing.assert_array_equal(y[:7], np.float32([-0.0, 200, -0.0, 3e38, np.inf, np.nan, -0.0]))
    assert np.signbit(y[[0, 2, 6]]).all()
