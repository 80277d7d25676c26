"""Runs speculative decoding: verifies several draft tokens in one pass; output is unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ...kv_cache import PagedCache
from ...sampling.penalties import TokenHistory
from ...sampling.sampler import Logprobs
from ...sampling.stages import SamplingArrays
from .drafts import Draft, PromptLookup, model_drafts
from .mtp import Drafter
from .state import SpeculationState, State

if TYPE_CHECKING:
    from ...network.decoder import Decoder
    from ...sharding.placement import Placement

#: Fraction of the time without drafts that failed drafts may cost in the long run.
LOSS = 1 / 64

#: Largest credit: how many drafts may fail after many successes before speculation pauses.
MOST_CREDIT = 4.0


#: Credit before the first draft.
FIRST_CREDIT = 1.0

#: Maps logits float (n, vocab), parameters of n rows, their steps (n,), and a function that returns
#: counts (n, vocab) and history of n rows, to the sampled tokens (n,) and their log-probabilities.
Choose = Callable[
    [
        jax.Array,
        SamplingArrays,
        jax.Array,
        Callable[[], tuple[jax.Array | None, TokenHistory | None]],
    ],
    tuple[jax.Array, Logprobs | None],
]


def begin(batch: int, count: int, cache: PagedCache | None) -> SpeculationState:
    """Returns the initial SpeculationState, for drafts of `count` tokens."""
    zeros = jnp.zeros(batch, jnp.int32)
    drafts, found = jnp.zeros((batch, count), jnp.int32), jnp.ones(batch, bool)
    return SpeculationState(drafts, found, jnp.float32(FIRST_CREDIT), zeros, zeros, cache)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Runs speculative decoding of a batch for one model and one kind of draft.

    Attributes:
      tokens: draft tokens per pass.
      cost: extra time to verify drafts, in units of a pass without them; float32 scalar.
      choose: samples tokens.
      parameters: sampling parameters, one entry per row.
      decoder: the main model's decoder.
      allowed: bool (batch,), rows that may draft; None means all.
      drafter: the draft model's decoder, or the multi-token-prediction layer; None for prompt
        lookup.
      placement: the model's sharding over several devices; None means one device.
    """

    draft: Draft
    tokens: int
    cost: float | jax.Array
    choose: Choose
    parameters: SamplingArrays
    decoder: Decoder
    allowed: jax.Array | None = None
    drafter: Decoder | Drafter | None = None
    placement: Placement | None = None

    def start(
        self, state: State, tokens: jax.Array, lengths: jax.Array, vectors: jax.Array
    ) -> State:
        """Prefills the multi-token-prediction layer, if that is the drafter; returns the State.

        tokens: the prompts, (batch, time). vectors: their hidden states.
        """
        speculation = _of(state)
        if not isinstance(self.drafter, Drafter) or speculation.cache is None:
            return state
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] == lengths[:, None] - 1
        next_tokens = jnp.where(at, state.token[:, None], jnp.roll(tokens, -1, axis=1))
        normalized = self.decoder.norm(vectors)
        vector, cache = self.drafter.begin(next_tokens, normalized, lengths, speculation.cache)
        speculation = dataclasses.replace(speculation, vector=vector, cache=cache)
        return dataclasses.replace(state, speculation=speculation)

    def run(self, state: State, until: jax.Array) -> State:
        """Runs forward passes until every row is finished or has at least `until` new tokens.

        Passes with drafts and passes without are two loops inside a third: branches of `lax.cond`
        would copy the cache.
        """

        def unfinished(state: State) -> jax.Array:
            return ~state.finished & (state.counts < until)

        def tried(state: State) -> jax.Array:
            speculation = _of(state)
            found = unfinished(state) & speculation.found & (speculation.credit >= 0)
            return found if self.allowed is None else found & self.allowed

        def going_on(state: State, with_drafts: bool) -> jax.Array:
            return jnp.any(unfinished(state)) & (jnp.any(tried(state)) == with_drafts)

        def single(state: State) -> State:
            nothing = jnp.zeros((len(state.token), 0), jnp.int32)
            none = jnp.zeros_like(state.finished)
            return self._lookup(self._verify(state, nothing, unfinished(state), none))

        def checked(state: State) -> State:
            state, drafts = self._draft(state, tried(state))
            return self._lookup(self._verify(state, drafts, unfinished(state), tried(state)))

        def both(state: State) -> State:
            state = jax.lax.while_loop(lambda s: going_on(s, False), single, state)
            return jax.lax.while_loop(lambda s: going_on(s, True), checked, state)

        first = self._lookup(state)
        return jax.lax.while_loop(lambda s: jnp.any(unfinished(s)), both, first)

    def _lookup(self, state: State) -> State:
        """Looks up the next draft of each row in its history (prompt lookup only)."""
        if not isinstance(self.draft, PromptLookup):
            return state
        speculation, history = _of(state), state.history
        assert history is not None
        lengths = state.cache.context_lens + 1  # with the last token, which is not stored
        drafts, found = self.draft.found(history, lengths, self.tokens)
        speculation = dataclasses.replace(speculation, drafts=drafts, found=found)
        return dataclasses.replace(state, speculation=speculation)

    def _draft(self, state: State, tried: jax.Array) -> tuple[State, jax.Array]:
        """Runs the draft model, if there is one; returns draft tokens (batch, tokens)."""
        speculation = _of(state)
        if self.drafter is None or speculation.cache is None:
            return state, speculation.drafts
        if isinstance(self.drafter, Drafter):
            assert speculation.vector is not None
            args = speculation.vector, speculation.cache, self.tokens, tried
            drafts, cache = self.drafter.drafts(*args)
        else:
            args = state.token, speculation.cache, self.tokens, tried
            drafts, cache = model_drafts(self.drafter, *args)
        speculation = dataclasses.replace(speculation, cache=cache)
        return dataclasses.replace(state, speculation=speculation), drafts

    def _verify(
        self, state: State, drafts: jax.Array, active: jax.Array, tried: jax.Array
    ) -> State:
        """Runs the model on drafts (batch, count); keeps accepted tokens and samples one more."""
        count = drafts.shape[1]
        drafted = jnp.where(tried, count, 0)
        lengths = active.astype(jnp.int32) + drafted
        tokens = jnp.concatenate([state.token[:, None], drafts], axis=1)
        if count == 0:
            token = self._rows(state.token)
            x, cache = self.decoder.decode_vectors(token, state.cache, active)
            x = x[:, None]
        else:
            x, accepted = self.decoder.try_tokens(self._rows(tokens), lengths, state.cache)
        logits = self.decoder.logits(x)
        if self.placement is not None:
            logits = self.placement.replicate(logits)
        sampled, logprobs = self._sample(state, logits, drafts)
        right = (sampled[:, :-1] == drafts) & tried[:, None]
        accepted_counts = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        counts = jnp.where(active, accepted_counts + 1, 0)
        ends = self.parameters.are_ends(sampled)
        first_end = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), count + 1)
        ended = active & (first_end < counts)
        counts = jnp.minimum(counts, first_end.astype(jnp.int32) + 1)
        if count:
            cache = accepted(counts)
        state = _with_tokens(state, sampled, counts, logprobs)
        speculation = self._update_credit(
            _of(state), drafted, accepted_counts, active, checks=count > 0
        )
        if self.drafter is not None and speculation.cache is not None:
            passed = tokens, sampled, x, counts
            vector, cache_of_drafts = follow(
                self.drafter, self.decoder, speculation.vector, speculation.cache, *passed
            )
            speculation = dataclasses.replace(speculation, vector=vector, cache=cache_of_drafts)
        ended |= state.counts >= self.parameters.max_new_tokens
        return dataclasses.replace(
            state, cache=cache, finished=state.finished | ended, speculation=speculation
        )

    def _rows(self, x: jax.Array) -> jax.Array:
        return x if self.placement is None else self.placement.shard_rows(x)

    def _sample(
        self, state: State, logits: jax.Array, drafts: jax.Array
    ) -> tuple[jax.Array, Logprobs | None]:
        """Samples the next token at each draft position, int32 (batch, count + 1)."""
        batch, time, vocab = logits.shape
        first = state.counts + self.parameters.first_step
        steps = first[:, None] + jnp.arange(time, dtype=jnp.int32)[None]

        def read() -> tuple[jax.Array | None, TokenHistory | None]:
            seen = history = None
            if state.seen is not None:
                new = jax.nn.one_hot(drafts, vocab, dtype=jnp.int32).cumsum(axis=1, dtype=jnp.int32)
                seen = state.seen[:, None] + jnp.pad(new, ((0, 0), (1, 0), (0, 0)))
                seen = seen.reshape(-1, vocab)
            if state.history is not None:
                lengths = state.cache.context_lens + 1  # with the last token
                at = lengths[:, None] + jnp.arange(time - 1, dtype=jnp.int32)[None]
                rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
                drafted = state.history.at[rows, at].set(drafts, mode="drop")
                lengths = lengths[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
                history = TokenHistory(jnp.repeat(drafted, time, axis=0), lengths.reshape(-1))
            return seen, history

        parameters = self.parameters.repeated(time)
        found = self.choose(logits.reshape(-1, vocab), parameters, steps.reshape(-1), read)
        reshaped: tuple[jax.Array, Logprobs | None] = jax.tree.map(
            lambda x: x.reshape(batch, time, *x.shape[1:]), found
        )
        return reshaped

    def _update_credit(
        self,
        speculation: SpeculationState,
        drafted: jax.Array,
        accepted_counts: jax.Array,
        active: jax.Array,
        *,
        checks: bool,
    ) -> SpeculationState:
        """Updates credit and totals from the number of accepted draft tokens of each row."""
        rows = jnp.maximum(active.sum(dtype=jnp.float32), 1.0)
        saved = LOSS + accepted_counts.sum(dtype=jnp.float32) / rows  # in steps, averaged over rows
        credit = speculation.credit + saved / self.cost - float(checks)
        credit = jnp.minimum(credit, MOST_CREDIT)
        drafted, accepted = speculation.drafted + drafted, speculation.accepted + accepted_counts
        return dataclasses.replace(speculation, credit=credit, drafted=drafted, accepted=accepted)


def follow(
    drafter: Decoder | Drafter,
    decoder: Decoder,
    vector: jax.Array | None,
    cache: PagedCache,
    tokens: jax.Array,
    sampled: jax.Array,
    vectors: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array | None, PagedCache]:
    """Advances the drafter's cache by the first `counts` (batch,) tokens, the accepted ones.

    Args:
      decoder: the main model's decoder.
      vector: last outputs (batch, hidden_size) of a `Drafter`; None for a draft model.
      tokens, sampled: tokens (batch, time) of a pass, and those sampled after each.
      vectors: the pass's hidden states, (batch, time, hidden_size).

    Returns the new `vector`, and the cache.
    """
    if not isinstance(drafter, Drafter):
        return vector, drafter.extend(tokens, counts, cache, every=False)[1]
    last, cache = drafter.follow(sampled, decoder.norm(vectors), counts, cache)
    assert vector is not None
    return jnp.where((counts > 0)[:, None], last, vector), cache


def _of(state: State) -> SpeculationState:
    assert state.speculation is not None
    return state.speculation


def _with_tokens(
    state: State,
    sampled: jax.Array,
    counts: jax.Array,
    logprobs: Logprobs | None,
) -> State:
    """Appends the first `counts` (batch,) of the sampled tokens (batch, time) to the state."""
    batch, time = sampled.shape
    rows, steps = jnp.arange(batch)[:, None], jnp.arange(time, dtype=jnp.int32)[None]
    capacity, valid = state.tokens.shape[1], steps < counts[:, None]

    def written(array: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
        at = jnp.where(valid, first[:, None] + steps, capacity)  # beyond the last: dropped
        return array.at[rows, at].set(new, mode="drop")

    assert state.history is not None
    # The history is one token longer than the cache.
    history = written(state.history, sampled, state.cache.context_lens + 1)
    if logprobs is not None:
        old_and_new = state.logprobs, logprobs
        logprobs = jax.tree.map(lambda all, new: written(all, new, state.counts), *old_and_new)
    last = jnp.maximum(counts - 1, 0)[:, None]
    token = jnp.where(counts > 0, jnp.take_along_axis(sampled, last, axis=1)[:, 0], state.token)
    seen = state.seen
    if seen is not None:
        ids = jnp.where(valid, sampled, seen.shape[1])
        seen = seen.at[rows, ids].add(1, mode="drop")
    return dataclasses.replace(
        state,
        token=token,
        tokens=written(state.tokens, sampled, state.counts),
        history=history,
        logprobs=logprobs,
        counts=state.counts + counts,
        step=state.step + 1,
        seen=seen,
    )
