"""Products with weights decoded to float16, with kernels in the simulator, against float64.

`decoded_products=True` makes products of few rows take the path of thousands.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK
from support.helpers import nmse

import jax_q4k as jq
from ptx_kernels import formats, tuning

from .random_weights import random_weights

M, K, N = 72, 256, 64
EPS = 1e-5
FORMATS = formats.names()  # tensor cores take some of them packed, too
rng = np.random.default_rng(0)


def simulated(function: Any) -> Any:
    """Wraps a function to run kernels in the simulator, and decode weights."""
    return jq.implementation("sim", decoded_products=True)(function)


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def exact(x: Any, w: jq.QuantizedArray) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64).T


def launches(function: Any, *arguments: Any, decoded_products: bool | None = True) -> list[str]:
    with jq.implementation("sim", decoded_products=decoded_products):
        calls = jq.explain(function, *arguments).calls
    return [kernel.name for call in calls for kernel in call.kernels]


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_equals_float64(format: str, dtype: Any) -> None:
    x, w = normal(M, K, dtype=dtype), random_weights(format, N, K)
    assert launches(jq.matmul, x, w) == ["f16_rows", f"decode_{format.lower()}"]
    y = simulated(jq.matmul)(x.astype(jnp.float32), w)
    assert y.dtype == jnp.float32 and nmse(y, exact(x, w)) <= 2e-7
    assert simulated(jq.matmul)(x, w).dtype == dtype


NORM = jnp.asarray(rng.uniform(0.5, 2, K), jnp.float32)
QKV = tuple(
    random_weights(f, n, K, n) for f, n in zip(("Q4_K", "Q4_K", "Q6_K"), (N, N, 24), strict=True)
)
GATE, UP, DOWN = (
    random_weights(name, n, K, seed)
    for seed, (name, n) in enumerate((("Q4_K", K), ("Q6_K", K), ("Q5_K", N)))
)
BIASES = jnp.arange(64.0), None, jnp.ones(24)

#: f(x, residual (m, N), **options) -> results; all of them normalize x with NORM
CALLS = {
    "rms_norm_matmul": lambda x, r, **o: (
        jq.rms_norm_matmul(x, NORM, DOWN, eps=EPS, residual=r, bias=jnp.ones(N), **o),
    ),
    "qkv_matmul": lambda x, r, **o: jq.qkv_matmul(
        x, QKV, norm_weight=NORM, eps=EPS, biases=BIASES, **o
    ),
    "gated_matmul": lambda x, r, **o: (
        jq.gated_matmul(x, GATE, UP, norm_weight=NORM / 64, eps=EPS, **o),
    ),
    "mlp": lambda x, r, **o: (
        jq.mlp(x, GATE, UP, DOWN, norm_weight=NORM / 64, eps=EPS, residual=r, **o),
    ),
}
LAUNCHES = {
    "rms_norm_matmul": ["f16_rows", "decode_q5_k"],
    "qkv_matmul": ["f16_rows", "decode_q4_k", "decode_q4_k", "decode_q6_k"],
    "gated_matmul": ["f16_rows", "decode_q4_k", "decode_q6_k"],
    "mlp": ["f16_rows", "decode_q4_k", "decode_q6_k", "f16_rows", "decode_q5_k"],
}


@pytest.mark.parametrize("name", CALLS)
def test_fused_operations(name: str) -> None:
    operands = normal(M, K), normal(M, N)
    assert launches(CALLS[name], *operands) == LAUNCHES[name]
    with jq.implementation("xla"):
        precise = CALLS[name](*operands, activations="f32")
    for got, want in zip(simulated(CALLS[name])(*operands), precise, strict=True):
        assert got.dtype == jnp.float32 and nmse(got, want) <= 1e-6


@pytest.mark.parametrize("activation", jq.ACTIVATION_FUNCTIONS)
def test_gates(activation: str) -> None:
    x = normal(M, K) / 64
    call = functools.partial(jq.mlp, activation=activation)
    with jq.implementation("xla"):
        want = call(x, GATE, UP, DOWN, activations="f32")
    assert nmse(simulated(call)(x, GATE, UP, DOWN), want) <= 1e-6


def blocks(format: str, scales: np.ndarray, rows: int = N) -> jq.QuantizedArray:
    """Random quants with these block scales for each row."""
    block = formats.get(format)
    raw = np.random.default_rng(1).integers(0, 256, (rows, 1, block.block_bytes), np.uint8)
    for field in block.scale_fields:
        block.store_scale(raw, field, np.broadcast_to(scales[:, None], (rows, 1)))
    return jq.QuantizedArray.from_gguf_bytes(raw, format, (rows, K))


@pytest.mark.parametrize("format", ["Q4_K", "Q6_K"])
def test_no_magnitude_overflows(format: str) -> None:
    """Weights beyond float16 and below its normal range, activation rows from 2^-60 to 2^60."""
    w = blocks(format, np.resize([60000.0, 1.0, 6e-8, 1e-4], N))
    x = np.asarray(normal(M, K)) * np.exp2(np.linspace(-60, 60, M))[:, None]
    y = np.asarray(simulated(jq.matmul)(jnp.asarray(x, jnp.float32), w))
    want = exact(x.astype(np.float32), w)
    assert np.abs(np.asarray(w.dequantize())).max() > 65504 and np.isfinite(y).all()
    errors = [nmse(y[i, j::4], want[i, j::4]) for i in range(M) for j in range(4)]
    assert max(errors) <= 1e-6


def test_gated_products_of_many_magnitudes() -> None:
    """The intermediate values are float16."""
    scales = np.resize([300.0, 1.0, 6e-8, 1e-4], K)
    gate, up = blocks("Q4_K", scales[::-1] * 1e-3, K), blocks("Q6_K", scales, K)
    x = rng.uniform(0.5, 1.5, (M, K)) * np.exp2(np.linspace(-30, 0, M))[:, None]  # large sums
    with jq.implementation("xla"):
        want = jq.gated_matmul(jnp.asarray(x), gate, up, activations="f32")
    y = np.asarray(simulated(jq.gated_matmul)(jnp.asarray(x), gate, up))
    assert np.isfinite(y).all()
    assert max(nmse(y[i], w) for i, w in enumerate(np.asarray(want))) <= 1e-6


def test_an_outlier_leaves_the_rest_precise() -> None:
    x = normal(M, K).at[:, 7].set(30000.0)
    w = random_weights("Q8_0", N, K)
    weights = np.asarray(w.dequantize(), np.float64)
    rest = np.asarray(simulated(jq.matmul)(x, w), np.float64) - 30000 * weights[:, 7]
    want = np.asarray(x, np.float64) @ weights.T - 30000 * weights[:, 7]
    # float32 itself has an error of 2^-24 of the outlier's product; weights keep 11 bits of it
    assert np.abs(rest - want).max() <= 2.0**-11 * np.abs(30000 * weights[:, 7]).max()


@pytest.mark.grid
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_value_spoils_only_its_row(name: str, bad: float) -> None:
    x, residual = normal(M, K), normal(M, N)
    clean = simulated(CALLS[name])(x, residual)
    spoiled = simulated(CALLS[name])(x.at[5, 77].set(bad), residual)
    others = np.arange(M) != 5
    for got, want in zip(spoiled, clean, strict=True):
        assert not jnp.isfinite(got[5]).any()
        np.testing.assert_array_equal(got[others], want[others])


def test_a_weight_that_is_not_finite_spoils_its_column_alone() -> None:
    scales = np.full(N, 0.01)
    scales[3] = np.inf
    y = np.asarray(simulated(jq.matmul)(normal(M, K), blocks("Q4_K", scales)))
    assert not np.isfinite(y[:, 3]).any()
    assert np.isfinite(np.delete(y, 3, 1)).all()


def test_a_matrix_of_a_stack() -> None:
    matrices = [random_weights("Q4_K", N, K, seed) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *matrices)
    x = normal(M, K)
    y = simulated(lambda x, stack, i: jq.matmul(x, stack, index=i))(x, stack, jnp.int32(1))
    np.testing.assert_array_equal(y, simulated(jq.matmul)(x, matrices[1]))


@pytest.mark.parametrize("activations", ["f32", "q8_1"])
def test_activations_that_are_asked_for_stay(activations: str) -> None:
    call = functools.partial(jq.matmul, activations=activations)
    names = launches(call, normal(M, K), DOWN)
    assert "f16_rows" not in names
    assert names == (["decode_q5_k"] if activations == "f32" else ["quantize_q8_1", names[1]])


def test_derivatives_are_precise() -> None:
    x, dy = normal(M, K), normal(M, N)
    with jq.implementation("sim", decoded_products=True):
        y, back = jax.vjp(lambda x: jq.matmul(x, DOWN), x)
        (dx,) = back(dy)
        _, tangent = jax.jvp(lambda x: jq.matmul(x, DOWN), (x,), (x,))
    weights = np.asarray(DOWN.dequantize(), np.float64)
    assert nmse(dx, np.asarray(dy, np.float64) @ weights) <= 1e-10
    assert nmse(tangent, exact(x, DOWN)) <= 1e-10
    assert nmse(y, exact(x, DOWN)) <= 2e-7


def test_examples_of_a_vmap_are_rows() -> None:
    x = normal(3, M // 3, K)
    y = simulated(jax.vmap(lambda x: jq.matmul(x, DOWN)))(x)
    np.testing.assert_array_equal(y.reshape(M, N), simulated(jq.matmul)(x.reshape(M, K), DOWN))


def test_the_switch_overrides_the_rule() -> None:
    """The rule decodes for 2048 rows and not for 72; nothing decodes for 8 rows."""
    large = jq.QuantizedArray.zeros("Q4_K", (4096, 4096))
    for rows, expected in ((8, (0, 0, 0)), (72, (1, 0, 0)), (2048, (1, 0, 1))):
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        found = (launches(jq.matmul, x, large, decoded_products=d) for d in (True, False, None))
        assert tuple(names.count("decode_q4_k") for names in found) == expected
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    quantized = functools.partial(jq.matmul, activations="q8_1")
    assert "decode_q4_k" not in launches(quantized, x, large)
    odd = jq.QuantizedArray.zeros("Q4_K", (4092, 4096))  # no multiple of 8
    assert "decode_q4_k" not in launches(jq.matmul, x, odd)


def test_the_switch_overrides_a_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"formats": ["Q4_K"], "rows": [N], "columns": K, "m": M}
    row = {"kernel": "decoded_products", **shape, "config": {"decoded": True}, "seconds": 1e-5}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "source": "measured", "rows": [row]}))
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    arguments = normal(M, K), random_weights("Q4_K", N, K)
    with jq.implementation("sim"):
        (call,) = jq.explain(jq.matmul, *arguments).calls
    (choice,) = [choice for choice in call.chosen if choice.rule == "decoded_products"]
    assert choice.config.decoded and choice.why.startswith("measured for NVIDIA H200 (table.json)")
    assert "decode_q4_k" in [kernel.name for kernel in call.kernels]
    assert "decode_q4_k" not in launches(jq.matmul, *arguments, decoded_products=False)


def test_a_jitted_function_is_traced_again() -> None:
    step, arguments, texts = jax.jit(jq.matmul), (normal(M, K), random_weights("Q4_K", N, K)), {}
    for switch in (True, False, None):
        with jq.implementation(decoded_products=switch):
            texts[switch] = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert ["decode_q4_k" in text for text in texts.values()] == [True, False, False]


def test_the_switch_is_a_truth_value_or_none() -> None:
    with pytest.raises(ValueError, match="decoded_products=1 must be True, False or None"):
        jq.implementation(decoded_products=1)(lambda: None)()  # type: ignore[arg-type]


def test_turing_multiplies_packed_weights_if_it_must() -> None:
    """Weights are decoded by default, from 65 rows on."""
    x, w = jnp.zeros((512, 4096)), jq.QuantizedArray.zeros("Q4_K", (4096, 4096))
    found = []
    for switch in (None, False):
        with jq.implementation(decoded_products=switch):
            (call,) = jq.explain(jq.matmul, x, w, platform="cuda", device="Tesla T4").calls
        found.append([kernel.name for kernel in call.kernels])
    assert found == [["f16_rows", "decode_q4_k"], ["quantize_q8_1", "gemm_q4_k_m64"]]
