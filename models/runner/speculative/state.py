"""Defines State: what a loop of speculative decoding carries from pass to pass."""

from __future__ import annotations

import dataclasses

import jax

from ...kv_cache import PagedCache
from ...sampling.sampler import Logprobs
from ...support.exportable import exportable


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """State of speculative decoding: the next drafts, acceptance statistics, the drafter's cache.

    Attributes:
      drafts: int32 (batch, tokens), the next drafts from prompt lookup.
      found: bool (batch,), whether a row has a draft.
      credit: float32 scalar, how many drafts in sequence may fail before speculation pauses.
      drafted, accepted: int32 (batch,), totals of draft tokens and of accepted ones.
      cache: the draft model's cache, of all tokens but the last; None if there is no draft model.
      vector: (batch, hidden_size), hidden state of a `Drafter` at the last token; None if there is
        no `Drafter`.
    """

    drafts: jax.Array
    found: jax.Array
    credit: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    cache: PagedCache | None = None
    vector: jax.Array | None = None


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Rows of a loop that decodes with drafts.

    Attributes:
      cache: keys, values and recurrent state of all tokens but the last.
      token: int32 (batch,), the last sampled token, not yet stored in the cache.
      tokens: int32 (batch, the cache's capacity), new tokens; invalid from counts[b] on.
      counts: int32 (batch,), number of new tokens of each row, an end token included.
      finished: bool (batch,), rows that sampled an end token or were stopped.
      step: int32 scalar, number of passes; without drafts, also the new tokens of unfinished rows.
      seen: int32 (batch, vocab_size), occurrences of each token; None unless penalties need it.
      history: int32 (batch, capacity), prompt and new tokens, one more than the cache holds. None
        unless drafts, DRY or a processor reads it.
      logprobs: log-probabilities of `tokens`; None unless requested.
      speculation: state of speculative decoding; None if there are no drafts.
    """

    cache: PagedCache
    token: jax.Array
    tokens: jax.Array
    counts: jax.Array
    finished: jax.Array
    step: jax.Array
    seen: jax.Array | None = None
    history: jax.Array | None = None
    logprobs: Logprobs | None = None
    speculation: SpeculationState | None = None
