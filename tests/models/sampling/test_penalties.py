"""DRY against its definition, token by token; biases, counts, and missing tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import nmse

from jax_q4k import models
from jax_q4k.models.sampling import Sampling, penalties
from jax_q4k.models.sampling.penalties import TokenHistory
from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages

from ..golden_files import model

VOCAB = 6


def dry(text: list[int], sampling: Sampling, breaks: set[int]) -> np.ndarray:
    """Penalties (VOCAB,) from the definition, for every repeated run at every position."""
    last_n = sampling.dry_penalty_last_n
    text = text if last_n < 0 else text[len(text) - min(last_n, len(text)) :]
    most = next((i for i, token in enumerate(reversed(text)) if token in breaks), len(text))
    result = np.zeros(VOCAB)
    for at in range(1, len(text)):
        run = 0
        while run < min(most, at) and text[at - 1 - run] == text[-1 - run]:
            run += 1
        if run >= sampling.dry_allowed_length:
            cost = sampling.dry_multiplier * sampling.dry_base ** (
                run - sampling.dry_allowed_length
            )
            result[text[at]] = max(result[text[at]], cost)
    return result


def breaks_of(texts: tuple[str, ...]) -> np.ndarray:
    return np.isin(np.arange(VOCAB), [int(text) for text in texts])


@jax.jit
def penalties_of(text: TokenHistory, parameters: SamplingArrays) -> jax.Array:
    return penalties.dry_penalties(text, parameters, VOCAB)


def check_dry(texts: list[list[int]], samplings: list[Sampling]) -> None:
    """Compares penalties of two rows, padded to the same length, with the definition."""
    padded = np.full((2, 24), 1, np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    given_text = TokenHistory(
        jnp.asarray(padded), jnp.array([len(text) for text in texts], jnp.int32)
    )
    parameters = jax.tree.map(jnp.asarray, SamplingArrays.of(samplings, breaks=breaks_of))
    got = np.asarray(penalties_of(given_text, parameters))
    for row, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
        want = dry(text, sampling, {int(text) for text in sampling.dry_sequence_breakers})
        np.testing.assert_allclose(got[row], want, rtol=1e-5, err_msg=f"{text} {sampling}")


@pytest.mark.slow("computes penalties of many random histories")
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.data())
def test_dry_is_its_definition(tokens: list[int], data: st.DataObject) -> None:
    """Two rows with their own tokens and parameters; padding does not count."""
    samplings, texts = [], []
    for text in (tokens, data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=24))):
        texts.append(text)
        samplings.append(
            Sampling(
                dry_multiplier=data.draw(st.sampled_from([0.5, 2.0])),
                dry_base=data.draw(st.sampled_from([1.0, 1.75])),
                dry_allowed_length=data.draw(st.integers(1, 3)),
                dry_penalty_last_n=data.draw(st.sampled_from([-1, 0, 5, 12])),
                dry_sequence_breakers=data.draw(st.sampled_from([(), ("2",), ("0", "3")])),
            )
        )
    check_dry(texts, samplings)


def test_dry_of_few_texts() -> None:
    """Runs that start at the first token, that overlap the end, and that follow a breaker."""
    options = {"dry_multiplier": 2.0, "dry_allowed_length": 1}
    whole = Sampling(**options, dry_penalty_last_n=-1, dry_sequence_breakers=())
    cut = Sampling(**options, dry_penalty_last_n=6, dry_sequence_breakers=("3",))
    check_dry([[0, 1, 0, 0], [0, 1, 0, 1, 2, 0, 0, 1]], [whole, cut])
    check_dry([[2, 0, 1, 2, 0, 1, 2], [0, 1, 3, 0, 1, 2, 0, 1]], [whole, cut])


def test_dry_of_a_very_long_run_is_finite() -> None:
    sampling = Sampling(dry_multiplier=100, dry_base=100, dry_sequence_breakers=())
    text = TokenHistory(jnp.zeros((1, 400), jnp.int32), jnp.array([400], jnp.int32))
    parameters = jax.tree.map(jnp.asarray, SamplingArrays.of([sampling], breaks=breaks_of))
    got = np.asarray(penalties_of(text, parameters))[0]
    assert got[0] == np.float32(1e30) and not got[1:].any()


def test_tokens_that_are_counted() -> None:
    """Divides positive logits and multiplies negative ones, then subtracts the count penalties."""
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.25)
    logits, counts = [2.0, 1.5, -1.0, -1.1, 0.0, -3.0], [1, 0, 3, 0, 2, 1]
    given = SamplingStages.of([sampling]), SamplingArrays.of([sampling]), jnp.zeros(1, jnp.int32)
    got = penalties.adjust(jnp.array([logits]), *given, jnp.array([counts]), None)
    want = [2 / 1.5 - 0.55, 1.5, -1.5 - 1.05, -1.1, -0.8, -4.5 - 0.55]
    assert nmse(got[0], want) <= 1e-13


def test_short_texts_have_no_end() -> None:
    """Excludes each row's own end tokens until it has its minimum."""
    samplings = [
        Sampling(min_new_tokens=2),
        Sampling(min_new_tokens=3, ignore_end=True, stop_token_ids=[0]),
        Sampling(min_new_tokens=3, ignore_end=True),
        Sampling(stop_token_ids=[3, 3]),
    ]
    ends = (1, 5)
    stages, parameters = SamplingStages.of(samplings, ends), SamplingArrays.of(samplings, ends)
    assert stages == SamplingStages(minimum=True, ends=8)
    assert [ids[ids >= 0].tolist() for ids in parameters.end_ids] == [[1, 5], [0], [], [1, 5, 3]]
    for step, excluded in {0: [[1, 5], [0], [], []], 2: [[], [0], [], []], 3: [[]] * 4}.items():
        steps = jnp.full(4, step, jnp.int32)
        got = penalties.adjust(jnp.ones((4, VOCAB)), stages, parameters, steps, None, None)
        assert [np.flatnonzero(row == -np.inf).tolist() for row in np.asarray(got)] == excluded
        assert (np.asarray(got) == 1).sum() == 4 * VOCAB - sum(map(len, excluded))


