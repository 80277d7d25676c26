"""Changes logits before filtering: biases, penalties, DRY and user functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .params import Processor
from .stages import SamplingArrays, SamplingStages

#: Largest DRY penalty: excludes a token without overflow of float32.
_MOST = np.float32(1e30)
#: Bit that is set in the count of a token that occurs in the uncounted part of the prompt, where
#: only `repetition_penalty` applies.
UNCOUNTED = 1 << 30


class TokenHistory(NamedTuple):
    """Prompt and new tokens of each row.

    Attributes:
      tokens: int32 (batch, capacity).
      lengths: int32 (batch,), number of valid tokens.
    """

    tokens: jax.Array
    lengths: jax.Array


def adjust(
    logits: jax.Array,
    stages: SamplingStages,
    parameters: SamplingArrays,
    steps: jax.Array,
    counts: jax.Array | None,
    history: TokenHistory | None,
) -> jax.Array:
    """Applies biases, penalties and DRY to logits in llama.cpp's order, then user functions.

    Excludes end tokens at last where `min_new_tokens` does. The arguments are those of
    `sampler.sample`. Returns logits float32 (batch, vocab).

    Raises:
      ValueError: at trace time, if `stages` needs counts or a history that is None, or a user
        function does not return logits.
    """
    if stages.biases:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = logits.at[rows, parameters.bias_ids].add(parameters.biases, mode="drop")
    if stages.penalizes:
        logits = _penalized(logits, counts, parameters)
    if stages.reads_history and history is None:
        raise ValueError("DRY and functions of logits need the tokens so far: pass history")
    if stages.dry and history is not None:
        logits = logits - dry_penalties(history, parameters, logits.shape[1])
    for chain, processors in enumerate(stages.processors):
        assert history is not None
        new = processed(processors, logits, history)
        logits = jnp.where((parameters.chain == chain)[:, None], new, logits)
    if stages.minimum:
        ends, vocab = parameters.end_ids, logits.shape[1]
        is_short = (steps < parameters.min_new_tokens)[:, None]
        excluded = jnp.where(is_short & (ends >= 0), ends, vocab)
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = logits.at[rows, excluded].set(-jnp.inf, mode="drop")
    return logits


def processed(
    processors: Sequence[Processor], logits: jax.Array, history: TokenHistory
) -> jax.Array:
    """Applies user functions in sequence to logits float32 (batch, vocab).

    Raises ValueError at trace time if one does not return logits.
    """
    for processor in processors:
        found = jax.vmap(processor)(logits, history.tokens, history.lengths)
        if found.shape != logits.shape:
            name = getattr(processor, "__name__", repr(processor))
            shapes = f"shape {found.shape[1:]}; logits have {logits.shape[1:]}"
            raise ValueError(f"{name} returned {shapes}")
        logits = found.astype(jnp.float32)
    return logits


def dry_penalties(history: TokenHistory, parameters: SamplingArrays, vocab_size: int) -> jax.Array:
    """Returns the DRY penalty of each token, float32 (batch, vocab).

    If the last n tokens occurred before, the token that followed that occurrence is penalized by
    multiplier * base ** (n - allowed_length), for n >= allowed_length
    (https://github.com/oobabooga/text-generation-webui/pull/5677). For each token, the longest
    match counts.
    """
    tokens, lengths = history
    batch, capacity = tokens.shape
    at = jnp.arange(capacity, dtype=jnp.int32)[None]
    last_n = parameters.dry_penalty_last_n
    start = jnp.where(last_n < 0, 0, jnp.maximum(lengths - last_n, 0))[:, None]
    lengths = lengths[:, None]
    inside = (at >= start) & (at < lengths)
    breaks = inside & jnp.take_along_axis(parameters.dry_breaks, tokens, axis=1)
    # Runs begin after the last break.
    first = jnp.max(jnp.where(breaks, at + 1, start), axis=1, keepdims=True)
    longest = lengths - first

    def going_on(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return carry[1].any()

    def longer(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Extends matches with the end of the history from `size` tokens to size + 1.

        A match is a run that ends before a position and equals the last tokens of the history.
        """
        size, alike, runs = carry
        last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1 - size, 0), axis=1)
        before = jnp.take_along_axis(tokens, jnp.maximum(at - 1 - size, 0), axis=1)
        alike &= (before == last) & (at - 1 - size >= start) & (size < longest)
        return size + 1, alike, runs + alike.astype(jnp.int32)

    _, _, runs = jax.lax.while_loop(
        going_on, longer, (jnp.int32(0), inside, jnp.zeros_like(tokens))
    )
    multiplier, base = parameters.dry_multiplier[:, None], parameters.dry_base[:, None]
    excess = runs - parameters.dry_allowed_length[:, None]
    penalties = jnp.minimum(multiplier * base ** excess.astype(jnp.float32), _MOST)
    penalties = jnp.where((runs > 0) & (excess >= 0), penalties, 0.0)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.zeros((batch, vocab_size), jnp.float32).at[rows, tokens].max(penalties)


def _penalized(
    logits: jax.Array, counts: jax.Array | None, parameters: SamplingArrays
) -> jax.Array:
    if counts is None:
        raise ValueError("penalties need the tokens seen so far: pass counts")
    if counts.shape != logits.shape:
        raise ValueError(
            f"counts of shape {counts.shape} must be (batch, vocab) as logits, {logits.shape}"
        )
    penalty = parameters.repetition_penalty[:, None]
    # llama.cpp's rule (CTRL, Keskar et al. 2019, with the sign respected).
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(counts > 0, repeated, logits)
    counted = counts & (UNCOUNTED - 1)
    penalized = logits - parameters.presence_penalty[:, None]
    penalized = penalized - parameters.frequency_penalty[:, None] * counted.astype(jnp.float32)
    return jnp.where(counted > 0, penalized, logits)
