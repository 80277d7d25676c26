"""Run in a copy of the sources that has Q4_X: everything takes the format."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq
from jax_q4k import native
from ptx_kernels import formats, simulator
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.gemm import gemm_rule
from ptx_kernels.kernels.matvec import float_matvec_rule, matvec_rule
from ptx_kernels.tuning import choose

N, COLUMNS = 24, 320


def near(got, want, limit):
    error = np.sum((np.asarray(got, np.float64) - want) ** 2) / np.sum(want**2)
    assert error <= limit, (error, limit)


def check_kernels(planes, weights):
    """The simulated mat-vecs, product and decoder against the NumPy decoder."""
    shape = dict(format="Q4_X", n=N, columns=COLUMNS)
    rng = np.random.default_rng(1)
    (decoded,) = simulator.run(KERNELS["decode"](format="Q4_X", n=N, blocks=COLUMNS // 32), *planes)
    np.testing.assert_array_equal(decoded, weights)
    for m in (1, 3, 20):
        x = rng.standard_normal((m, COLUMNS), np.float32)
        quantized = simulator.run(KERNELS["quantize_q8_1"](rows=m, columns=COLUMNS), x)
        seen = quantized[0].reshape(m, -1, 32) * quantized[1][..., :1].astype(np.float64)
        want = seen.reshape(m, COLUMNS) @ weights.T.astype(np.float64)
        rule, family = (matvec_rule, "matvec") if m <= 8 else (gemm_rule, "gemm")
        config = choose(rule, "Q4_X", N, COLUMNS, m)
        (y,) = simulator.run(KERNELS[family](**shape, m=m, config=config), *planes, *quantized)
        near(y, want, 1e-11)
        if m <= 8:
            config = choose(float_matvec_rule, ("Q4_X",), (N,), COLUMNS, m)
            (y,) = simulator.run(KERNELS["matvec"](**shape, m=m, config=config), *planes, x)
            near(y, x.astype(np.float64) @ weights.T, 1e-11)


def main():
    assert "Q4_X" in formats.names() and "Q4_X" in jq.formats.names()
    w = np.random.default_rng(0).standard_normal((N, COLUMNS), np.float32)
    packed = jq.quantize(w, "Q4_X")
    planes = [np.asarray(plane) for plane in packed.planes]
    weights = formats.get("Q4_X").decode(planes)
    near(weights, w.astype(np.float64), 0.01)
    again = jq.quantize(weights, "Q4_X")  # values on a grid of the format, nearly kept
    near(formats.get("Q4_X").decode([np.asarray(p) for p in again.planes]), weights, 1e-4)
    check_kernels(planes, weights)

    assert not native.problem(), native.problem()
    with jq.implementation("native", activations="f32"):
        for m in (1, 20):
            x = np.random.default_rng(m).standard_normal((m, COLUMNS), np.float32)
            near(
                jax.jit(jq.matmul)(jnp.asarray(x), packed), x.astype(np.float64) @ weights.T, 1e-10
            )
    with jq.implementation("native", activations="q8_1"):
        x = np.random.default_rng(2).standard_normal((9, COLUMNS), np.float32)
        near(jax.jit(jq.matmul)(jnp.asarray(x), packed), x.astype(np.float64) @ weights.T, 1e-3)
    with jq.implementation("native"):
        rows = jq.embedding(jnp.arange(5), packed)
    np.testing.assert_allclose(rows, weights[:5], rtol=1e-6)


main()