def test_tokens_that_break_runs() -> None:
    tokenizer = models.load("demo").tokenizer
    found = tokenizer.tokens_with(("\n", '"'))
    texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert found == tuple(i for i, text in enumerate(texts) if b"\n" in text or b'"' in text)
    assert found and tokenizer.tokens_with(("\n", '"')) is found
    assert tokenizer.tokens_with(("no token holds this",)) == ()
    end = tokenizer.eos_token_id  # a control token, by its spelling
    assert tokenizer.tokens_with((tokenizer.token(end),)) == (end,)


@pytest.mark.slow("compiles several programs")
def test_dry_keeps_a_text_from_repeating_itself() -> None:
    demo = models.load("demo")
    options = {"max_new_tokens": 60, "ignore_end": True, "dry_sequence_breakers": ()}
    plain = models.generate(demo, "The sea was", **options).tokens
    dry = models.generate(demo, "The sea was", dry_multiplier=5.0, **options).tokens

    def repeated(tokens: list[int]) -> int:
        runs = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        return len(runs) - len(set(runs))

    assert repeated(plain) > 10 and repeated(dry) == 0


def test_missing_operands() -> None:
    logits = jnp.zeros((1, VOCAB))
    sampling = Sampling(dry_multiplier=1, dry_sequence_breakers=())
    with pytest.raises(ValueError, match="DRY needs the tokens that break a run"):
        SamplingArrays.of([sampling])
    stages = SamplingStages.of([sampling])
    parameters = SamplingArrays.of([sampling], breaks=breaks_of)
    with pytest.raises(ValueError, match="need the tokens so far: pass history"):
        penalties.adjust(logits, stages, parameters, jnp.zeros(1, jnp.int32), None, None)
    with pytest.raises(ValueError, match="dry_sequence_breakers needs a tokenizer"):
        models.generate(model("llama-gqa"), [1], dry_multiplier=1)
