"""Samples the next token from logits, in jit; sampling parameters are arrays, one entry per row.

A program computes only its `SamplingStages`, so greedy decoding is an argmax. Stages that a row
does not need leave its tokens unchanged.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k.ops.draw import DrawParameters, draw

from ..support.exportable import exportable
from .penalties import TokenHistory, adjust
from .stages import SamplingArrays, SamplingStages


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
      counts: int32 (batch, vocab), occurrences of each token so far; required if
        `stages.penalizes`.
      history: required if `stages.reads_history`.

    Raises ValueError at trace time if shapes do not match.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits of shape {logits.shape} must be (batch, vocab), neither empty")
    logits = adjust(logits.astype(jnp.float32), stages, parameters, steps, counts, history)
    if not stages.draws:
        return jq.argmax(logits)
    p = parameters
    return draw(logits, DrawParameters(p.seed, p.temperature, p.top_k, p.top_p, p.min_p, steps))


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
