"""Draws of tokens, also beyond a row's most likely ones, against a sort in float64.

The plain JAX programs here have few candidates, so that small vocabularies have rows of both kinds:
those that the candidates decide, and those whose vocabulary is searched.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k.models.sampling import Sampling, sampler
from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages
from jax_q4k.ops import draw

VOCAB = 300
STAGES = SamplingStages(draws=True)

Rows = tuple[np.ndarray, list[Sampling]]


def kinds_of_logits() -> list[np.ndarray]:
    """Logits (VOCAB,) from nearly equal to peaked, with ties, and with excluded tokens."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((7, VOCAB))
    few = np.where(rng.random(VOCAB) < 0.1, normal[4], -np.inf)
    one = np.where(np.arange(VOCAB) == 77, 3.0, -np.inf)
    zeros = np.where(np.arange(VOCAB) % 2, 0.0, -0.0)
    kinds = [0.01 * normal[0], 2 * normal[1], 8 * normal[2], np.round(normal[3]), few, one, zeros]
    return [kind.astype(np.float32) for kind in kinds]


#: top_k, top_p, min_p, temperature. 8 candidates hold some of these, but not all.
PARAMETERS = [
    (0, 1.0, 0.0, 1.0),
    (0, 1.0, 0.0, 100.0),
    (0, 1.0, 0.0, 0.05),
    (0, 1.0, 0.0, 0.0),
    (0, 0.3, 0.0, 1.0),
    (0, 0.96, 0.0, 0.7),
    (0, 1e-9, 0.0, 1.0),
    (0, 1.0, 0.4, 1.0),
    (0, 1.0, 1.0, 1.0),
    (0, 0.8, 0.05, 1.3),
    (5, 1.0, 0.0, 2.0),
    (8, 0.7, 0.0, 1.0),
    (8, 1.0, 0.0, 1.0),
    (40, 1.0, 0.0, 1.0),
    (40, 0.5, 0.0, 1.0),
    (150, 0.97, 0.01, 1.0),
    (VOCAB, 0.9, 0.0, 1.0),
    (2**31 - 1, 0.9, 0.0, 1.0),
]


@functools.cache
def mixed() -> Rows:
    """Rows of every kind with all parameters."""
    names = "top_k", "top_p", "min_p", "temperature"
    pairs = list(itertools.product(kinds_of_logits(), PARAMETERS))
    logits = np.stack([kind for kind, _ in pairs])
    numbers = [dict(zip(names, values, strict=True)) for _, values in pairs]
    return logits, [Sampling(**one, seed=2**32 - 1 - i) for i, one in enumerate(numbers)]


def arrays(samplings: list[Sampling]) -> SamplingArrays:
    return jax.tree.map(jnp.asarray, SamplingArrays.of(samplings, stages=STAGES))


@pytest.fixture(scope="module", params=["native", "xla"])
def sample(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`sample`, in plain JAX with 8 candidates."""
    with pytest.MonkeyPatch.context() as patch, jq.implementation(request.param):
        patch.setattr(draw, "CANDIDATES", 8)
        sample = jax.jit(lambda *args: sampler.sample(args[0], STAGES, *args[1:]))
        logits, samplings = mixed()
        sample(logits, arrays(samplings), np.zeros(len(logits), np.int32))  # traces it
        yield sample


def kept_by_sorting(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns the ids of the tokens that pass the filters, in descending order of their logits."""
    order = np.argsort(-logits, kind="stable")
    order = order[: sampling.top_k or None]
    values = logits[order].astype(np.float64)
    weights = np.exp(values - values[0])
    if sampling.top_p < 1:
        goal = np.float32(sampling.top_p) * np.float32(weights.sum())
        order = order[: 1 + np.searchsorted(weights.cumsum()[:-1], goal)]
    return order[weights[: len(order)] >= float(np.float32(sampling.min_p))]


@functools.cache
def noise(seed: int, step: int) -> np.ndarray:
    """Gumbel noise (VOCAB,) of jax.random's bits, in float64."""
    key = jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), step)
    keys = jax.vmap(lambda token: jax.random.fold_in(key, token))(jnp.arange(VOCAB))
    bits = np.asarray(jax.random.key_data(keys))[:, 0]
    return -np.log(-np.log(((bits >> 9) + 0.5) * 2**-23))


def expected(logits: np.ndarray, sampling: Sampling, step: int) -> int:
    kept = kept_by_sorting(logits, sampling)
    if sampling.greedy:
        return int(kept[0])
    scores = logits[kept].astype(np.float64) / np.float32(sampling.temperature)
    return int(kept[np.argmax(scores + noise(sampling.seed, step)[kept])])


def test_every_row_gets_the_token_that_a_sort_gives(sample: Any) -> None:
    logits, samplings = mixed()
    steps = np.arange(len(logits), dtype=np.int32)
    tokens = np.asarray(sample(logits, arrays(samplings), steps))
    for row, (values, sampling) in enumerate(zip(logits, samplings, strict=True)):
        assert tokens[row] == expected(values, sampling, row), (row, sampling)


