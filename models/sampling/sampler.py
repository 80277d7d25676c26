"""Samples the next token from logits, in jit; sampling parameters are arrays, one entry per row.

A program computes only its `SamplingStages`, so greedy decoding is an argmax. Stages that a row
does not need leave its tokens unchanged.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jax_q4k as jq

from ..support.exportable import exportable
from .params import LEAST_TEMPERATURE
from .penalties import TokenHistory, changed
from .stages import ALL, SamplingArrays, SamplingStages


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities of the sampled tokens and of the most likely tokens.

    Attributes:
      chosen: float32 (batch, ...), log-probabilities of the sampled tokens.
      tokens: int32 (batch, ..., n), the most likely tokens, in descending order. The last field has
        their log-probabilities, float32 (batch, ..., n).
    """

    chosen: jax.Array
    tokens: jax.Array
    likeliest: jax.Array


def sample(
    logits: jax.Array,
    stages: SamplingStages,
    parameters: SamplingArrays,
    steps: jax.Array,
    counts: jax.Array | None = None,
    history: TokenHistory | None = None,
) -> jax.Array:
    """Samples the next tokens, int32 (batch,).

    A row's token depends only on its own logits, parameters, step and history.

    Args:
      logits: float (batch, vocab).
      steps: int32 (batch,), number of tokens that each row has sampled before.
      counts: int32 (batch, vocab), required if `stages.penalizes`; see `count_tokens` and
        `count_token` of `penalties`.
      history: required if `stages.reads_history`.

    Raises ValueError at trace time if shapes do not match.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits of shape {logits.shape} must be (batch, vocab), neither empty")
    logits = changed(logits.astype(jnp.float32), stages, parameters, counts, history)
    if not stages.draws:
        return jq.argmax(logits)
    remaining, tokens, enough = filtered(logits, stages, parameters)
    chosen = _drawn(remaining, tokens, parameters, steps)
    if not stages.checks or stages.candidates >= logits.shape[1]:
        return chosen

    def of_all(_: jax.Array) -> jax.Array:
        """Samples after sorting all tokens of every row.

        Sorting takes as long for some rows as for all.
        """
        remaining, tokens, _ = filtered(logits, stages._replace(candidates=ALL), parameters)
        return jnp.where(enough, chosen, _drawn(remaining, tokens, parameters, steps))

    return jax.lax.cond(jnp.all(enough), lambda chosen: chosen, of_all, chosen)


def _drawn(
    logits: jax.Array, tokens: jax.Array, parameters: SamplingArrays, steps: jax.Array
) -> jax.Array:
    """Draws one token per row, int32 (batch,), from logits and tokens of `filtered`."""
    # Shifted so that a tiny temperature results in -inf, never in inf - inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    temperature = parameters.temperature[:, None]
    drawn = logits / jnp.maximum(temperature, 1e-30) + _noise(parameters.seed, steps, tokens)
    at = jq.argmax(jnp.where(temperature < LEAST_TEMPERATURE, logits, drawn))
    return jnp.take_along_axis(tokens, at[:, None], axis=-1)[:, 0]


def filtered(
    logits: jax.Array, stages: SamplingStages, parameters: SamplingArrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Applies top-k, top-p and min-p to logits float32 (batch, vocab); drops tokens with -inf.

    Returns logits float32 (batch, n), their tokens int32 (batch, n), and whether they include all
    tokens that pass the filters, bool (batch,). If rows use top-k or top-p, tokens are sorted by
    descending likelihood, and equal logits by token id; otherwise all tokens keep their order.
    """
    vocab = logits.shape[-1]
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    enough = jnp.ones(len(logits), bool)
    if stages.candidates:
        all_logits, some = logits, 0 < stages.candidates < vocab
        if some:
            logits, tokens = jq.top_k(logits, stages.candidates)
        else:
            negated, tokens = jax.lax.sort((-logits, tokens), num_keys=1, is_stable=True)
            logits = -negated
        rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        top_k, top_p = parameters.top_k[:, None], parameters.top_p[:, None]
        logits = jnp.where((rank < top_k) | (top_k == 0), logits, -jnp.inf)
        norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if stages.checks or not some:  # rows without top-k normalize over all tokens
            norm = jnp.where(top_k == 0, jax.nn.logsumexp(all_logits, axis=-1, keepdims=True), norm)
        shares = jnp.exp(logits - norm)
        sums = jnp.cumsum(shares, axis=-1)
        before = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)), constant_values=-1.0)
        logits = jnp.where((before < top_p) | (top_p >= 1), logits, -jnp.inf)
        if stages.checks and some:
            greedy = parameters.temperature[:, None] < LEAST_TEMPERATURE
            reached = (sums[:, -1:] >= top_p) & (top_p < 1)
            enough = ((top_k > 0) | reached | greedy)[:, 0]
    threshold = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(parameters.min_p)[:, None]
    return jnp.where(logits < threshold, -jnp.inf, logits), tokens, enough


def logprobs_of(logits: jax.Array, chosen: jax.Array, count: int) -> Logprobs:
    """Returns Logprobs of the tokens `chosen`, int32 (batch,), and the `count` most likely tokens.

    logits: float (batch, vocab), before biases, penalties, temperature and filters.
    """
    logits = logits.astype(jnp.float32)
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    of_chosen = jnp.take_along_axis(logits, chosen[:, None], axis=-1) - norm
    likeliest, tokens = logits[:, :0], jnp.zeros((len(logits), 0), jnp.int32)
    if count:
        likeliest, tokens = jq.top_k(logits, min(count, logits.shape[-1]))
    return Logprobs(of_chosen[:, 0], tokens, likeliest - norm)


def _noise(seeds: jax.Array, steps: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns Gumbel noise float32 (batch, n), which depends on each token's id, not its index.

    The argmax of logits plus noise is a sample (https://arxiv.org/abs/1411.0030).
    """

    def of_row(seed: jax.Array, step: jax.Array, tokens: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        of_each = jax.vmap(lambda token: jax.random.fold_in(key, token))(tokens)
        return jax.random.key_data(of_each)[:, 0]

    bits = jax.vmap(of_row)(seeds, steps, tokens)
    # 23 bits plus half a bit, so that the result is neither 0 nor 1.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-23
    return -jnp.log(-jnp.log(uniform))
