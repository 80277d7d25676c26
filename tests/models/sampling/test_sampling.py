"""Sampling against a NumPy oracle.

The tests check which tokens remain, how often each is drawn, and errors for bad parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_q4k.models.runner.engine_state import Past
from jax_q4k.models.sampling import Sampling, sampler
from jax_q4k.models.sampling.params import LEAST_TEMPERATURE
from jax_q4k.models.sampling.penalties import UNCOUNTED
from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages, SharedStages
from jax_q4k.ops import draw as draw_op

VOCAB = 50


def logits_of(seed: int, batch: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((batch, vocab)) * scale).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def probabilities(
    logits: np.ndarray, params: Sampling, counts: np.ndarray | None = None
) -> np.ndarray:
    """Distribution of one row (vocab,), in float64.

    Filters run in llama.cpp's order, one token at a time.
    """
    logits = logits.astype(np.float64)
    for token, bias in params.biases:
        logits[token] += bias
    if counts is not None:
        penalty = params.repetition_penalty
        for token in np.flatnonzero(counts):
            x = logits[token]
            x = x / penalty if x > 0 else x * penalty
            logits[token] = x - params.presence_penalty - params.frequency_penalty * counts[token]
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


def sample(
    logits: Any,
    params: Sampling | list[Sampling],
    counts: Any = None,
    stages: SamplingStages | None = None,
) -> jax.Array:
    """Samples tokens (batch,) from logits (batch, vocab), as each row's first draw."""
    samplings = [params] * len(logits) if isinstance(params, Sampling) else params
    stages = SamplingStages.of(samplings) if stages is None else stages
    parameters, steps = (
        SamplingArrays.of(samplings, stages=stages),
        jnp.zeros(len(logits), jnp.int32),
    )
    return _sample(jnp.asarray(logits), stages, parameters, steps, counts)


_sample = jax.jit(sampler.sample, static_argnames="stages")
_filter_candidates, _filter_row = jax.jit(draw_op.filter_candidates), jax.jit(draw_op.filter_row)


@functools.partial(jax.jit, static_argnames=("params", "draws"))
def draw(logits: jax.Array, params: Sampling, draws: int, counts: Any = None) -> jax.Array:
    """Samples the first `draws` tokens (draws,) of one row (vocab,)."""
    rows = jnp.broadcast_to(logits, (draws, logits.shape[-1]))
    counts = None if counts is None else jnp.broadcast_to(counts, rows.shape)
    parameters = jax.tree.map(jnp.asarray, SamplingArrays.of([params])).repeated(draws)
    return sampler.sample(rows, SamplingStages.of([params]), parameters, jnp.arange(draws), counts)


def remaining(logits: Any, params: Sampling) -> list[set[int]]:
    """Returns the remaining tokens of one row (1, vocab), by its candidates and by a search."""
    parameters = jax.tree.map(jnp.asarray, SamplingArrays.of([params]))
    of_row = jax.tree.map(lambda x: x[0], parameters)
    found, tokens, _ = _filter_candidates(logits, parameters)
    searched = np.asarray(_filter_row(logits[0], of_row))
    return [
        set(np.asarray(tokens)[np.isfinite(found)].tolist()),
        set(np.flatnonzero(np.isfinite(searched)).tolist()),
    ]


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
    Sampling(temperature=1.0, logit_bias={3: 2.5, 7: -math.inf, 0: -1}),
]


@pytest.mark.slow("draws tens of thousands of tokens a case", quick=["*top_k=5*", "*top_k=20*"])
@pytest.mark.parametrize("params", CASES, ids=str)
def test_distribution(params: Sampling) -> None:
    logits, draws = logits_of(1)[0], 40_000
    want = probabilities(logits, params)
    tokens = np.asarray(draw(jnp.asarray(logits), params, draws))
    assert tokens.dtype == np.int32
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts.shape == (VOCAB,)
    assert not counts[want == 0].any()
    # chi-square, with expectations under 5 pooled; its 99.9% quantile by Wilson and Hilferty
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
        params = dataclasses.replace(params, logit_bias=())
        want = set(np.flatnonzero(probabilities(logits[0], params)).tolist())
        assert remaining(logits, params) == [want, want]


def test_equal_logits_keep_the_lower_tokens() -> None:
    for vocab in (8, 300):
        logits = jnp.zeros((1, vocab))
        assert remaining(logits, Sampling(temperature=1, top_k=3)) == [{0, 1, 2}] * 2
    assert remaining(logits[:, :8], Sampling(temperature=1, top_p=0.5)) == [{0, 1, 2, 3}] * 2


