"""A new operation is one file plus its kernel.

The fictitious operation declared here has everything that the package's own have.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k.ops.op import KernelCall, Op
from jax_q4k.ops.vmaps import by_rows
from ptx_kernels.ptx import Builder, f32, kernel

# --- the kernel's file ---


@kernel
def scale_rows_kernel(k: Builder, *, rows: int, columns: int) -> None:
    """y[r, c] = x[r, c] * scale[c], with one thread per column."""
    x, scale = k.input("x", f32, (rows, columns)), k.input("scale", f32, (columns,))
    y = k.output("y", f32, (rows, columns))
    k.launch((rows, -(-columns // 64)), 64)
    row, column = k.block_id(), k.block_id("y") * 64 + k.thread_id
    with k.when(column < columns):
        y.at(row, column).store(0, x.at(row, column).load() * scale.at(column).load())


# --- the operation's file ---


def scale_rows(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies x (m, k) by scale (k,)."""
    y: jax.Array = _op.bind(x, scale)
    return y


def reference(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`scale_rows` in plain JAX."""
    return x * scale


def ptx(launch: KernelCall, x: jax.Array, scale: jax.Array) -> jax.Array:
    """`scale_rows` by a PTX kernel."""
    (y,) = launch(scale_rows_kernel(rows=x.shape[0], columns=x.shape[1]), x, scale)
    return y


_op = Op(
    "scale_rows",
    reference,
    shapes=lambda x, scale: x,
    ptx=ptx,
    vmap=by_rows,
    derivative="reference",
)


# --- results ---


X, SCALE = np.arange(300, dtype=np.float32).reshape(3, 100), np.linspace(1, 2, 100, dtype="f4")


@pytest.mark.parametrize("implementation", [None, "xla", "sim"])
@pytest.mark.parametrize("compiled", [False, True])
def test_runs_by_every_implementation(implementation, compiled):
    function = jax.jit(scale_rows) if compiled else scale_rows
    got = jq.implementation(implementation)(function)(X, SCALE)
    np.testing.assert_array_equal(got, X * SCALE)


def test_a_jitted_function_follows_the_context():
    function = jax.jit(scale_rows)
    function(X, SCALE)
    with jq.implementation("ptx"), pytest.raises(jq.UnavailableError, match="scale_rows: .*'ptx'"):
        function(X, SCALE)


@pytest.mark.parametrize("implementation", ["xla", "sim"])
def test_vmap_of_rows_is_one_call_and_of_others_one_per_example(implementation):
    batch = np.stack([X, -X])
    for axes, want in ((0, None), batch * SCALE), ((0, 0), batch * np.stack([SCALE] * 2)[:, None]):
        scale = SCALE if axes[1] is None else np.stack([SCALE] * 2)
        with jq.implementation(implementation):
            mapped = jax.vmap(scale_rows, in_axes=axes)
            np.testing.assert_array_equal(mapped(batch, scale), want)
        assert ("scan" in str(jax.make_jaxpr(mapped)(batch, scale))) == (axes[1] is not None)


@pytest.mark.parametrize("implementation", ["xla", "sim"])
def test_derivatives(implementation):
    def loss(x, scale):
        return jnp.sum(scale_rows(x, scale) ** 2)

    with jq.implementation(implementation):
        dx, dscale = jax.grad(loss, argnums=(0, 1))(X, SCALE)
    np.testing.assert_allclose(dx, 2 * X * SCALE**2, rtol=1e-6)
    np.testing.assert_allclose(dscale, np.sum(2 * X**2 * SCALE, axis=0), rtol=1e-6)


def test_explained_and_lowered_for_a_gpu():
    found = jq.explain(scale_rows, X, SCALE, platform="cuda")
    assert "scale_rows x1: f32[3,100], f32[100] -> f32[3,100]" in str(found)
    assert "launch scale_rows_kernel: 3x2 blocks of 64 threads" in str(found)
    lowered = jax.jit(scale_rows).trace(X, SCALE).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.ptx") == found.launches == 1


def test_explained_where_it_cannot_run():
    with jq.implementation("ptx"):
        (call,) = jq.explain(scale_rows, X, SCALE, platform="cpu").calls
    assert not call.runnable and "it runs on cuda only" in call.why
