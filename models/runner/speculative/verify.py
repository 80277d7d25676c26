"""Steps of generation that check drafts: several tokens in one pass, the same as one by one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ...kv_cache import PagedCache
from ...sampling.penalties import Text
from ...sampling.sampler import Logprobs, logprobs_of, sample
from ...sampling.stages import Parameters, Way
from ..state import Drafting, State
from .drafts import Draft, PromptLookup, model_drafts
from .mtp import Drafter

if TYPE_CHECKING:
    from ...network.decoder import Decoder
    from ...sharding.placement import Placement

#: Share of the time without drafts that they may lose in the long run, in a text that cannot be
#: guessed.
LOSS = 1 / 64

#: Drafts that may fail after many that were right: a text that repeats itself no more loses little.
MOST_CREDIT = 4.0


def begin(batch: int, count: int, cache: PagedCache | None) -> Drafting:
    """The state before the first draft of `count` tokens."""
    zeros = jnp.zeros(batch, jnp.int32)
    drafts, found = jnp.zeros((batch, count), jnp.int32), jnp.ones(batch, bool)
    return Drafting(drafts, found, jnp.float32(1), zeros, zeros, cache)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The steps of one model, one way of sampling and one kind of drafts.

    Attributes:
      tokens: of a draft.
      cost: of checking a draft, in steps without one.
      parameters: of rows' ways of sampling.
      decoder, drafter: the model's, and that of a draft model, or the layer of further tokens.
      placement: of the model on several devices.
    """

    draft: Draft
    tokens: int
    cost: float
    way: Way
    parameters: Parameters
    decoder: Decoder
    drafter: Decoder | Drafter | None = None
    placement: Placement | None = None

    def begun(
        self, state: State, tokens: jax.Array, lengths: jax.Array, vectors: jax.Array
    ) -> State:
        """The state before the first pass, of prompts' tokens (batch, time) and their vectors."""
        drafting = _of(state)
        if not isinstance(self.drafter, Drafter) or drafting.cache is None:
            return state
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] == lengths[:, None] - 1
        behind = jnp.where(at, state.token[:, None], jnp.roll(tokens, -1, axis=1))
        normalized = self.decoder.norm(vectors)
        vector, cache = self.drafter.begin(behind, normalized, lengths, drafting.cache)
        drafting = dataclasses.replace(drafting, vector=vector, cache=cache)
        return dataclasses.replace(state, drafting=drafting)

    def run(self, state: State, until: jax.Array) -> State:
        """Passes until every row has `until` new tokens, some a few more, or is finished.

        Steps with drafts and those without are loops of their own, inside another: branches of a
        condition would copy the cache.
        """

        def unfinished(state: State) -> jax.Array:
            return ~state.finished & (state.counts < until)

        def tried(state: State) -> jax.Array:
            drafting = _of(state)
            return unfinished(state) & drafting.found & (drafting.credit >= 0)

        def going_on(state: State, with_drafts: bool) -> jax.Array:
            return jnp.any(unfinished(state)) & (jnp.any(tried(state)) == with_drafts)

        def single(state: State) -> State:
            nothing = jnp.zeros((len(state.token), 0), jnp.int32)
            none = jnp.zeros_like(state.finished)
            return self._looked_up(self._checked(state, nothing, unfinished(state), none))

        def checked(state: State) -> State:
            state, drafts = self._drafts(state, tried(state))
            return self._looked_up(self._checked(state, drafts, unfinished(state), tried(state)))

        def both(state: State) -> State:
            state = jax.lax.while_loop(lambda s: going_on(s, False), single, state)
            return jax.lax.while_loop(lambda s: going_on(s, True), checked, state)

        first = self._looked_up(state)
        return jax.lax.while_loop(lambda s: jnp.any(unfinished(s)), both, first)

    def _looked_up(self, state: State) -> State:
        """The state that knows whether there is a draft."""
        if not isinstance(self.draft, PromptLookup):
            return state
        drafting, text = _of(state), state.text
        assert text is not None
        lengths = state.cache.context_lens + 1  # with the last token, which is not stored
        drafts, found = self.draft.found(text, lengths, self.tokens)
        drafting = dataclasses.replace(drafting, drafts=drafts, found=found)
        return dataclasses.replace(state, drafting=drafting)

    def _drafts(self, state: State, tried: jax.Array) -> tuple[State, jax.Array]:
        """Drafts (batch, tokens) of the rows that have some."""
        drafting = _of(state)
        if self.drafter is None or drafting.cache is None:
            return state, drafting.drafts
        if isinstance(self.drafter, Drafter):
            assert drafting.vector is not None
            given = drafting.vector, drafting.cache, self.tokens, tried
            drafts, cache = self.drafter.drafts(*given)
        else:
            given = state.token, drafting.cache, self.tokens, tried
            drafts, cache = model_drafts(self.drafter, *given)
        drafting = dataclasses.replace(drafting, cache=cache)
        return dataclasses.replace(state, drafting=drafting), drafts

    def _checked(
        self, state: State, drafts: jax.Array, active: jax.Array, tried: jax.Array
    ) -> State:
        """The state with the tokens of drafts (batch, count) that stay, and one more."""
        count = drafts.shape[1]
        drafted = jnp.where(tried, count, 0)
        lengths = active.astype(jnp.int32) + drafted
        given = jnp.concatenate([state.token[:, None], drafts], axis=1)
        if count == 0:
            token = self._rows(state.token)
            x, cache = self.decoder.decode_vectors(token, state.cache, active)
            x = x[:, None]
        else:
            x, accepted = self.decoder.try_tokens(self._rows(given), lengths, state.cache)
        logits = self.decoder.logits(x)
        if self.placement is not None:
            logits = self.placement.everywhere(logits)
        sampled, seen = self._sampled(state, logits, drafts)
        right = (sampled[:, :-1] == drafts) & tried[:, None]
        stayed = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        counts = jnp.where(active, stayed + 1, 0)
        ends = self.parameters.are_ends(sampled)
        first_end = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), count + 1)
        ended = active & (first_end < counts)
        counts = jnp.minimum(counts, first_end.astype(jnp.int32) + 1)
        if count:
            cache = accepted(counts)
        state = _with_tokens(state, sampled, counts, seen, self._logprobs(logits, sampled))
        drafting = self._learned(_of(state), drafted, stayed, active, checks=count > 0)
        drafting = self._followed(drafting, given, sampled, x, counts)
        ended |= state.counts >= self.parameters.max_new_tokens
        return dataclasses.replace(
            state, cache=cache, finished=state.finished | ended, drafting=drafting
        )

    def _rows(self, x: jax.Array) -> jax.Array:
        return x if self.placement is None else self.placement.rows(x)

    def _sampled(
        self, state: State, logits: jax.Array, drafts: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """What sampling takes behind each token (batch, count + 1); and `State.seen` by then."""
        batch, time, vocab = logits.shape
        first = state.counts + self.parameters.first_step
        steps = (first[:, None] + jnp.arange(time, dtype=jnp.int32)[None]).reshape(-1)
        seen = None
        if state.seen is not None:
            new = jax.nn.one_hot(drafts, vocab, dtype=jnp.int32).cumsum(axis=1, dtype=jnp.int32)
            seen = state.seen[:, None] + jnp.pad(new, ((0, 0), (1, 0), (0, 0)))
        flat = None if seen is None else seen.reshape(-1, vocab)
        text = None
        if self.way.reads_text and state.text is not None:
            lengths = state.cache.context_lens + 1  # with the last token
            at = lengths[:, None] + jnp.arange(time - 1, dtype=jnp.int32)[None]
            rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
            drafted = state.text.at[rows, at].set(drafts, mode="drop")
            lengths = lengths[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
            text = Text(jnp.repeat(drafted, time, axis=0), lengths.reshape(-1))
        parameters = self.parameters.repeated(time)
        tokens = sample(logits.reshape(-1, vocab), self.way, parameters, steps, flat, text)
        return tokens.reshape(batch, time), seen

    def _logprobs(self, logits: jax.Array, sampled: jax.Array) -> Logprobs | None:
        """Of tokens (batch, time)."""
        if self.way.logprobs is None:
            return None
        flat = logits.reshape(-1, logits.shape[-1]), sampled.reshape(-1)
        found = logprobs_of(*flat, self.way.logprobs)
        return jax.tree.map(lambda x: x.reshape(*sampled.shape, *x.shape[1:]), found)

    def _followed(
        self,
        drafting: Drafting,
        given: jax.Array,
        sampled: jax.Array,
        vectors: jax.Array,
        counts: jax.Array,
    ) -> Drafting:
        """With the draft model's cache of the tokens that stay, `counts` (batch,) of those given.

        vectors: the model's, (batch, time, hidden_size).
        """
        if self.drafter is None or drafting.cache is None:
            return drafting
        if not isinstance(self.drafter, Drafter):
            _, cache = self.drafter.extend(given, counts, drafting.cache, every=False)
            return dataclasses.replace(drafting, cache=cache)
        normalized = self.decoder.norm(vectors)
        vector, cache = self.drafter.follow(sampled, normalized, counts, drafting.cache)
        assert drafting.vector is not None
        vector = jnp.where((counts > 0)[:, None], vector, drafting.vector)
        return dataclasses.replace(drafting, cache=cache, vector=vector)

    def _learned(
        self,
        drafting: Drafting,
        drafted: jax.Array,
        stayed: jax.Array,
        active: jax.Array,
        *,
        checks: bool,
    ) -> Drafting:
        """With what a pass has saved, of whose drafts `stayed` (batch,) tokens were right."""
        rows = jnp.maximum(active.sum(dtype=jnp.float32), 1.0)
        saved = LOSS + stayed.sum(dtype=jnp.float32) / rows  # steps; each row's counts alike
        credit = drafting.credit + saved / self.cost - float(checks)
        credit = jnp.minimum(credit, MOST_CREDIT)
        drafted, accepted = drafting.drafted + drafted, drafting.accepted + stayed
        return dataclasses.replace(drafting, credit=credit, drafted=drafted, accepted=accepted)


def _of(state: State) -> Drafting:
    assert state.drafting is not None
    return state.drafting


def _with_tokens(
    state: State,
    sampled: jax.Array,
    counts: jax.Array,
    seen: jax.Array | None,
    logprobs: Logprobs | None,
) -> State:
    """The state with the first `counts` (batch,) of the tokens sampled (batch, time)."""
    batch, time = sampled.shape
    rows, steps = jnp.arange(batch)[:, None], jnp.arange(time, dtype=jnp.int32)[None]
    capacity, valid = state.tokens.shape[1], steps < counts[:, None]

    def written(array: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
        at = jnp.where(valid, first[:, None] + steps, capacity)  # beyond the last: dropped
        return array.at[rows, at].set(new, mode="drop")

    assert state.text is not None
    # The last token of the text so far lies behind the stored ones.
    text = written(state.text, sampled, state.cache.context_lens + 1)
    if logprobs is not None:
        given = state.logprobs, logprobs
        logprobs = jax.tree.map(lambda all, new: written(all, new, state.counts), *given)
    last = jnp.maximum(counts - 1, 0)[:, None]
    token = jnp.where(counts > 0, jnp.take_along_axis(sampled, last, axis=1)[:, 0], state.token)
    if seen is not None and state.seen is not None:
        of_last = jnp.take_along_axis(seen, last[:, :, None], axis=1)[:, 0]
        new = jax.nn.one_hot(token, seen.shape[-1], dtype=jnp.int32)
        seen = jnp.where((counts > 0)[:, None], of_last + new, state.seen)
    return dataclasses.replace(
        state,
        token=token,
        tokens=written(state.tokens, sampled, state.counts),
        text=text,
        logprobs=logprobs,
        counts=state.counts + counts,
        step=state.step + 1,
        seen=seen,
    )