def test_greedy_is_an_argmax_and_nothing_else() -> None:
    logits = logits_of(3, batch=4)
    params = Sampling(temperature=0, top_k=3, top_p=0.5, min_p=0.3)
    tokens = sample(logits, params)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    for given in (params, Sampling(temperature=1, min_p=0.1), Sampling(temperature=1, top_p=0.5)):
        text = str(jax.make_jaxpr(lambda x, p=given: sample(x, p))(logits))
        assert text.count("q4k_draw[") == (not given.greedy)


@pytest.mark.parametrize("temperature", [1e-4, 1e-30])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = logits_of(4, batch=3)
    tokens = sample(logits, Sampling(temperature=temperature))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert Sampling(temperature=9e-6).greedy and not Sampling(temperature=1e-5).greedy


@pytest.mark.slow("compiles several programs")
def test_repetition_penalty() -> None:
    logits = np.array([[2.0, 1.5, -1.0, -1.1], [2.0, 1.5, -1.0, -1.1]], np.float32)
    seen = np.array([[True, False, True, False], [False, False, False, False]])
    greedy = Sampling(repetition_penalty=1.5)
    counts = jnp.asarray(seen * np.array([1, 0, 3, 0], np.int32))
    assert sample(logits, greedy, counts).tolist() == [1, 0]
    assert sample(logits, Sampling(presence_penalty=0.6), counts).tolist() == [1, 0]
    assert sample(logits, Sampling(frequency_penalty=0.6), 2 * counts).tolist() == [1, 0]
    for fields in (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7, "frequency_penalty": -0.4},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.3},
    ):
        params = Sampling(temperature=1, **fields)
        want = probabilities(logits[0], params, np.asarray(counts)[0])
        tokens = draw(jnp.asarray(logits[0]), params, 40_000, counts[0])
        np.testing.assert_allclose(
            np.bincount(np.asarray(tokens), minlength=4) / 40_000, want, atol=0.01
        )


def test_tokens_seen_in_prompts() -> None:
    tokens = jnp.array([[3, 1, 1, 9], [7, 5, 0, 0]], jnp.int32)
    past = Past(seen=jnp.full((3, 10), 4, jnp.int32))
    slots = jnp.array([2, 0])
    none = jnp.array([0, 0])
    past = past.with_prompts(slots, tokens, none, jnp.array([4, 1]), none)
    want = [[0] * 7 + [1, 0, 0], [4] * 10, [0, 2, 0, 1, 0, 0, 0, 0, 0, 1]]
    assert past.seen is not None and past.seen.tolist() == want
    past = past.with_prompts(slots, tokens, jnp.array([4, 1]), jnp.array([0, 2]), none)  # goes on
    past = past.with_token(jnp.array([2, 3]), jnp.array([0, 7]), jnp.array([4, 3]))
    want = [[0] * 5 + [1, 0, 2, 0, 0], [4] * 10, [1, 2, 0, 1, 0, 0, 0, 0, 0, 1]]
    assert past.seen is not None and past.seen.tolist() == want


def test_tokens_of_prompts_that_are_not_counted() -> None:
    """They are marked, also before a piece at whose middle counting begins."""
    tokens, slot = jnp.array([[3, 1, 1, 3]], jnp.int32), jnp.array([1])
    past, first = Past(seen=jnp.full((2, 5), 4, jnp.int32)), jnp.array([6])
    past = past.with_prompts(slot, tokens, jnp.array([0]), jnp.array([4]), first)
    past = past.with_prompts(slot, jnp.array([[2, 1, 1, 0]]), jnp.array([4]), jnp.array([4]), first)
    past = past.with_token(slot, jnp.array([3]), jnp.array([8]))
    assert past.seen is not None
    assert past.seen[1].tolist() == [1, UNCOUNTED + 1, UNCOUNTED, UNCOUNTED + 1, 0]
    assert past.seen[0].tolist() == [4] * 5


def test_in_a_while_loop_with_seen() -> None:
    """Greedy sampling with a strong penalty takes the logits in order, each token once."""
    logits = jnp.asarray(-np.abs(logits_of(5, batch=2)))
    params = Sampling(repetition_penalty=100)

    @jax.jit
    def run(logits: jax.Array) -> jax.Array:
        def step(state: Any) -> Any:
            i, counts, out = state
            token = sample(logits, params, counts)
            counts = counts.at[jnp.arange(2), token].add(1)
            return i + 1, counts, out.at[:, i].set(token)

        start = (0, jnp.zeros(logits.shape, jnp.int32), jnp.zeros((2, 6), jnp.int32))
        return jax.lax.while_loop(lambda state: state[0] < 6, step, start)[2]

    penalized = np.asarray(run(logits))
    for row, order in zip(penalized, np.argsort(-np.asarray(logits), axis=-1), strict=True):
        assert row[0] == order[0]
        assert len(set(row)) == 6


