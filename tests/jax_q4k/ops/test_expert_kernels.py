"""Mixtures of experts by PTX kernels, in the simulator, against plain JAX of the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import nmse

import jax_q4k as jq

EXPERTS, HIDDEN, INNER, TOP = 6, 256, 128, 3


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def stack(n: int, k: int, format: str) -> jq.QuantizedArray:
    return jq.quantize(random(EXPERTS, n, k) * np.float32(0.05), format)


GATE, UP = stack(INNER, HIDDEN, "Q4_K"), stack(INNER, HIDDEN, "Q6_K")
DOWN = stack(HIDDEN, INNER, "Q8_0")


def chosen(tokens: int) -> jax.Array:
    """Ids of experts, and some beyond either end."""
    rng = np.random.default_rng(tokens)
    return jnp.asarray(rng.integers(-1, EXPERTS + 1, (tokens, TOP)), jnp.int32)


def expert_mlp(x: jax.Array, ids: jax.Array, activations: str | None, all_terms: bool) -> Any:
    """Three formats; with all terms or none."""
    terms: dict[str, Any] = {}
    if all_terms:
        terms = dict(
            activation="swiglu_oai",
            biases=(random(EXPERTS, INNER), None, random(EXPERTS, HIDDEN)),
            down_scale=jnp.asarray(random(EXPERTS)),
            norm_weight=random(HIDDEN),
            eps=1e-5,
            residual=x,
        )
    weights = random(*ids.shape)
    return jq.expert_mlp(x, GATE, UP, DOWN, ids, weights, activations=activations, **terms)


def by(implementation: str, function: Any, *arguments: Any) -> Any:
    with jq.implementation(implementation):
        return np.asarray(function(*arguments).astype(jnp.float32))


@pytest.mark.parametrize("activations", ["q8_1", "f32"])
@pytest.mark.parametrize("tokens, all_terms", [(1, True), (3, False), (11, True)])
def test_expert_mlp(tokens: int, all_terms: bool, activations: str) -> None:
    """Eleven tokens are products on tensor cores, or XLA's of float32."""
    arguments = jnp.asarray(random(tokens, HIDDEN)), chosen(tokens), activations, all_terms
    got, want = (by(name, expert_mlp, *arguments) for name in ("sim", "xla"))
    assert nmse(got, want) <= (1e-6 if activations == "q8_1" else 1e-11)


@pytest.mark.parametrize("activations", ["q8_1", "f32"])
@pytest.mark.parametrize(
    "shape, dtype",
    [((2, HIDDEN), "bfloat16"), ((2, TOP, HIDDEN), "float32"), ((9, TOP, HIDDEN), "float32")],
)
def test_expert_matmul(shape: tuple[int, ...], dtype: str, activations: str) -> None:
    """One row of activations for all of a token's experts, or a row for each."""
    x = jnp.asarray(random(*shape), dtype)

    def product(x: jax.Array) -> jax.Array:
        return jq.expert_matmul(x, GATE, chosen(shape[0]), activations=activations)

    got, want = (by(name, product, x) for name in ("sim", "xla"))
    assert nmse(got, want) <= (1e-6 if activations == "q8_1" else 1e-11)


def test_decoding_takes_two_launches_and_says_so() -> None:
    """None of them before the first one's own norm; the host sees no ids."""
    (call,) = jq.explain(
        lambda x, ids: expert_mlp(x, ids, None, True),
        jnp.ones((2, HIDDEN)),
        chosen(2),
        platform="cuda",
    ).calls
    names = [kernel.name for kernel in call.kernels]
    assert names == ["expert_gated_matvec_q4_k_q6_k_m2", "mixture_matvec_q8_0_m2"]
    assert [kernel.grid[1] for kernel in call.kernels] == [2 * TOP, 2]


def test_a_prompt_multiplies_each_row_once() -> None:
    """Three products with as many tiles as the rows and the experts' last ones can be."""
    x = jnp.ones((64, HIDDEN))
    (call,) = jq.explain(
        lambda x, ids: expert_mlp(x, ids, None, True), x, chosen(64), platform="cuda"
    ).calls
    products = [kernel for kernel in call.kernels if kernel.name.startswith("expert_gemm")]
    assert len(products) == 3 and len(call.kernels) == 7  # a norm, and three quantized inputs
    for kernel in products:
        assert kernel.grid[0] == -(-64 * TOP // kernel.arguments["config"].m_tile) + EXPERTS


@pytest.mark.parametrize(
    "options, kernels",
    [
        ({}, ["route"]),
        (dict(gating="sigmoid", scale=2.5, normalize=False), ["route"]),
        (dict(groups=8, groups_used=2), []),
    ],
)
def test_route(options: dict[str, Any], kernels: list[str]) -> None:
    """NaN and equals, too, as plain JAX has them; it chooses among groups."""
    logits = random(4, 40)
    logits[0, 5], logits[1, 3:9], logits[2, 0] = np.nan, 7, -np.inf
    logits[2, 1] = np.inf if options else 3
    found = []
    for name in ("sim", "xla"):
        with jq.implementation(name):
            found.append(jq.route(logits, 5, **options))
    (ids, weights), (want_ids, want_weights) = found
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5, atol=1e-30)
    calls = jq.explain(lambda x: jq.route(x, 5, **options), logits, platform="cuda").calls
    assert [kernel.name for call in calls for kernel in call.kernels] == kernels
