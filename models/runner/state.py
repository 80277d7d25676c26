"""Generation under way: what programs hand from one to the next."""

from __future__ import annotations

import dataclasses

import jax

from ..kv_cache import PagedCache
from ..sampling.sampler import Logprobs
from ..support.exportable import exportable


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """What drafts are made of, and how they have fared.

    Attributes:
      drafts: int32 (batch, tokens), those that were looked up.
      found: bool (batch,), whether there is a draft.
      credit: float32 (), how many drafts in a row may fail before generation waits with them.
      drafted, accepted: int32 (batch,), tokens of drafts in all, and those that stayed.
      cache: the draft model's, of all tokens but the last; None: there is no such model.
      vector: (batch, hidden_size), what a `Drafter` has behind the last token; None: there is none.
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
    """Generation under way; donated from call to call.

    Attributes:
      cache: of all tokens but the last.
      token: int32 (batch,), the last one sampled, not yet stored.
      tokens: int32 (batch, the cache's capacity), new tokens; those from counts[b] on mean nothing.
      counts: int32 (batch,), new tokens of each row, an end token included.
      finished: bool (batch,), rows that sampled an end token or were stopped.
      step: int32, passes, which without drafts are the new tokens of a row that is not finished.
      seen: int32 (batch, vocab_size), how often tokens that penalties apply to were there; None
        without any.
      text: int32 (batch, capacity), prompts and new tokens; the last one lies behind those of the
        cache. None where nothing reads it.
      logprobs: of `tokens`, alike; None: they are not kept.
      drafting: None: there are no drafts.
    """

    cache: PagedCache
    token: jax.Array
    tokens: jax.Array
    counts: jax.Array
    finished: jax.Array
    step: jax.Array
    seen: jax.Array | None = None
    text: jax.Array | None = None
    logprobs: Logprobs | None = None
    drafting: Drafting | None = None
