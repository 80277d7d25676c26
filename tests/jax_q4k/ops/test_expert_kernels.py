"""Mixtures of experts with simulated PTX kernels, against plain JAX with the same numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse

import jax_q4k as jq

EXPERTS, HIDDEN, INNER, TOP = 6, 256, 128, 3


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def stack(n: int, k: int, format: str) -> jq.QuantizedArray:
    return jq.quantize(random(EXPERTS, n, k) * np.float32(0.05), format)


@functools.cache
def matrices() -> tuple[jq.QuantizedArray, jq.QuantizedArray, jq.QuantizedArray]:
    """Returns gate, up and down."""
    gate, up = stack(INNER, HIDDEN, "Q4_K"), stack(INNER, HIDDEN, "Q6_K")
    return gate, up, stack(HIDDEN, INNER, "Q8_0")


@pytest.fixture(scope="module", autouse=True)
def quantized() -> None:
    """Makes the matrices before anything is traced."""
    matrices()


def chosen(tokens: int) -> jax.Array:
    """Ids of experts, some out of range."""
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
    return jq.expert_mlp(x, *matrices(), ids, weights, activations=activations, **terms)


def by(implementation: str, function: Any, *arguments: Any) -> Any:
    with jq.implementation(implementation):
        return np.asarray(function(*arguments).astype(jnp.float32))


@pytest.mark.slow("compiles a program for each case", quick=["tokens=11-*", "tokens=3-*"])
@pytest.mark.grid
@pytest.mark.parametrize("activations", ["q8_1", "f32"])
@pytest.mark.parametrize("tokens, all_terms", [(1, True), (3, False), (11, True)])
def test_expert_mlp(tokens: int, all_terms: bool, activations: str) -> None:
    """Eleven tokens use tensor cores, or XLA's float32 products."""
    arguments = jnp.asarray(random(tokens, HIDDEN)), chosen(tokens), activations, all_terms
    got, want = (by(name, expert_mlp, *arguments) for name in ("sim", "xla"))
    assert nmse(got, want) <= (1e-6 if activations == "q8_1" else 1e-11)


@pytest.mark.grid
@pytest.mark.parametrize("activations", ["q8_1", "f32"])
@pytest.mark.parametrize(
    "shape, dtype",
    [((2, HIDDEN), "bfloat16"), ((2, TOP, HIDDEN), "float32"), ((9, TOP, HIDDEN), "float32")],
)
def test_expert_matmul(shape: tuple[int, ...], dtype: str, activations: str) -> None:
    """One row of activations for all of a token's experts, or one row per expert."""
    x = jnp.asarray(random(*shape), dtype)

    def product(x: jax.Array) -> jax.Array:
        return jq.expert_matmul(x, matrices()[0], chosen(shape[0]), activations=activations)

    got, want = (by(name, product, x) for name in ("sim", "xla"))
    assert nmse(got, want) <= (1e-6 if activations == "q8_1" else 1e-11)


def test_decoding_takes_two_launches_and_says_so() -> None:
    """No launch precedes the first product, which computes its own norm; the host sees no ids."""
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
    """Three products have as many tiles as the rows and the experts' partial tiles can need."""
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
    """Handles NaN and ties like plain JAX; XLA chooses among groups."""
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


ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": dict(gating="sigmoid", selection_bias=random(EXPERTS), scale=2.5, normalize=False),
    "groups": dict(groups=3, groups_used=2),
    "best-of-groups": dict(groups=3, groups_used=2, group_best=1),
}


def routed_mlp(x: jax.Array, logits: jax.Array, **options: Any) -> Any:
    norm = dict(norm_weight=random(HIDDEN), eps=1e-5)
    return jq.routed_mlp(x, logits, *matrices(), TOP, residual=x, **norm, **options)


