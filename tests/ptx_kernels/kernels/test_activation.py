"""Activation functions in registers against float64."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import gated

from ptx_kernels import simulator
from ptx_kernels.kernels.activation import GATES, sigmoid, softplus
from ptx_kernels.ptx import Builder, f32, kernel


@kernel
def apply(k: Builder, *, name: str, count: int) -> None:
    x, up = k.input("x", f32, (count,)), k.input("up", f32, (count,))
    y = k.output("y", f32, (count,))
    k.launch((count // 32,), 32)
    thread = k.block_id() * 32 + k.thread_id
    y.store(thread, GATES[name](k, x.load(thread), up.load(thread)))


@pytest.mark.parametrize("name", GATES)
def test_equals_float64(name: str) -> None:
    x = np.linspace(-12, 12, 1024, dtype=np.float32)
    up = np.random.default_rng(0).uniform(-12, 12, 1024).astype(np.float32)
    (y,) = simulator.run(apply(name=name, count=1024), x, up)
    want = gated(name, x.astype(np.float64), up.astype(np.float64))
    assert nmse(y, want) <= 1e-13
    near = np.abs(x) < 3
    np.testing.assert_allclose(y[near], want[near], rtol=1e-5)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_large_and_special_values(name: str) -> None:
    x = np.zeros(32, np.float32)
    x[:7] = [-200, 200, -3e38, 3e38, np.inf, np.nan, -0.0]
    (y,) = simulator.run(apply(name=name, count=32), x, np.ones_like(x))
    np.testing.assert_array_equal(y[:7], np.float32([-0.0, 200, -0.0, 3e38, np.inf, np.nan, -0.0]))
    assert np.signbit(y[[0, 2, 6]]).all()


def test_clipped_gate_keeps_nan() -> None:
    """Both factors are clipped at 7, the second also at -7; a NaN in either one is kept."""
    gate = np.zeros(32, np.float32)
    up = np.zeros(32, np.float32)
    gate[:7] = [7, 1e30, np.inf, np.nan, 7, 7, -3e38]
    up[:7] = [7, 7, np.inf, 7, np.nan, -np.inf, 7]
    (y,) = simulator.run(apply(name="swiglu_oai", count=32), gate, up)
    most = 7 / (1 + np.exp(-1.702 * 7))
    want = [most * 8, most * 8, most * 8, np.nan, np.nan, most * -6, 0]
    np.testing.assert_allclose(y[:7], want, rtol=1e-6)


@kernel
def one_of(k: Builder, *, name: str, count: int) -> None:
    x, y = k.input("x", f32, (count,)), k.output("y", f32, (count,))
    k.launch((count // 32,), 32)
    thread = k.block_id() * 32 + k.thread_id
    y.store(thread, {"sigmoid": sigmoid, "softplus": softplus}[name](k, x.load(thread)))


@pytest.mark.parametrize("name", ["sigmoid", "softplus"])
def test_functions_of_gates(name: str) -> None:
    """Within their precision, even if the result is tiny or the exponential overflows."""
    x = np.linspace(-40, 40, 2048, dtype=np.float32)
    x[:8] = [-1e30, 1e30, -np.inf, np.inf, np.nan, -0.0, 200, -80]
    (y,) = simulator.run(one_of(name=name, count=2048), x)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        want = 1 / (1 + np.exp(-exact)) if name == "sigmoid" else np.logaddexp(0, exact)
    np.testing.assert_allclose(y, want, rtol=8e-6, atol=1e-38)  # exp(x) has |x| ulp of error
    near = np.abs(x) < 4
    np.testing.assert_allclose(y[near], want[near], rtol=1e-6)