@pytest.mark.slow("compiles several programs")
def test_seeds() -> None:
    logits = jnp.asarray(logits_of(6)[0])
    runs = [
        draw(logits, p, 100).tolist() for p in (Sampling(temperature=1, seed=s) for s in (3, 3, 4))
    ]
    assert runs[0] == runs[1] != runs[2]
    draw(logits, Sampling(temperature=1, seed=2**32 - 1), 2)


#: Rows with all kinds of parameters, which one program samples.
MIXED = [
    Sampling(),
    Sampling(repetition_penalty=2, temperature=1),
    Sampling(temperature=1, frequency_penalty=0.5, logit_bias={1: 5}),
    *CASES,
]


@pytest.mark.slow("compiles a program a row")
@pytest.mark.parametrize("vocab", [VOCAB, 3000])
def test_a_row_gets_what_it_gets_alone(vocab: int) -> None:
    """The stages that other rows need do not matter."""
    logits = logits_of(11, batch=len(MIXED), vocab=vocab)
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 3, logits.shape), jnp.int32)
    samplings = [dataclasses.replace(s, seed=i) for i, s in enumerate(MIXED)]
    together = sample(logits, samplings, counts)
    for row, one in enumerate(samplings):
        of_row = counts[row : row + 1] if one.penalizes else None
        assert sample(logits[row : row + 1], one, of_row)[0] == together[row], one


def test_sampling_stages() -> None:
    top_k, top_p = Sampling(temperature=1, top_k=40), Sampling(temperature=1, top_p=0.9)
    assert (
        SamplingStages.of([Sampling()])
        == SamplingStages.of([Sampling(top_k=5, top_p=0.5)])
        == SamplingStages()
    )
    for drawn in ([top_k, Sampling()], [top_k, top_p], [top_p], [Sampling(temperature=1)]):
        assert SamplingStages.of(drawn) == SamplingStages(draws=True)
    assert SamplingStages.of([Sampling(frequency_penalty=1)]) == SamplingStages(penalizes=True)
    assert SamplingStages.of([Sampling(logit_bias={i: 1 for i in range(9)})]) == SamplingStages(
        biases=16
    )
    assert SamplingStages.of([Sampling()], (1, 2)) == SamplingStages(ends=8)


def test_later_stages_share_programs_that_have_them() -> None:
    shared = SharedStages(exact=2)
    drawn = SamplingStages(draws=True)
    penalized, ended = drawn._replace(penalizes=True), drawn._replace(ends=8)
    assert [shared.serving(one) for one in (drawn, penalized)] == [drawn, penalized]
    assert shared.serving(ended) == ended  # the first superset of stages that draw
    both = penalized._replace(ends=8)
    assert shared.serving(both) == both and shared.serving(ended) == both
    greedy = SamplingStages(penalizes=True)
    assert shared.serving(greedy) == greedy
    wide = greedy._replace(biases=8, logprobs=4)
    assert shared.serving(SamplingStages(biases=8, logprobs=4)) == wide
    assert shared.serving(SamplingStages(logprobs=0)) == wide
    argmax, processed = SamplingStages(ends=16), drawn._replace(processors=((len,),))
    assert [shared.serving(one) for one in (argmax, processed)] == [argmax, processed]


def test_ends() -> None:
    parameters = SamplingArrays.of([Sampling(), Sampling(ignore_end=True)], (3, 4))
    parameters = jax.tree.map(jnp.asarray, parameters)
    assert parameters.are_ends(jnp.array([4, 4])).tolist() == [True, False]
    assert parameters.are_ends(jnp.array([[4, 5], [3, 4]])).tolist() == [[1, 0], [0, 0]]
    none = jax.tree.map(jnp.asarray, SamplingArrays.of([Sampling()]))
    assert none.are_ends(jnp.array([4])).tolist() == [False]


def test_bias() -> None:
    assert Sampling(logit_bias={5: 1, 2: -3}).biases == ((2, -3.0), (5, 1.0))
    assert Sampling(logit_bias=[(5, 1)]) == Sampling(logit_bias={5: 1.0})
    for bias, problem in (
        ({-1: 1}, "has -1: 1.0"),
        ({1: math.nan}, "has 1: nan"),
        ({1: math.inf}, "has 1: inf"),
        ({0: 1e39}, r"has 0: 1e\+39; .* numbers in \[-3.4028235e\+38, 1e\+30\] or -inf"),
        ({0: -1e39}, r"has 0: -1e\+39; .* numbers in \[-3.4028235e\+38, 1e\+30\] or -inf"),
        ({0: 1.1e30}, r"has 0: 1.1e\+30; .* numbers in \[-3.4028235e\+38, 1e\+30\] or -inf"),
        ({0: 10**400}, "holds a number outside of float64"),
        ([(1, 2), (1, 3)], "names token 1 twice"),
        ({i: 1 for i in range(5000)}, "names 5000 tokens"),
    ):
        with pytest.raises(ValueError, match=f"logit_bias.*{problem}"):
            Sampling(logit_bias=bias)
    for bias in ("ab", {"a": 1}, [3], 7):
        with pytest.raises(TypeError, match="logit_bias"):
            Sampling(logit_bias=bias)


