"""Sampling against a NumPy oracle.

The tests check which tokens stay, how often each is drawn, and what bad parameters get.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_q4k.models import sampling
from jax_q4k.models.sampling import Sampling, sample

VOCAB = 50


def logits_of(seed: int, batch: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((batch, vocab)) * scale).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def probabilities(
    logits: np.ndarray, params: Sampling, seen: np.ndarray | None = None
) -> np.ndarray:
    """Distribution of one row (vocab,), in float64.

    Filters are in llama.cpp's order, one token at a time.
    """
    logits = logits.astype(np.float64)
    if seen is not None:
        penalty = params.repetition_penalty
        logits = np.array(
            [
                x if not s else x / penalty if x > 0 else x * penalty
                for x, s in zip(logits, seen, strict=True)
            ]
        )
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        kept = kept[: params.top_k]
    shares, total, count = softmax(logits[kept]), 0.0, 0
    while count < len(kept) and (total < params.top_p or params.top_p == 1):
        total += shares[count]
        count += 1
    kept = kept[:count]
    kept = [token for token in kept if math.exp(logits[token] - logits[kept[0]]) >= params.min_p]
    result = np.zeros(len(logits))
    result[kept] = softmax(logits[kept] / params.temperature)
    return result


@functools.partial(jax.jit, static_argnames=("params", "draws"))
def draw(
    logits: jax.Array, key: jax.Array, params: Sampling, draws: int, seen: Any = None
) -> jax.Array:
    """Tokens (draws,) from one row (vocab,)."""
    rows = jnp.broadcast_to(logits, (draws, logits.shape[-1]))
    mask = None if seen is None else jnp.broadcast_to(seen, rows.shape)
    return sample(rows, key, params, mask)


CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7),
    Sampling(temperature=2.5),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.3, top_k=1),
    Sampling(temperature=1.0, top_k=VOCAB + 7),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=3.0, top_p=0.8),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.0, top_k=8, top_p=0.7),
    Sampling(temperature=1.0, top_p=0.95, min_p=0.1),
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_distribution(params: Sampling) -> None:
    logits, draws = logits_of(1)[0], 40_000
    want = probabilities(logits, params)
    tokens = np.asarray(draw(jnp.asarray(logits), jax.random.key(7), params, draws))
    assert tokens.dtype == np.int32
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts.shape == (VOCAB,)
    assert not counts[want == 0].any()
    # Chi-square, expectations under 5 pooled; its 99.9% quantile by Wilson and Hilferty.
    expected = want * draws
    common = expected >= 5
    rare_got, rare_want = counts[~common].sum(), expected[~common].sum()
    statistic = float(np.sum((counts[common] - expected[common]) ** 2 / expected[common]))
    if rare_want > 0:
        statistic += (rare_got - rare_want) ** 2 / max(rare_want, 1.0)
    freedom = max(int(common.sum()) - 1 + (rare_want > 0), 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic <= limit


@pytest.mark.parametrize("params", CASES, ids=str)
def test_which_tokens_stay(params: Sampling) -> None:
    for seed in range(20):
        logits = logits_of(seed, scale=0.5 + seed / 4)
        kept, indices = sampling.filter_logits(jnp.asarray(logits), params)
        tokens = np.arange(VOCAB) if indices is None else np.asarray(indices)[0]
        got = set(tokens[np.isfinite(np.asarray(kept)[0])].tolist())
        assert got == set(np.flatnonzero(probabilities(logits[0], params)).tolist())


def test_equal_logits_keep_the_lower_tokens() -> None:
    logits = jnp.zeros((1, 8))
    kept, indices = sampling.filter_logits(logits, Sampling(temperature=1, top_k=3))
    assert indices[0].tolist() == [0, 1, 2]
    kept, indices = sampling.filter_logits(logits, Sampling(temperature=1, top_p=0.5))
    assert indices[0][np.isfinite(kept[0])].tolist() == [0, 1, 2, 3]
    jaxpr = jax.make_jaxpr(
        lambda x: sampling.filter_logits(x, Sampling(temperature=1, top_p=0.5))[0]
    )(logits)
    assert "is_stable=True" in str(jaxpr)  # a GPU's sort would not be by itself


def test_greedy_is_an_argmax_and_nothing_else() -> None:
    logits = logits_of(3, batch=4)
    params = Sampling(temperature=0, top_k=3, top_p=0.5, min_p=0.3)
    tokens = sample(jnp.asarray(logits), jax.random.key(0), params)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    for given, sorts in (
        (params, 0),
        (Sampling(temperature=1, min_p=0.1), 0),
        (Sampling(temperature=1, top_p=0.5), 1),
    ):
        text = str(jax.make_jaxpr(lambda x, p=given: sample(x, jax.random.key(0), p))(logits))
        assert text.count(" sort[") + text.count(" top_k[") == sorts
        assert ("random_bits" in text) != given.greedy


@pytest.mark.parametrize("temperature", [1e-4, 1e-30])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = logits_of(4, batch=3)
    tokens = sample(jnp.asarray(logits), jax.random.key(0), Sampling(temperature=temperature))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert Sampling(temperature=9e-6).greedy and not Sampling(temperature=1e-5).greedy


def test_repetition_penalty() -> None:
    logits = np.array([[2.0, 1.5, -1.0, -1.1], [2.0, 1.5, -1.0, -1.1]], np.float32)
    seen = np.array([[True, False, True, False], [False, False, False, False]])
    greedy = Sampling(repetition_penalty=1.5)
    assert sample(jnp.asarray(logits), jax.random.key(0), greedy, jnp.asarray(seen)).tolist() == [
        1,
        0,
    ]
    params = Sampling(temperature=1, repetition_penalty=1.5)
    want = probabilities(logits[0], params, seen[0])
    tokens = draw(jnp.asarray(logits[0]), jax.random.key(1), params, 40_000, jnp.asarray(seen[0]))
    np.testing.assert_allclose(
        np.bincount(np.asarray(tokens), minlength=4) / 40_000, want, atol=0.01
    )
    counts = jnp.asarray(seen * 3)
    assert sample(jnp.asarray(logits), jax.random.key(0), greedy, counts).tolist() == [1, 0]


def test_tokens_seen_in_prompts() -> None:
    tokens = jnp.array([[3, 1, 1, 9], [7, 5, 0, 0]], jnp.int32)
    seen = sampling.seen_tokens(tokens, jnp.array([4, 1]), 10)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(seen)] == [[1, 3, 9], [7]]
    seen = sampling.mark_seen(seen, jnp.array([0, 7]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(seen)] == [[0, 1, 3, 9], [7]]


def test_in_a_while_loop_with_seen() -> None:
    """Greedy with a strong penalty walks down the logits, each token once."""
    logits = jnp.asarray(-np.abs(logits_of(5, batch=2)))
    params = Sampling(repetition_penalty=100)

    @jax.jit
    def run(logits: jax.Array) -> jax.Array:
        def step(state: Any) -> Any:
            i, seen, out, key = state
            key, now = jax.random.split(key)
            token = sample(logits, now, params, seen)
            return i + 1, sampling.mark_seen(seen, token), out.at[:, i].set(token), key

        start = (0, jnp.zeros(logits.shape, bool), jnp.zeros((2, 6), jnp.int32), params.key())
        return jax.lax.while_loop(lambda state: state[0] < 6, step, start)[2]

    penalized = np.asarray(run(logits))
    for row, order in zip(penalized, np.argsort(-np.asarray(logits), axis=-1), strict=True):
        assert row[0] == order[0]
        assert len(set(row)) == 6


def test_seeds() -> None:
    logits = jnp.asarray(logits_of(6)[0])
    runs = [
        draw(logits, p.key(), p, 100).tolist()
        for p in (Sampling(temperature=1, seed=s) for s in (3, 3, 4))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert Sampling(seed=1).static == Sampling(seed=2).static
    assert Sampling(seed=1) != Sampling(seed=2)
    Sampling(seed=2**32 - 1).key()


def test_what_programs_do_not_depend_on() -> None:
    options = {"max_new_tokens": 3, "seed": 7, "stop": "x", "ignore_end": True}
    assert Sampling(**options).static == Sampling().static
    for name, value in options.items():
        assert Sampling(**{name: value}) != Sampling(), name
    others = {"temperature": 1, "top_k": 1, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2}
    for name, value in others.items():
        assert Sampling(**{name: value}).static != Sampling().static, name
    assert {*options, *others} == {field.name for field in dataclasses.fields(Sampling)}


def test_stops_are_a_tuple() -> None:
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop="ab").stop == ("ab",) and Sampling().stop == ()
    with pytest.raises(ValueError, match="stop string is empty"):
        Sampling(stop=[""])
    with pytest.raises(TypeError, match="stop string is of type int"):
        Sampling(stop=[1])


def test_rows_are_independent_draws() -> None:
    logits = jnp.zeros((64, 1000))
    tokens = np.asarray(sample(logits, jax.random.key(0), Sampling(temperature=1)))
    assert len(set(tokens.tolist())) > 50


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    logits = logits_of(8, batch=3)
    broken = logits.copy()
    broken[1] = np.nan
    for params in (Sampling(), *CASES):
        good = np.asarray(sample(jnp.asarray(logits), jax.random.key(2), params))
        got = np.asarray(sample(jnp.asarray(broken), jax.random.key(2), params))
        assert (got[[0, 2]] == good[[0, 2]]).all()
        assert 0 <= got[1] < VOCAB


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("temperature", [-0.1, 101, math.nan, math.inf], r"must be float in \[0, 100\]"),
        ("top_k", [-1, 2**31], r"must be int in \[0, 2147483647\]"),
        ("top_p", [0.0, -1, 1.01, math.nan], r"must be float in \(0, 1\]"),
        ("min_p", [-0.01, 1.01, math.nan], r"must be float in \[0, 1\]"),
        ("repetition_penalty", [0, -1, 101, math.nan], r"must be float in \[0.01, 100\]"),
        ("seed", [-1, 2**32], r"must be int in \[0, 4294967295\]"),
    ],
)
def test_parameters_out_of_range(name: str, values: list[float], rule: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}={value!r} {rule}$"):
            Sampling(**{name: value})


def test_parameters_of_the_wrong_type() -> None:
    for name, value in (
        ("top_k", 4.0),
        ("top_k", math.nan),
        ("seed", "1"),
        ("temperature", "hot"),
        ("min_p", None),
        ("top_p", True),
    ):
        with pytest.raises(TypeError, match=f"^{name}={value!r} must be "):
            Sampling(**{name: value})
    assert Sampling(temperature=np.float32(0.5), top_k=np.int64(3)) == Sampling(
        temperature=0.5, top_k=3
    )


def test_shapes_that_do_not_fit() -> None:
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"logits of shape \(5,\) must be \(batch, vocab\)"):
        sample(jnp.zeros(5), key, Sampling())
    with pytest.raises(ValueError, match="repetition_penalty=2.0 needs the tokens seen so far"):
        sample(jnp.zeros((1, 5)), key, Sampling(repetition_penalty=2))
    with pytest.raises(
        ValueError, match=r"seen of shape \(1, 4\) must be \(batch, vocab\) as logits, \(1, 5\)"
    ):
        sample(jnp.zeros((1, 5)), key, Sampling(repetition_penalty=2), jnp.zeros((1, 4), bool))