@pytest.mark.parametrize(("scale", "temperature"), [(0.01, 1.0), (2.0, 1.0), (80.0, 80.0)])
def test_a_token_beyond_the_candidates_wins_if_its_score_is_largest(
    scale: float, temperature: float, sample: Any
) -> None:
    logits, samplings = mixed()
    sampling = Sampling(temperature=temperature, seed=5)
    values = np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32) * scale
    rows, steps = np.broadcast_to(values, logits.shape), np.arange(len(logits), dtype=np.int32)
    tokens = np.asarray(sample(rows, arrays([sampling] * len(samplings)), steps)).tolist()
    assert tokens == [expected(values, sampling, int(step)) for step in steps]
    assert not set(tokens) <= set(np.argsort(-values)[:8])


def test_a_search_keeps_the_tokens_that_a_sort_keeps() -> None:
    logits, samplings = mixed()
    kept = np.isfinite(jax.jit(jax.vmap(draw.filter_row))(logits, arrays(samplings)))
    for row, (values, sampling) in enumerate(zip(logits, samplings, strict=True)):
        want = [token for token in kept_by_sorting(values, sampling) if np.isfinite(values[token])]
        assert np.flatnonzero(kept[row]).tolist() == sorted(want), (row, sampling)


def test_the_candidates_know_what_they_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is -inf, a logit or +inf by whether other tokens pass, may pass, or are unknown."""
    monkeypatch.setattr(draw, "CANDIDATES", 8)
    logits, samplings = mixed()
    found = jax.jit(lambda *args: draw.filter_candidates(*args))(logits, arrays(samplings))
    values, tokens, limits = map(np.asarray, found)
    for row, sampling in enumerate(samplings):
        kept, first = kept_by_sorting(logits[row], sampling), tokens[row].tolist()
        others = logits[row, [token for token in kept if token not in first]]
        assert sampling.greedy or (others <= limits[row]).all(), (row, sampling)
        if sampling.greedy or sampling.top_k in range(1, 9):
            assert limits[row] == -math.inf
        if 0 < sampling.min_p < 1 and sampling.top_p == 1 and not len(others):
            assert limits[row] == -math.inf
        if limits[row] < math.inf:
            want = [token for token in kept if token in first and np.isfinite(logits[row, token])]
            assert np.array(first)[np.isfinite(values[row])].tolist() == want, (row, sampling)
    assert (limits == math.inf).any() and (limits == -math.inf).any() and np.isfinite(limits).any()


def test_an_undecided_row_leaves_the_others_alone(sample: Any) -> None:
    logits, samplings = mixed()
    steps = np.zeros(len(logits), np.int32)
    before = np.asarray(sample(logits, arrays(samplings), steps))
    other = logits.copy()
    other[::2] = 0
    after = np.asarray(sample(other, arrays(samplings), steps))
    np.testing.assert_array_equal(after[1::2], before[1::2])
    assert (after[::2] != before[::2]).any()


def test_the_first_nan_wins(sample: Any) -> None:
    logits, samplings = mixed()
    broken = logits.copy()
    broken[:, [40, 31, 200]] = np.nan
    tokens = sample(broken, arrays(samplings), np.zeros(len(logits), np.int32))
    assert set(tokens.tolist()) == {31}


@pytest.mark.parametrize("searched", [0, 1, 3])
def test_only_undecided_rows_are_searched(searched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def counted(*args: Any, run: Callable[..., jax.Array] = draw.filter_row) -> jax.Array:
        jax.debug.callback(lambda: calls.append(None))
        return run(*args)

    monkeypatch.setattr(draw, "CANDIDATES", 8)
    monkeypatch.setattr(draw, "filter_row", counted)
    _, _, peaked, *_, flat = kinds_of_logits()
    logits = np.stack([flat] * searched + [peaked] * (4 - searched))
    parameters = arrays([Sampling(temperature=1, top_p=0.9)] * 4)
    steps = np.zeros(4, np.int32)
    with jq.implementation("xla"):
        jax.jit(lambda *args: sampler.sample(args[0], STAGES, *args[1:]))(logits, parameters, steps)
    jax.effects_barrier()
    assert len(calls) == searched


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_nothing_sorts(implementation: Any) -> None:
    parameters, steps = arrays([Sampling(temperature=1)] * 2), jnp.zeros(2, jnp.int32)
    logits = jnp.zeros((2, 3 * draw.CANDIDATES))
    with jq.implementation(implementation):
        program = jax.jit(lambda *args: sampler.sample(args[0], STAGES, *args[1:]))
        traced = program.trace(logits, parameters, steps)
        assert "sort[" not in str(traced.jaxpr)
        assert " sort(" not in traced.lower().compile().as_text()


def test_no_noise_exceeds_its_bound() -> None:
    largest = -jnp.log(-jnp.log((jnp.float32(2**23 - 1) + 0.5) * 2**-23))
    assert draw.MOST_NOISE - 0.1 < largest < draw.MOST_NOISE
