"""The jitted programs of an engine: prefill of pieces of prompts, decoding, copies of states."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import jax_q4k as jq

from ..kv_cache import PagedCache
from ..kv_cache.shapes import PAGE_SIZE
from ..network.adapters import adapted_by_row
from ..network.rows import last_tokens
from ..sampling.packing import columns_of, unpack
from ..sampling.penalties import TokenHistory, adjust
from ..sampling.sampler import Logprobs, logprobs_of, sample
from ..sampling.stages import SamplingArrays, SamplingStages
from ..support.exportable import exportable
from .adapters import Stacks, put_entry
from .engine_state import EngineState, Past, Sizes, config_of, copied_states, taken
from .programs import AllWeights, Program, Weights, replicated, shapes_of
from .speculative import verify
from .speculative.drafts import DraftModel, NextTokens
from .speculative.mtp import Drafter
from .speculative.state import SpeculationState, State

if TYPE_CHECKING:
    from ..network.decoder import Decoder

#: Which sampling stages the rows of a step need: none but argmax, drawing with filters, or all.
ARGMAX, DRAWS, ALL = range(3)

#: Maximum tokens that one `DecodeRows` program samples for a row.
MOST_STEPS = 64

#: Unit of `RowFields.draft_cost`.
COST_UNIT = 2.0**-10


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens that a step sampled.

    Attributes:
      tokens: int32 (rows, steps); -1 where a row has none.
      logprobs: their log-probabilities; None unless the program computes them.
      drafted, accepted: int32 (rows,), draft tokens that were verified, and those of them that were
        right; None without speculative decoding.
      vectors: float32 (rows, time, hidden_size), inputs of the final norm, of PrefillPieces alone.
    """

    tokens: jax.Array
    logprobs: Logprobs | None
    drafted: jax.Array | None = None
    accepted: jax.Array | None = None
    vectors: jax.Array | None = None


