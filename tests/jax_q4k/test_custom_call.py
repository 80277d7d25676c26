"""Simulated launches inside JAX programs: the same numbers and errors as outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_q4k.custom_call import launch_simulated
from ptx_kernels import simulator
from ptx_kernels.ptx import Builder, f32, kernel


@kernel
def scaled(k: Builder, *, n: int, factor: float) -> None:
    """y = factor * 2^x; out of bounds for n below 32."""
    x, y = k.input("x", f32, (32,)), k.output("y", f32, (n,))
    k.launch((1,), 32)
    y.store(k.lane_id, k.instruction("ex2.approx.f32", x.load(k.lane_id)) * factor)


def run(built, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda x: launch_simulated(built, x)[0])(jnp.asarray(x)))


def test_subnormals_are_kept() -> None:
    """XLA's own threads flush subnormals to zero, and NumPy would on those threads."""
    x = np.linspace(-149, -127, 32, dtype=np.float32)
    built = scaled(n=32, factor=2.0**60)
    np.testing.assert_array_equal(run(built, x), simulator.run(built, x)[0])
    assert run(built, x).all()


def test_errors_name_the_source_line() -> None:
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"(?s)OutOfBounds.*kernel scaled.*written by test_custom_call",
    ):
        jax.block_until_ready(run(scaled(n=7, factor=1.0), np.zeros(32, np.float32)))


def test_perturbation_reaches_launches_in_programs() -> None:
    x = np.linspace(0.1, 2, 32, dtype=np.float32)
    built = scaled(n=32, factor=1.0)
    with simulator.perturbation(3):
        got, want = run(built, x), simulator.run(built, x)[0]
    np.testing.assert_array_equal(got, want)
    assert (got != simulator.run(built, x)[0]).any()