@pytest.mark.slow(
    "compiles a program for each case", quick=["tokens=1-q8_1-softmax", "tokens=3-f32-sigmoid"]
)
@pytest.mark.grid
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens, activations", [(1, "q8_1"), (3, "f32"), (11, "q8_1")])
def test_routed_mlp(tokens: int, activations: str, routing: str) -> None:
    """Logits have ties; the result equals `expert_mlp` after `route`."""
    x, logits = jnp.asarray(random(tokens, HIDDEN)), jnp.asarray(random(tokens, EXPERTS))
    logits, options = logits.at[0, 1:4].set(7), ROUTINGS[routing] | {"activations": activations}
    got, want = (by(name, lambda x: routed_mlp(x, logits, **options), x) for name in ("sim", "xla"))
    assert nmse(got, want) <= (1e-6 if activations == "q8_1" else 1e-11)
    with jq.implementation("sim", fused=False):
        assert nmse(got, np.asarray(routed_mlp(x, logits, **options))) <= 1e-6


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_a_nan_among_the_logits_stays_with_its_token(gating: str) -> None:
    x, logits = jnp.asarray(random(3, HIDDEN)), jnp.asarray(random(3, EXPERTS))
    spoiled = logits.at[1, 2].set(jnp.nan)
    got, want = (
        by("sim", lambda x, given=given: routed_mlp(x, given, gating=gating), x)
        for given in (spoiled, logits)
    )
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize(
    "routing, kind", [("softmax", "routed"), ("sigmoid", "routed"), ("groups", "expert")]
)
def test_few_tokens_are_routed_by_the_first_product(routing: str, kind: str) -> None:
    """XLA chooses among groups."""
    (call,) = jq.explain(
        lambda x, p: routed_mlp(x, p, **ROUTINGS[routing]),
        jnp.ones((2, HIDDEN)),
        jnp.ones((2, EXPERTS)),
        platform="cuda",
    ).calls
    names = [kernel.name for kernel in call.kernels]
    assert names == [f"{kind}_gated_matvec_q4_k_q6_k_m2", "mixture_matvec_q8_0_m2"]


@functools.cache
def shared_matrices(down: str = "Q8_0") -> list[jq.QuantizedArray]:
    """Returns gate, up and down of a shared expert, like an expert of `matrices` by default."""
    shapes = [(INNER, HIDDEN, "Q4_K"), (INNER, HIDDEN, "Q6_K"), (HIDDEN, INNER, down)]
    return [jq.quantize(random(n, k) * np.float32(0.06), format) for n, k, format in shapes]


@pytest.mark.slow("compiles a program for each case", quick=["tokens=3-q8_1-*-gate=True"])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("down", ["Q8_0", "Q5_0"])
@pytest.mark.parametrize("tokens, activations", [(3, "q8_1"), (2, "f32"), (11, "q8_1")])
def test_a_shared_expert(tokens: int, activations: str, down: str, gate: bool) -> None:
    """Equals `mlp` and `routed_mlp`, also with another format or for many tokens."""
    x, logits = jnp.asarray(random(tokens, HIDDEN)), jnp.asarray(random(tokens, EXPERTS))
    options: dict[str, Any] = dict(norm_weight=random(HIDDEN), eps=1e-5, activations=activations)
    weight = jnp.asarray(random(tokens, 1)) if gate else None
    shared = shared_matrices(down)

    def layer(x: jax.Array) -> jax.Array:
        given = dict(shared=shared, shared_logits=weight, residual=x)
        return jq.routed_mlp(x, logits, *matrices(), TOP, **given, **options)

    def composed(x: jax.Array) -> jax.Array:
        factor = 1 if weight is None else jax.nn.sigmoid(weight)
        residual = x + factor * jq.mlp(x, *shared, **options)
        return jq.routed_mlp(x, logits, *matrices(), TOP, residual=residual, **options)

    want = by("xla", composed, x)
    bar = 1e-6 if activations == "q8_1" else 1e-11
    assert nmse(by("xla", layer, x), want) <= 1e-12
    assert nmse(by("sim", layer, x), want) <= bar
    with jq.implementation("sim", fused=False):
        assert nmse(np.asarray(layer(x)), want) <= bar


@pytest.mark.parametrize(
    "change, kernels",
    [
        ({}, ["routed_shared_gated_matvec_q4_k_q6_k", "mixture_shared_matvec_q8_0"]),
        (dict(shared_logits=None), ["routed_shared_gated_matvec_q4_k_q6_k", "mixture_shared_"]),
        (dict(shared="Q5_0"), ["gated_matvec_", "matvec_q5_0", "routed_gated_", "mixture_matvec"]),
        (dict(shared="float"), ["routed_gated_", "mixture_matvec"]),
        (
            dict(down_scale=random(EXPERTS)),
            ["gated_matvec_", "matvec_q8_0", "routed_gated_", "mixture_matvec"],
        ),
        (
            dict(groups=3, groups_used=2),
            ["gated_matvec_", "matvec_q8_0", "expert_gated_", "mixture_matvec"],
        ),
    ],
    ids=["alike", "no gate", "another format", "floats", "terms", "groups"],
)
def test_launches_of_a_shared_expert(change: dict[str, Any], kernels: list[str]) -> None:
    """It takes no launch of its own if it is like the others."""
    given: dict[str, Any] = dict(shared="Q8_0", shared_logits=jnp.ones((2, 1))) | change
    given["shared"] = (
        [jnp.ones((INNER, HIDDEN))] * 2 + [jnp.ones((HIDDEN, INNER))]
        if given["shared"] == "float"
        else shared_matrices(given["shared"])
    )
    calls = jq.explain(
        lambda x, p: routed_mlp(x, p, **given),
        jnp.ones((2, HIDDEN)),
        jnp.ones((2, EXPERTS)),
        platform="cuda",
    ).calls
    found = [kernel.name for call in calls for kernel in call.kernels]
    found = [name for name in found if name != "rms_norm"]  # of float matrices
    assert len(found) == len(kernels)
    assert all(map(str.startswith, found, kernels)), found