class RowFields(NamedTuple):
    """Description of a row for a step, besides sampling parameters: int32 (rows,) each.

    Attributes:
      slot: the sequence's slot; the number of slots for padding rows.
      first: position of the first token to run.
      count: tokens to store of a prompt, or to sample.
      step: number of tokens of the answer before the next sampled one.
      samples: 1 if the piece ends a prompt.
      following: token after the piece, if it does not end the prompt.
      uncounted: first tokens of the sequence that are not counted, for penalties; of pieces alone.
      adapter: place of the row's adapter, from 1; 0 means none.
      draft_cost: extra time to verify drafts of the step's rows, in units of COST_UNIT of a pass
        without drafts; 0 means that the row has no drafts.
    """

    slot: Any
    first: Any
    count: Any
    step: Any
    samples: Any
    following: Any
    uncounted: Any = 0
    adapter: Any = 0
    draft_cost: Any = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EngineProgram(Program):
    """Base of an engine's programs.

    Attributes:
      sizes: sizes of the state.
      rows: rows of the step.
      stages: sampling stages, whose parameters the step's rows hold.
      skips: whether a step says, by `way`, which stages its rows need: ARGMAX, DRAWS or ALL. If
        not, all of them run.
      deterministic: whether every product has at least 16 rows, so that its rounding does not
        depend on other sequences.
      adapters: number of places for adapters; 0 if no row has one.
    """

    sizes: Sizes
    rows: int
    stages: SamplingStages
    skips: bool = False
    deterministic: bool = False
    adapters: int = 0

    donated: ClassVar[tuple[int, ...]] = (1,)

    @property
    def calls_functions(self) -> bool:
        return bool(self.stages.processors)

    @property
    def parameter_columns(self) -> int:
        return columns_of(self.stages, self.network.config.vocab_size)

    @property
    def mask_columns(self) -> int:
        """Number of columns of a mask of tokens, which has 32 of them in each."""
        return -(-self.network.config.vocab_size // 32)

    def inputs(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """Returns the arguments behind weights and state; `array` makes one of shape and dtype."""
        return array((), jnp.int32), array((self.rows, sum(self.columns)), jnp.int32)

    @property
    def columns(self) -> tuple[int, ...]:
        """Number of columns of each part of `step`."""
        raise NotImplementedError

    def _mask(self, array: Callable[[tuple[int, ...], Any], Any]) -> Any:
        return array((self.rows, self.mask_columns), jnp.int32)

    def _parameters(self, packed: jax.Array) -> SamplingArrays:
        return unpack(packed, self.stages, self.network.config.vocab_size)

    def part_of(self, weights: AllWeights) -> AllWeights:
        """Returns the part of an engine's weights that the program takes."""
        return weights if self.adapters else weights._replace(adapters=None)

    def _adapted(self, weights: Weights, fields: RowFields) -> Decoder:
        """Returns the decoder with the adapters of the rows."""
        decoder = self._decoder(weights)
        if not self.adapters:
            return decoder
        return adapted_by_row(decoder, weights.adapters, fields.adapter, self.adapters)

    def _drafter(self, weights: Weights, decoder: Decoder) -> Decoder | Drafter | None:
        """Returns the draft model, or the multi-token-prediction layer; None without one."""
        if isinstance(self.draft, DraftModel):
            drafter: Decoder = self.draft.model.decoder(weights.drafter)
            return drafter
        if isinstance(self.draft, NextTokens):
            return self.draft.drafter(weights.drafter, decoder)
        return None

    def _slots(self, fields: RowFields) -> jax.Array | None:
        """Returns the rows' slots; None if the rows are all slots in order."""
        return None if self.rows == self.sizes.slots else fields.slot

    def _sample(
        self,
        way: jax.Array,
        logits: jax.Array,
        parameters: SamplingArrays,
        past: Past,
        slots: jax.Array,
        steps: jax.Array,
        lengths: jax.Array,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Logprobs | None]:
        """Samples a token for each row, int32 (rows,), by the stages that `way` names.

        lengths: tokens of each sequence so far. mask: int32 (rows, `mask_columns`), a bit for each
        token that a row may sample, the least significant first; None allows all.
        """

        def read() -> tuple[jax.Array | None, TokenHistory | None]:
            counts = history = None
            if past.seen is not None:
                counts = jnp.take(past.seen, slots, axis=0, mode="clip")
            if past.history is not None:
                tokens = jnp.take(past.history, slots, axis=0, mode="clip")
                history = TokenHistory(tokens, lengths)
            return counts, history

        return self._choose(way, logits, parameters, steps, read, mask)

    def _choose(
        self,
        way: jax.Array,
        logits: jax.Array,
        parameters: SamplingArrays,
        steps: jax.Array,
        read: Callable[[], tuple[jax.Array | None, TokenHistory | None]],
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Logprobs | None]:
        """Samples like `_sample`; `read` returns counts (rows, vocab_size) and history."""
        stages = self.stages
        if self.network.placement is not None and not stages.is_argmax:
            logits = replicated(logits)
        logits = logits.astype(jnp.float32)

        def adjusted() -> jax.Array:
            return adjust(logits, stages, parameters, steps, *read())

        def masked(logits: jax.Array) -> jax.Array:
            if mask is None:
                return logits
            bits = mask[..., None] >> jnp.arange(32, dtype=jnp.int32)[None, None] & 1
            allowed = bits.reshape(len(mask), -1)[:, : logits.shape[1]]
            return jnp.where(allowed > 0, logits, -jnp.inf)

        def drawn(logits: jax.Array) -> jax.Array:
            return sample(logits, SamplingStages(draws=stages.draws), parameters, steps)

        def reported() -> Logprobs:
            return logprobs_of(logits, token, stages.logprobs or 0)

        if self.skips:
            final = jax.lax.cond(way == ALL, adjusted, lambda: logits)
            token = jax.lax.cond(way == ARGMAX, jq.argmax, drawn, masked(final))
        else:
            token = drawn(masked(adjusted()))
        logprobs = None
        if stages.logprobs is not None and self.skips:
            nothing = self._no_logprobs(token.shape)
            logprobs = jax.lax.cond(way == ALL, reported, lambda: nothing)
        elif stages.logprobs is not None:
            logprobs = reported()
        if self.network.placement is not None:
            token = self.network.placement.replicate_rows(token)
        return token, logprobs

    def _no_logprobs(
        self, shape: tuple[int, ...], array: Callable[..., Any] = jnp.zeros
    ) -> Logprobs:
        """Returns zeros for log-probabilities of tokens; `array` maps (shape, dtype) to them."""
        most = min(self.stages.logprobs or 0, self.network.config.vocab_size)
        several = *shape, most
        of_tokens = array(several, jnp.int32), array(several, jnp.float32)
        return Logprobs(array(shape, jnp.float32), *of_tokens)

    def _no_tokens(self, steps: int, array: Callable[..., Any] = jnp.zeros) -> Sampled:
        """Returns results of up to `steps` tokens a row, all of them zeros."""
        shape, logprobs = (self.rows, steps), None
        if self.stages.logprobs is not None:
            logprobs = self._no_logprobs(shape, array)
        return Sampled(array(shape, jnp.int32), logprobs)

    def _sampled_shapes(self, steps: int) -> Sampled:
        """Returns shapes and dtypes of the results, without tracing."""
        return self._no_tokens(steps, lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPieces(_EngineProgram):
    """Prefills pieces of prompts, and samples a token for those that end a prompt.

    (weights, state, way, step, mask) -> state, Sampled (rows, 1), with the hidden states that
    `prompt_programs` take. `step` is int32 (rows, columns): the RowFields, `time` tokens, `width`
    page ids for each kind of layers, and sampling parameters. `mask` is that of `_sample`.

    Attributes:
      time: maximum tokens of a piece.
      fresh: whether every piece begins its sequence, so that attention need not read pages.
    """

    time: int
    fresh: bool = False

    @property
    def columns(self) -> tuple[int, ...]:
        """Number of columns of each part of `step`."""
        tables = self.sizes.width * len(self.sizes.kinds)
        return len(RowFields._fields), self.time, tables, self.parameter_columns

    def inputs(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """Returns the arguments behind weights and state, with a mask."""
        return *super().inputs(array), self._mask(array)

    def __call__(
        self,
        weights: Weights,
        state: EngineState,
        way: jax.Array,
        step: jax.Array,
        mask: jax.Array,
    ) -> tuple[EngineState, Sampled]:
        config, sizes = self.network.config, self.sizes
        columns, tokens, tables, packed = _split(step, self.columns)
        fields = RowFields(*jnp.unstack(columns, axis=1))
        decoder = self._adapted(weights, fields)
        tables = tables.reshape(self.rows, len(sizes.kinds), sizes.width)
        state = dataclasses.replace(
            state,
            tables=[
                table.at[fields.slot].set(tables[:, i], mode="drop")
                for i, table in enumerate(state.tables)
            ],
        )
        slots = self._slots(fields)
        cache = state.view(config, sizes, slots, fields.first, self.network.placement)
        run = decoder.prefill_vectors if self.fresh else decoder.extend_vectors
        vectors, cache = run(self._rows(tokens), fields.count, cache)
        last = last_tokens(vectors, fields.count)
        if self.deterministic and self.rows < 16:
            last = jnp.pad(last, ((0, 16 - self.rows), (0, 0)))
        logits = decoder.logits(last)[: self.rows]
        parameters = self._parameters(packed)
        lengths = fields.first + fields.count
        past = state.past.with_prompts(
            fields.slot, tokens, fields.first, fields.count, fields.uncounted
        )
        args = parameters, past, fields.slot, fields.step, lengths
        token, logprobs = self._sample(way, logits, *args, mask)
        samples = fields.samples > 0
        new = jnp.where(samples, fields.slot, sizes.slots)
        ran = jnp.where(fields.count > 0, fields.slot, sizes.slots)
        ended = samples & parameters.are_ends(token)
        drafting = self._prefill_drafts(
            weights, decoder, state, slots, fields, tokens, vectors, token
        )
        state = dataclasses.replace(
            state.stored(cache, slots, *drafting, placement=self.network.placement),
            token=state.token.at[new].set(token, mode="drop"),
            ended=state.ended.at[ran].set(ended, mode="drop"),
            past=past.with_token(new, token, lengths),
        )
        sampled = Sampled(jnp.where(samples, token, -1), logprobs)
        sampled = jax.tree.map(lambda x: x[:, None], sampled)
        return state, dataclasses.replace(sampled, vectors=vectors.astype(jnp.float32))

    def results(self, arguments: tuple[Any, ...]) -> tuple[EngineState, Sampled]:
        """Returns shapes and dtypes of the results."""
        return shapes_of(arguments[1]), self._sampled_shapes(1)

    def _sampled_shapes(self, steps: int) -> Sampled:
        shape = self.rows, self.time, self.network.config.hidden_size
        vectors: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
        return dataclasses.replace(super()._sampled_shapes(steps), vectors=vectors)

    def _prefill_drafts(
        self,
        weights: Weights,
        decoder: Decoder,
        state: EngineState,
        slots: jax.Array | None,
        fields: RowFields,
        tokens: jax.Array,
        vectors: jax.Array,
        sampled: jax.Array,
    ) -> tuple[PagedCache | None, jax.Array | None]:
        """Prefills the draft model; returns its cache, and the last outputs of an MTP layer.

        vectors: hidden states (rows, time, hidden_size) of the model. sampled: the sampled tokens.
        """
        drafter = self._drafter(weights, decoder)
        if drafter is None or self.draft is None or (config := config_of(self.draft)) is None:
            return None, None
        cache = state.draft_view(config, self.sizes, slots, fields.first)
        if not isinstance(drafter, Drafter):
            run = drafter.prefill_vectors if self.fresh else drafter.extend_vectors
            return run(tokens, fields.count, cache)[1], None
        at = jnp.arange(self.time, dtype=jnp.int32)[None] == fields.count[:, None] - 1
        following = jnp.where(fields.samples > 0, sampled, fields.following)[:, None]
        pairs = jnp.where(at, following, jnp.roll(tokens, -1, axis=1)), decoder.norm(vectors)
        begin = drafter.begin if self.fresh else drafter.follow
        vector, cache = begin(*pairs, fields.count, cache)
        assert state.draft is not None
        # Rows without a piece may be slots that decode.
        before = taken(state.draft.vector, slots)
        return cache, jnp.where((fields.count > 0)[:, None], vector, before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginPieces(PrefillPieces):
    """Prefills whole prompts on one device, and creates the state.

    (weights, way, step, mask) -> state, Sampled.

    Attributes:
      cache_dtype: dtype of the pages.
    """

    cache_dtype: Any
    fresh: bool = True

    donated: ClassVar[tuple[int, ...]] = ()

    def __call__(  # type: ignore[override]
        self, weights: Weights, way: jax.Array, step: jax.Array, mask: jax.Array
    ) -> tuple[EngineState, Sampled]:
        state = self._create(lambda shape, dtype, _: jnp.zeros(shape, dtype))
        return super().__call__(weights, state, way, step, mask)

    def results(self, arguments: tuple[Any, ...]) -> tuple[EngineState, Sampled]:
        """Returns shapes and dtypes of the results."""
        state = self._create(lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype))
        return state, self._sampled_shapes(1)

    def _create(self, array: Any) -> EngineState:
        args = self.network.config, self.sizes, self.cache_dtype, array
        return EngineState.create(*args, draft=self.draft)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRows(_EngineProgram):
    """Decodes and samples up to MOST_STEPS tokens for each row, in one `lax.while_loop`.

    (weights, state, way, step) -> state, Sampled (rows, MOST_STEPS). `step` is int32 (rows,
    columns): the RowFields, new page ids for each kind of layers (negative: none), and sampling
    parameters. The new pages follow those of the tokens before `first`. A row stops after an end
    token.

    Attributes:
      speculates: whether rows have drafts. A row may then get some more tokens than asked for, and
        the results have more columns.
    """

    speculates: bool = False

    @property
    def columns(self) -> tuple[int, ...]:
        """Number of columns of each part of `step`."""
        pages = len(self.sizes.kinds) * self.pages_per_step
        return len(RowFields._fields), pages, self.parameter_columns

    @property
    def pages_per_step(self) -> int:
        """Maximum number of pages that a row starts in a step."""
        return -(-(MOST_STEPS + self.draft_tokens) // PAGE_SIZE)

    def __call__(
        self, weights: Weights, state: EngineState, way: jax.Array, step: jax.Array
    ) -> tuple[EngineState, Sampled]:
        sizes = self.sizes
        columns, new_pages, packed = _split(step, self.columns)
        fields = RowFields(*jnp.unstack(columns, axis=1))
        decoder = self._adapted(weights, fields)
        parameters = self._parameters(packed)
        state = self._with_pages(state, fields, new_pages)
        slots = self._slots(fields)
        ended = jnp.take(state.ended, fields.slot, mode="clip")
        placement = self.network.placement
        cache = state.view(self.network.config, sizes, slots, fields.first, placement)
        token = jnp.take(state.token, fields.slot, mode="clip")
        drafter = self._drafter(weights, decoder)
        if self.speculates:
            args = decoder, drafter, state, fields, parameters, cache, token, ended
            return self._speculate(way, *args)
        drafting = self._drafting(state, slots, fields)
        sampled = self._no_tokens(MOST_STEPS)
        sampled = dataclasses.replace(sampled, tokens=sampled.tokens - 1)

        def active(i: jax.Array, ended: jax.Array) -> jax.Array:
            return ~ended & (i < fields.count)

        def unfinished(carry: Any) -> jax.Array:
            i, ended, *_ = carry
            return jnp.any(active(i, ended))

        def decode(carry: Any) -> Any:
            i, ended, token, cache, past, drafting, sampled = carry
            runs = active(i, ended)
            x, cache = decoder.decode_vectors(self._rows(token), cache, runs)
            logits = decoder.logits(x)
            lengths = cache.context_lens
            args = parameters, past, fields.slot, fields.step + i, lengths
            new, logprobs = self._sample(way, logits, *args)
            if drafter is not None:
                passed = token[:, None], new[:, None], x[:, None], runs.astype(jnp.int32)
                vector, drafts = drafting
                assert drafts is not None
                drafting = verify.follow(drafter, decoder, vector, drafts, *passed)
            token = jnp.where(runs, new, token)
            past = past.with_token(jnp.where(runs, fields.slot, sizes.slots), token, lengths)
            sampled = jax.tree.map(
                lambda all, x: jax.lax.dynamic_update_slice_in_dim(all, x[:, None], i, axis=1),
                sampled,
                Sampled(jnp.where(runs, new, -1), logprobs),
            )
            ended = ended | runs & parameters.are_ends(token)
            return i + 1, ended, token, cache, past, drafting, sampled

        carry = jnp.int32(0), ended, token, cache, state.past, drafting, sampled
        carry = jax.lax.while_loop(unfinished, decode, carry)
        _, ended, token, cache, past, (vector, drafts), sampled = carry
        state = dataclasses.replace(
            state.stored(cache, slots, drafts, vector, placement=placement),
            token=state.token.at[fields.slot].set(token, mode="drop"),
            ended=state.ended.at[fields.slot].set(ended, mode="drop"),
            past=past,
        )
        return state, sampled

    def _with_pages(
        self, state: EngineState, fields: RowFields, new_pages: jax.Array
    ) -> EngineState:
        """Adds new pages (rows, kinds * pages_per_step) to the block tables."""
        first, count = -(-fields.first // PAGE_SIZE), self.pages_per_step
        at = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]

        def added(table: jax.Array, pages: jax.Array) -> jax.Array:
            rows = jnp.where(pages >= 0, fields.slot[:, None], self.sizes.slots)
            return table.at[rows, at].set(pages, mode="drop")

        tables = [
            added(table, new_pages[:, i * count : (i + 1) * count])
            for i, table in enumerate(state.tables)
        ]
        return dataclasses.replace(state, tables=tables)

    def _drafting(
        self, state: EngineState, slots: jax.Array | None, fields: RowFields
    ) -> tuple[jax.Array | None, PagedCache | None]:
        """Returns the rows' last outputs of an MTP layer, and the drafter's cache, if any."""
        if self.draft is None or state.draft is None or (config := config_of(self.draft)) is None:
            return None, None
        cache = state.draft_view(config, self.sizes, slots, fields.first)
        return taken(state.draft.vector, slots), cache

    def _speculate(
        self,
        way: jax.Array,
        decoder: Decoder,
        drafter: Decoder | Drafter | None,
        state: EngineState,
        fields: RowFields,
        parameters: SamplingArrays,
        cache: PagedCache,
        token: jax.Array,
        ended: jax.Array,
    ) -> tuple[EngineState, Sampled]:
        """Samples the rows' tokens with drafts; the arguments are as in `__call__`."""
        assert self.draft is not None and state.draft is not None
        slots, count = self._slots(fields), self.draft_tokens
        zeros = jnp.zeros(self.rows, jnp.int32)
        vector, drafts = self._drafting(state, slots, fields)
        steps = MOST_STEPS + count
        logprobs = None
        if self.stages.logprobs is not None:
            logprobs = self._no_logprobs((self.rows, steps))
        seen, history = state.past.seen, state.past.history
        rows = State(
            cache=cache,
            token=token,
            tokens=jnp.zeros((self.rows, steps), jnp.int32),
            counts=zeros,
            finished=ended | (fields.count == 0),
            step=jnp.int32(0),
            seen=None if seen is None else jnp.take(seen, fields.slot, axis=0, mode="clip"),
            history=None
            if history is None
            else jnp.take(history, fields.slot, axis=0, mode="clip"),
            logprobs=logprobs,
            speculation=SpeculationState(
                drafts=jnp.zeros((self.rows, count), jnp.int32),
                found=jnp.ones(self.rows, bool),
                credit=verify.FIRST_CREDIT + state.draft.credit,
                drafted=zeros,
                accepted=zeros,
                cache=drafts,
                vector=vector,
            ),
        )
        parameters = dataclasses.replace(
            parameters, first_step=fields.step, max_new_tokens=fields.count
        )
        speculation = verify.Speculation(
            self.draft,
            count,
            COST_UNIT * jnp.max(fields.draft_cost).astype(jnp.float32),
            functools.partial(self._choose, way),
            parameters,
            decoder,
            fields.draft_cost > 0,
            drafter,
            self.network.placement,
        )
        rows = speculation.run(rows, jnp.max(fields.count))
        after = rows.speculation
        assert after is not None
        ran = jnp.where(fields.count > 0, fields.slot, self.sizes.slots)
        args = rows.cache, slots, after.cache, after.vector
        state = state.stored(*args, placement=self.network.placement)
        assert state.draft is not None
        state = dataclasses.replace(
            state,
            token=state.token.at[ran].set(rows.token, mode="drop"),
            ended=state.ended.at[ran].set(parameters.are_ends(rows.token), mode="drop"),
            past=Past(
                None if seen is None else seen.at[ran].set(rows.seen, mode="drop"),
                None if history is None else history.at[ran].set(rows.history, mode="drop"),
            ),
            draft=dataclasses.replace(state.draft, credit=after.credit - verify.FIRST_CREDIT),
        )
        valid = jnp.arange(steps, dtype=jnp.int32)[None] < rows.counts[:, None]
        tokens = jnp.where(valid, rows.tokens, -1)
        return state, Sampled(tokens, rows.logprobs, after.drafted, after.accepted)

    def results(self, arguments: tuple[Any, ...]) -> tuple[EngineState, Sampled]:
        """Returns shapes and dtypes of the results."""
        if not self.speculates:
            return shapes_of(arguments[1]), self._sampled_shapes(MOST_STEPS)
        sampled = self._sampled_shapes(MOST_STEPS + self.draft_tokens)
        counts: Any = jax.ShapeDtypeStruct((self.rows,), jnp.int32)
        sampled = dataclasses.replace(sampled, drafted=counts, accepted=counts)
        return shapes_of(arguments[1]), sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardRows(DecodeRows):
    """Runs the last sampled token of each row; SampleRows then samples from the logits.

    (weights, state, step) -> state, logits float32 (rows, vocab_size). `step` is that of
    DecodeRows. The host makes masks of tokens, which depend on the last one, meanwhile.
    """

    def inputs(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """Returns the argument behind weights and state."""
        return super().inputs(array)[1:]

    def __call__(  # type: ignore[override]
        self, weights: Weights, state: EngineState, step: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        placement = self.network.placement
        columns, new_pages, _ = _split(step, self.columns)
        fields = RowFields(*jnp.unstack(columns, axis=1))
        decoder = self._adapted(weights, fields)
        state = self._with_pages(state, fields, new_pages)
        slots = self._slots(fields)
        cache = state.view(self.network.config, self.sizes, slots, fields.first, placement)
        token = jnp.take(state.token, fields.slot, mode="clip")
        x, cache = decoder.decode_vectors(self._rows(token), cache, _runs(state, fields))
        logits = decoder.logits(x).astype(jnp.float32)
        if placement is not None:
            logits = placement.replicate(logits)
        return state.stored(cache, slots, placement=placement), logits

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the results."""
        shape = self.rows, self.network.config.vocab_size
        return shapes_of(arguments[1]), jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRows(DecodeRows):
    """Samples a token for each row from the logits of ForwardRows.

    (state, logits, way, step, mask) -> state, Sampled (rows, 1). `step` is that of ForwardRows,
    `mask` that of `_sample`.
    """

    donated: ClassVar[tuple[int, ...]] = (0,)
    takes_weights: ClassVar[bool] = False

    def inputs(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """Returns the arguments behind the state, logits and mask among them."""
        logits = array((self.rows, self.network.config.vocab_size), jnp.float32)
        return logits, *super().inputs(array), self._mask(array)

    def __call__(  # type: ignore[override]
        self,
        state: EngineState,
        logits: jax.Array,
        way: jax.Array,
        step: jax.Array,
        mask: jax.Array,
    ) -> tuple[EngineState, Sampled]:
        columns, _, packed = _split(step, self.columns)
        fields = RowFields(*jnp.unstack(columns, axis=1))
        parameters = self._parameters(packed)
        runs, lengths = _runs(state, fields), fields.first + 1
        args = parameters, state.past, fields.slot, fields.step, lengths
        token, logprobs = self._sample(way, logits, *args, mask)
        ran = jnp.where(runs, fields.slot, self.sizes.slots)
        state = dataclasses.replace(
            state,
            token=state.token.at[ran].set(token, mode="drop"),
            ended=state.ended.at[ran].set(parameters.are_ends(token), mode="drop"),
            past=state.past.with_token(ran, token, lengths),
        )
        sampled = Sampled(jnp.where(runs, token, -1), logprobs)
        return state, jax.tree.map(lambda x: x[:, None], sampled)

    def results(self, arguments: tuple[Any, ...]) -> tuple[EngineState, Sampled]:
        """Returns shapes and dtypes of the results."""
        return shapes_of(arguments[0]), self._sampled_shapes(1)


def _runs(state: EngineState, fields: RowFields) -> jax.Array:
    """Returns which rows of a step run, bool (rows,): padding and ended ones do not."""
    return ~jnp.take(state.ended, fields.slot, mode="clip") & (fields.count > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyStates(Program):
    """Copies recurrent states between slots and snapshots of each group.

    (state, sources int32 (groups * n,), targets int32 (groups * n,)) -> state. Sources and targets
    are numbered within a group. Targets out of range are ignored.

    Attributes:
      saves: True copies slots to snapshots, False snapshots to slots.
    """

    saves: bool

    donated: ClassVar[tuple[int, ...]] = (0,)
    takes_weights: ClassVar[bool] = False
    returns_state: ClassVar[bool] = True

    def __call__(self, state: EngineState, sources: jax.Array, targets: jax.Array) -> EngineState:
        old, new = state.states, state.snapshots
        source, target = (old, new) if self.saves else (new, old)
        copied = copied_states(source, target, sources, targets, self.network.placement)
        return dataclasses.replace(state, **{"snapshots" if self.saves else "states": copied})

    def results(self, arguments: tuple[Any, ...]) -> EngineState:
        """Returns shapes and dtypes of the results."""
        shapes: EngineState = shapes_of(arguments[0])
        return shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillHistory(Program):
    """Stores the tokens of a prompt that starts with a cached prefix, for penalties and others.

    (state, slot int32 (), tokens int32 (width * page size,), count int32 (), uncounted int32 ()) ->
    state.
    """

    donated: ClassVar[tuple[int, ...]] = (0,)
    takes_weights: ClassVar[bool] = False
    returns_state: ClassVar[bool] = True

    def __call__(
        self,
        state: EngineState,
        slot: jax.Array,
        tokens: jax.Array,
        count: jax.Array,
        uncounted: jax.Array,
    ) -> EngineState:
        zero = jnp.zeros(1, jnp.int32)
        rows = slot[None], tokens[None], zero, count[None], uncounted[None]
        past = state.past.with_prompts(*rows)
        return dataclasses.replace(state, past=past)

    def results(self, arguments: tuple[Any, ...]) -> EngineState:
        """Returns shapes and dtypes of the results."""
        shapes: EngineState = shapes_of(arguments[0])
        return shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PutAdapter(Program):
    """Stores an adapter at a place of the stacks, which it donates.

    (stacks, place int32 () from 0, entry of `adapters.arrays_for`) -> stacks.
    """

    donated: ClassVar[tuple[int, ...]] = (0,)
    takes_weights: ClassVar[bool] = False

    def __call__(self, stacks: Stacks, place: jax.Array, entry: Stacks) -> Stacks:
        return put_entry(stacks, place, entry)

    def results(self, arguments: tuple[Any, ...]) -> Stacks:
        """Returns shapes and dtypes of the results."""
        shapes: Stacks = shapes_of(arguments[0])
        return shapes


def _split(step: jax.Array, columns: tuple[int, ...]) -> list[jax.Array]:
    """Splits the columns of `step` (rows, sum of columns) into parts."""
    parts, at = [], 0
    for count in columns:
        parts.append(step[:, at : at + count])
        at += count
    return parts