@pytest.mark.parametrize(("temperature", "penalty"), [(0, 0.01), (0.01, 0.01), (100, 100)])
def test_the_largest_numbers_stay_finite(temperature: float, penalty: float) -> None:
    """A biased token always or never wins, whatever multiplies its logit."""
    logits = jnp.asarray(logits_of(3, batch=1))
    counts = jnp.ones(logits.shape, jnp.int32)
    numbers = {"temperature": temperature, "repetition_penalty": penalty, "presence_penalty": 100}
    least = -float(np.finfo(np.float32).max)
    for bias, taken in ({5: 1e30}, {5}), ({5: least}, set(range(VOCAB)) - {5}):
        for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 1.2e-38}):
            sampling = Sampling(logit_bias=bias, **numbers, **filters)
            assert int(sample(logits, sampling, counts=counts)[0]) in taken


@pytest.mark.parametrize(
    "name", ["top_p", "min_p", "presence_penalty", "frequency_penalty", "dry_multiplier"]
)
def test_numbers_that_float32_takes_for_0(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=1e-40 must be .*; float32 rounds it to 0"):
        Sampling(**{name: 1e-40})
    assert getattr(Sampling(**{name: 1.2e-38}), name) == 1.2e-38


@pytest.mark.slow("compiles several programs")
def test_temperatures_below_the_least_are_greedy_in_any_batch() -> None:
    """Holds even if float32 rounds up to the minimum; two logits differ by less than noise."""
    below = math.nextafter(LEAST_TEMPERATURE, 0)
    assert (
        np.float32(below) == np.float32(LEAST_TEMPERATURE) and Sampling(temperature=1e-300).greedy
    )
    logits = jnp.zeros((64, VOCAB)).at[:, 9].set(1e-6)
    rows = [Sampling(temperature=below, seed=seed) for seed in range(63)]
    tokens = np.asarray(sample(logits, [*rows, Sampling(temperature=1)]))
    assert (tokens[:63] == 9).all()


def test_stops_are_a_tuple() -> None:
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop="ab").stop == ("ab",) and Sampling().stop == ()
    with pytest.raises(ValueError, match="stop string is empty"):
        Sampling(stop=[""])
    with pytest.raises(TypeError, match="stop string is of type int"):
        Sampling(stop=[1])


@pytest.mark.slow("compiles several programs")
def test_rows_are_independent_draws() -> None:
    logits = jnp.zeros((64, 1000))
    tokens = np.asarray(sample(logits, [Sampling(temperature=1, seed=i) for i in range(64)]))
    assert len(set(tokens.tolist())) > 50
    again = np.asarray(sample(logits[:1], Sampling(temperature=1, seed=7)))
    assert again[0] == tokens[7]


@pytest.mark.slow("compiles several programs")
def test_a_row_of_nan_leaves_the_others_alone() -> None:
    logits = logits_of(8, batch=3)
    broken = logits.copy()
    broken[1] = np.nan
    for params in (Sampling(), *CASES):
        good, got = (np.asarray(sample(rows, params)) for rows in (logits, broken))
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
        ("presence_penalty", [-101, 101, math.nan], r"must be float in \[-100, 100\]"),
        ("frequency_penalty", [-101, math.inf], r"must be float in \[-100, 100\]"),
        ("dry_multiplier", [-0.1, math.nan], r"must be float in \[0, 100\]"),
        ("dry_base", [0.99, 101], r"must be float in \[1, 100\]"),
        ("dry_allowed_length", [0], r"must be int in \[1, 2147483647\]"),
        ("dry_penalty_last_n", [-2], r"must be int in \[-1, 2147483647\]"),
        ("logprobs", [-1, 1025], r"must be int in \[0, 1024\]"),
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
        ("logprobs", 1.5),
        ("processors", 3),
        ("processors", ["no function"]),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(f'{name}={value!r}')} must be "):
            Sampling(**{name: value})
    assert Sampling(temperature=np.float32(0.5), top_k=np.int64(3)) == Sampling(
        temperature=0.5, top_k=3
    )


@pytest.mark.slow("traces each shape")
def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"logits of shape \(5,\) must be \(batch, vocab\)"):
        sample(jnp.zeros(5), Sampling())
    penalized = Sampling(repetition_penalty=2)
    with pytest.raises(ValueError, match="penalties need the tokens seen so far"):
        sample(jnp.zeros((1, 5)), penalized)
    with pytest.raises(
        ValueError, match=r"counts of shape \(1, 4\) must be \(batch, vocab\) as logits, \(1, 5\)"
    ):
        sample(jnp.zeros((1, 5)), penalized, jnp.zeros((1, 4), jnp.int32))
