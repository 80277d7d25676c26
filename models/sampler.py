"""The choice of the next token from logits, in jit: parameters of rows are arrays.

What a program computes at all is its `Way`; stages that no row needs are not in it, so that greedy
decoding is an argmax, and a sort over the vocabulary happens only where a row takes top-p, or a
large top-k, of all tokens. Of two ways that fit, a row gets the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq

from .buckets import bucket
from .exportable import exportable
from .sampling import LEAST_TEMPERATURE, Sampling

#: As `Way.candidates`: every token, in order.
ALL = -1
#: Most candidates that are picked out instead of sorting all tokens, and fewest.
_MOST, _FEWEST = 1024, 64
#: Beyond every vocabulary: ids that fill a row up.
_NO_TOKEN = np.int32(2**31 - 1)


class Way(NamedTuple):
    """The stages of a program that samples, for rows that may each leave some switched off.

    Attributes:
      draws: some row does not take the likeliest token.
      candidates: tokens that are put in order, where rows filter by it; 0: none does.
      penalizes: tokens seen before are counted.
      biases, ends: slots of a row for tokens with a bias, and for tokens that end it.
    """

    draws: bool = False
    candidates: int = 0
    penalizes: bool = False
    biases: int = 0
    ends: int = 0

    @classmethod
    def of(cls, samplings: Sequence[Sampling], end_ids: Sequence[int] = ()) -> Way:
        """One for rows with these; those that do not ignore ends end with `end_ids`."""
        drawn = [sampling for sampling in samplings if not sampling.greedy]
        most = max((len(sampling.biases) for sampling in samplings), default=0)
        return cls(
            draws=bool(drawn),
            candidates=_candidates(drawn),
            penalizes=any(sampling.penalizes for sampling in samplings),
            biases=bucket(most) if most else 0,
            ends=bucket(len(end_ids)) if end_ids else 0,
        )

    @property
    def is_argmax(self) -> bool:
        """True where a token is the likeliest one by the logits as they are."""
        return self == Way(ends=self.ends)


def _candidates(drawn: Sequence[Sampling]) -> int:
    if not any(sampling.top_k or sampling.top_p < 1 for sampling in drawn):
        return 0
    counts = [sampling.top_k for sampling in drawn]
    if not all(0 < count <= _MOST for count in counts):
        return ALL
    return max(bucket(max(counts)), _FEWEST)


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parameters:
    """Rows' ways of sampling, as `Sampling` has them: arrays (batch,).

    Attributes:
      bias_ids, biases: int32 and float32 (batch, slots); slots that are free name no token.
      end_ids: int32 (batch, slots), tokens that end a row; -1: none.
      max_new_tokens: with which a row ends.
    """

    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    bias_ids: jax.Array
    biases: jax.Array
    end_ids: jax.Array
    max_new_tokens: jax.Array

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], end_ids: Sequence[int] = (), way: Way | None = None
    ) -> Parameters:
        """NumPy's arrays of rows, for a program of `way`, or of the one that they ask for."""
        way = Way.of(samplings, end_ids) if way is None else way
        batch = len(samplings)

        def each(name: str, dtype: type = np.float32) -> Any:
            return np.array([getattr(sampling, name) for sampling in samplings], dtype)

        ids: Any = np.full((batch, way.biases), _NO_TOKEN, np.int32)
        biases: Any = np.zeros((batch, way.biases), np.float32)
        ends: Any = np.full((batch, way.ends), -1, np.int32)
        for row, sampling in enumerate(samplings):
            for slot, (token, bias) in enumerate(sampling.biases):
                ids[row, slot], biases[row, slot] = token, bias
            if not sampling.ignore_end:
                ends[row, : len(end_ids)] = end_ids
        names = ("temperature", "top_p", "min_p")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return cls(
            seed=each("seed", np.uint32),
            top_k=each("top_k", np.int32),
            **{name: each(name) for name in (*names, *penalties)},
            bias_ids=ids,
            biases=biases,
            end_ids=ends,
            max_new_tokens=each("max_new_tokens", np.int32),
        )

    def repeated(self, count: int) -> Parameters:
        """Each row `count` times, one behind the other."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), self)

    def are_ends(self, tokens: jax.Array) -> jax.Array:
        """Whether tokens int32 (batch, ...) end their rows."""
        ends = self.end_ids.reshape(len(self.end_ids), *[1] * (tokens.ndim - 1), -1)
        return (tokens[..., None] == ends).any(axis=-1)


def count_tokens(tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> jax.Array:
    """How often each token is in right-padded prompts: int32 (batch, vocab).

    tokens: int32 (batch, time); lengths: int32 (batch,), what follows is padding and not counted.
    """
    rows, steps = (jnp.arange(size, dtype=jnp.int32) for size in tokens.shape)
    # Padding goes to an index out of range, which mode="drop" leaves out.
    index = jnp.where(steps[None] < lengths[:, None], tokens, vocab_size)
    counts = jnp.zeros((tokens.shape[0], vocab_size), jnp.int32)
    return counts.at[rows[:, None], index].add(1, mode="drop")


def count_token(counts: jax.Array, tokens: jax.Array) -> jax.Array:
    """`counts` (batch, vocab) with one more token, int32 (batch,), in each row."""
    return counts.at[jnp.arange(counts.shape[0], dtype=jnp.int32), tokens].add(1)


def sample(
    logits: jax.Array,
    way: Way,
    parameters: Parameters,
    steps: jax.Array,
    counts: jax.Array | None = None,
) -> jax.Array:
    """Next tokens, int32 (batch,): a row's by its own logits, parameters, step and counts alone.

    Args:
      logits: float (batch, vocab).
      steps: int32 (batch,), tokens that each row has sampled before.
      counts: int32 (batch, vocab), needed if `way.penalizes`: `count_tokens` and `count_token`.

    Raises ValueError at trace time where shapes do not fit.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits of shape {logits.shape} must be (batch, vocab), neither empty")
    logits = logits.astype(jnp.float32)
    if way.biases:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = logits.at[rows, parameters.bias_ids].add(parameters.biases, mode="drop")
    if way.penalizes:
        logits = _penalize(logits, counts, parameters)
    if not way.draws:
        return jq.argmax(logits)
    logits, tokens = filtered(logits, way, parameters)
    # Shifted so that a tiny temperature gives -inf, never inf - inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    temperature = parameters.temperature[:, None]
    drawn = logits / jnp.maximum(temperature, 1e-30) + _noise(parameters.seed, steps, tokens)
    at = jq.argmax(jnp.where(temperature < LEAST_TEMPERATURE, logits, drawn))
    return jnp.take_along_axis(tokens, at[:, None], axis=-1)[:, 0]


