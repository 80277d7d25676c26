"""Choosing the next token from logits, inside jit.

What a `SamplingParams` leaves switched off costs nothing: its fields are static and decide the
graph, so greedy decoding is an argmax, and a sort over the vocabulary happens only for top-p
without top-k.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp

import jax_q4k as jq


def _range(low: float, high: float, default: float, open_low: bool = False) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "open_low": open_low})


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; validated, hashable and static under jit.

    Filters apply in llama.cpp's order: repetition penalty, top-k, top-p, min-p, then temperature,
    so which tokens stay does not depend on the temperature.
    """

    temperature: float = _range(0, 100, 0.0)
    """0 takes the most likely token, whatever the filters; anything below 1e-5 counts as 0."""
    top_k: int = _range(0, 2**31 - 1, 0)
    """Keep this many of the most likely tokens; 0 keeps all."""
    top_p: float = _range(0, 1, 1.0, open_low=True)
    """Keep the fewest most likely tokens whose probabilities sum to this at least."""
    min_p: float = _range(0, 1, 0.0)
    """Keep tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = _range(0.01, 100, 1.0)
    """Divides positive logits of tokens seen before, prompt included, and multiplies negative
    ones.
    """
    seed: int = field(
        default=0, compare=False, metadata={"low": 0, "high": 2**32 - 1, "open_low": False}
    )
    """For `key`. Not part of equality and hash, so that another seed compiles nothing anew."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, kind = getattr(self, entry.name), int if entry.type == "int" else float
            low, high = entry.metadata["low"], entry.metadata["high"]
            bracket = "(" if entry.metadata["open_low"] else "["
            message = f"{entry.name}={value!r} must be {kind.__name__} in {bracket}{low}, {high}]"
            try:
                if isinstance(value, bool | str):
                    raise TypeError
                number = operator.index(value) if kind is int else float(value)
            except (TypeError, ValueError, OverflowError):
                raise TypeError(message) from None
            # Written so that NaN fails.
            if not (low < number <= high if entry.metadata["open_low"] else low <= number <= high):
                raise ValueError(message)
            object.__setattr__(self, entry.name, number)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_seen(self) -> bool:
        """Whether `sample` needs the mask of tokens seen before."""
        return self.repetition_penalty != 1

    def key(self) -> jax.Array:
        """The random key of `seed`. Not for use inside jit: the seed is not part of what is
        compiled.
        """
        return jax.random.key(self.seed)


def seen_tokens(tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> jax.Array:
    """Mask of the tokens in right-padded prompts: bool (batch, vocab).

    tokens: int32 (batch, time); lengths: int32 (batch,), what follows is padding and not counted.
    """
    rows, steps = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1])[None, :]
    # Padding goes to an index out of range, which mode="drop" leaves out.
    index = jnp.where(steps < lengths[:, None], tokens, vocab_size)
    return jnp.zeros((tokens.shape[0], vocab_size), bool).at[rows, index].set(True, mode="drop")


def mark_seen(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """`seen` (batch, vocab) with one more token, int32 (batch,), in each row."""
    return seen.at[jnp.arange(seen.shape[0]), tokens].set(True)


def sample(
    logits: jax.Array, key: jax.Array | None, params: SamplingParams, seen: jax.Array | None = None
) -> jax.Array:
    """Next tokens, int32 (batch,).

    logits: float (batch, vocab). key: a random key, a new one for each step; greedy ignores it, and
    takes None.
    seen: bool or counts (batch, vocab), needed if `params.needs_seen`; see `seen_tokens` and
    `mark_seen`. Raises ValueError at trace time where shapes do not fit.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits of shape {logits.shape} must be (batch, vocab), neither empty")
    logits = logits.astype(jnp.float32)
    if params.needs_seen:
        logits = _penalize(logits, seen, params.repetition_penalty)
    if params.greedy:
        return jq.argmax(logits)
    logits, indices = filter_logits(logits, params)
    # Shifted so that a tiny temperature gives -inf, never inf - inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / params.temperature
    if key is None:
        raise ValueError("key is None; only greedy sampling needs no random key")
    choice = jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
    return (
        choice if indices is None else jnp.take_along_axis(indices, choice[:, None], axis=-1)[:, 0]
    )


def filter_logits(logits: jax.Array, params: SamplingParams) -> tuple[jax.Array, jax.Array | None]:
    """Top-k, top-p and min-p of logits float32 (batch, vocab): dropped ones become -inf.

    Returns (logits, None), or, where they had to be ordered, the most likely first, float32 (batch,
    k), with their tokens, int32 (batch, k). Of equal logits the lower token counts as the more
    likely.
    """
    vocab = logits.shape[-1]
    indices = None
    if 0 < params.top_k < vocab:
        logits, indices = jq.top_k(logits, params.top_k)
    elif params.top_p < 1:
        tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        negated, indices = jax.lax.sort((-logits, tokens), num_keys=1, is_stable=True)
        logits = -negated
    if params.top_p < 1:
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities[:, :-1], axis=-1)  # of all tokens that are more likely
        keep = jnp.pad(before < params.top_p, ((0, 0), (1, 0)), constant_values=True)
        logits = jnp.where(keep, logits, -jnp.inf)
    if params.min_p > 0:
        threshold = jnp.max(logits, axis=-1, keepdims=True) + math.log(params.min_p)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return logits, indices


def _penalize(logits: jax.Array, seen: jax.Array | None, penalty: float) -> jax.Array:
    if seen is None:
        raise ValueError(f"repetition_penalty={penalty} needs the tokens seen so far: pass seen")
    if seen.shape != logits.shape:
        raise ValueError(
            f"seen of shape {seen.shape} must be (batch, vocab) as logits, {logits.shape}"
        )
    # llama.cpp's rule (CTRL, Keskar et al. 2019, with the sign respected).
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen.astype(bool), penalized, logits)