@pytest.mark.slow("simulates several launches", quick=["rows=8-*"])
@pytest.mark.parametrize(
    "rows, shape, others, bias, kernels",
    [
        (1, (6, 256), 0, False, ["router"]),
        (8, (6, 256), 1, True, ["router"]),
        (9, (6, 256), 0, True, ["rms_norm"]),
        (1, (513, 256), 0, False, ["rms_norm"]),
        (1, (510, 256), 3, False, ["rms_norm"]),
        (1, (6, 30), 0, True, []),
    ],
)
def test_a_router_and_its_norm_are_one_launch(
    rows: int, shape: tuple[int, int], others: int, bias: bool, kernels: list[str]
) -> None:
    """One launch handles few rows of weights and of activations; XLA handles more.

    others: rows of a second matrix, without a bias.
    """
    x, w, norm = (jnp.asarray(random(*s)) for s in ((rows, shape[1]), shape, shape[1:]))
    added = random(shape[0]) if bias else None
    second = [jnp.asarray(random(others, shape[1]))] if others else []

    def logits(x: jax.Array, w: jax.Array = w) -> jax.Array:
        biases = [added, *(None for _ in second)]
        y = jq.linear(x, [w, *second], norm_weight=norm, eps=1e-5, biases=biases)
        return jnp.concatenate(y, axis=-1)

    got, want = (by(name, logits, x) for name in ("sim", "xla"))
    assert nmse(got, want) <= 1e-12
    calls = jq.explain(logits, x, platform="cuda").calls
    assert [kernel.name for call in calls for kernel in call.kernels] == kernels
    gradients = []
    for name in ("sim", "xla"):
        with jq.implementation(name):
            squares = jax.grad(lambda x, w: (logits(x, w) ** 2).sum(), (0, 1))
            gradients.append(squares(x, w))
    for a, b in zip(*gradients, strict=True):
        assert nmse(np.asarray(a), np.asarray(b)) <= 1e-12
    many = jax.vmap(lambda x: logits(x))(jnp.stack([x, 2 * x, -x]))
    np.testing.assert_allclose(many[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(logits=jnp.ones((3, 5))), r"logits has shape \(3, 5\)"),
        (dict(selection_bias=jnp.ones(5)), r"selection_bias has shape \(5,\)"),
        (dict(top=7), "top=7 must be 1 to 6"),
        (dict(x=jnp.ones((3, 30))), "x has shape"),
        (dict(shared_logits=jnp.ones((3, 1))), "shared_logits need a shared expert"),
        (dict(shared_logits=jnp.ones(3), shared=True), r"shared_logits has shape \(3,\)"),
        (dict(shared=[jnp.ones((2, HIDDEN))] * 2), "shared has 2 matrices"),
        (dict(shared=[jnp.ones((n, HIDDEN)) for n in (2, 3, 2)]), r"shared\[1\] has shape \(3, "),
        (dict(shared=[jnp.ones((2, HIDDEN))] * 3), r"shared\[2\] has shape .* = \(256, 2\)"),
        (dict(shared=[jnp.ones((2, 30))] * 2 + [jnp.ones((HIDDEN, 2))]), r"in shared\[0\] \(2, 30"),
    ],
)
def test_errors_of_routed_mlp_name_the_argument(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict(x=jnp.ones((3, HIDDEN)), logits=jnp.ones((3, EXPERTS)), top=TOP)
    given |= dict(zip(("gate", "up", "down"), matrices(), strict=True))
    if change.get("shared") is True:
        change = change | {"shared": shared_matrices()}
    with pytest.raises(ValueError, match=message):
        jq.routed_mlp(**(given | change))


def test_no_token_has_no_experts() -> None:
    assert routed_mlp(jnp.ones((0, HIDDEN)), jnp.ones((0, EXPERTS))).shape == (0, HIDDEN)