def filtered(logits: jax.Array, way: Way, parameters: Parameters) -> tuple[jax.Array, jax.Array]:
    """Top-k, top-p and min-p of logits float32 (batch, vocab): dropped ones become -inf.

    Returns logits float32 (batch, n) and their tokens, int32 (batch, n); where rows filter by order
    the most likely first, else all in theirs. Of equal logits the lower token counts as the more
    likely.
    """
    vocab = logits.shape[-1]
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if way.candidates:
        if 0 < way.candidates < vocab:
            logits, tokens = jq.top_k(logits, way.candidates)
        else:
            negated, tokens = jax.lax.sort((-logits, tokens), num_keys=1, is_stable=True)
            logits = -negated
        rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        top_k, top_p = parameters.top_k[:, None], parameters.top_p[:, None]
        logits = jnp.where((rank < top_k) | (top_k == 0), logits, -jnp.inf)
        shares = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(shares[:, :-1], axis=-1)  # of all tokens that are more likely
        before = jnp.pad(before, ((0, 0), (1, 0)), constant_values=-1.0)
        logits = jnp.where((before < top_p) | (top_p >= 1), logits, -jnp.inf)
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(parameters.min_p)[:, None]
    return jnp.where(logits < least, -jnp.inf, logits), tokens


def _noise(seeds: jax.Array, steps: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gumbel's noise float32 (batch, n) of tokens: each token's own, whichever stand beside it.

    The likeliest token with it is a draw (https://arxiv.org/abs/1411.0030).
    """

    def of_row(seed: jax.Array, step: jax.Array, tokens: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        of_each = jax.vmap(lambda token: jax.random.fold_in(key, token))(tokens)
        return jax.random.key_data(of_each)[:, 0]

    bits = jax.vmap(of_row)(seeds, steps, tokens)
    # 23 bits, and half of one more, so that neither 0 nor 1 comes out.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-23
    return -jnp.log(-jnp.log(uniform))


def _penalize(logits: jax.Array, counts: jax.Array | None, parameters: Parameters) -> jax.Array:
    if counts is None:
        raise ValueError("penalties need the tokens seen so far: pass counts")
    if counts.shape != logits.shape:
        raise ValueError(
            f"counts of shape {counts.shape} must be (batch, vocab) as logits, {logits.shape}"
        )
    seen, penalty = counts > 0, parameters.repetition_penalty[:, None]
    # llama.cpp's rule (CTRL, Keskar et al. 2019, with the sign respected).
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    penalized = penalized - parameters.presence_penalty[:, None]
    penalized = penalized - parameters.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return jnp.where(seen, penalized, logits)
