"""The jitted programs of a model.

These are start (prompt), loop (tokens until done), decode (one step) and score (whole texts).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from . import speculation
from .config import Config
from .drafts import Draft, DraftModel, NextTokens, cost_of, tokens_of
from .kv_cache import PagedCache, last_tokens
from .nextn import Drafter
from .penalties import Text, count_token, count_tokens
from .placement import Placement
from .sampler import Logprobs, logprobs_of, sample
from .sampling import Sampling
from .state import State
from .ways import Parameters, Way

if TYPE_CHECKING:
    from .decoder import Decoder

#: Makes XLA put the whole loop, its kernels included, into one CUDA graph: the device then runs it
#: by itself. Products of decoded weights are cuBLAS's: where XLA cannot measure, ahead of time, it
#: would take kernels of its own with tiles far too small for long prompts.
CUDA_COMPILER_OPTIONS: dict[str, str] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": "1",
    "xla_gpu_enable_triton_gemm": "False",
}

#: Of a model; with a draft model, a tuple of both models'.
Weights = Any


class Programs:
    """Programs of one model and one way of sampling.

    Each compiles per shape.

    Attributes:
      start: (weights, tokens (batch, time), lengths (batch,), cache, parameters) -> State: stores
        the prompts and samples each row's first token; a row of length 0 is finished. The cache is
        donated.
      loop: (weights, state, parameters, until) -> State: one `lax.while_loop` that goes on until
        `until` tokens are sampled in all or every row is finished. The state is donated.
      decode: (weights, token (batch,), cache) -> logits, cache: one step by itself. The cache is
        donated.
      score: (weights, tokens (rows, time), lengths (rows,)) -> float32 (rows, time - 1): -log p of
        each row's tokens from its second on, 0 behind its length. It depends on no sampling.
      way, draft: that they are for.
      on_gpu: whether they run on one.
      are_kept: whether they go by way of `jax_q4k.kept`.
    """

    def __init__(
        self,
        decoder: Callable[[Weights], Decoder],
        way: Way,
        *,
        draft: Draft | None = None,
        on_gpu: bool,
        placement: Placement | None = None,
        are_kept: bool = False,
    ) -> None:
        self._decoder = decoder
        self.draft = draft
        self.draft_tokens = 0 if draft is None else tokens_of(draft, on_gpu)
        self.way = way
        self._placement = placement
        self.on_gpu = on_gpu
        self.are_kept = are_kept
        # `jax_q4k.kept` needs `keep_unused`. Elsewhere it would do harm: JAX 0.12 then never frees
        # what it compiled, as its cache of jaxprs without dead code holds its own keys.
        self._jit = jit = functools.partial(
            jax.jit,
            compiler_options=CUDA_COMPILER_OPTIONS if on_gpu else None,
            keep_unused=are_kept,
        )
        self.start = jit(self._start, donate_argnames="cache")
        self.loop = jit(self._loop, donate_argnames="state")
        self.decode = jit(self._decode, donate_argnames="cache")
        self.score = jax.jit(self._score)

    def new_start(self) -> Any:
        """`start`, whose compiled program goes with the last reference to it."""

        def start(*arguments: Any) -> State:
            return self._start(*arguments)

        return self._jit(start, donate_argnums=3)

    def new_loop(self) -> Any:
        """`loop`, likewise."""

        def loop(*arguments: Any) -> State:
            return self._loop(*arguments)

        return self._jit(loop, donate_argnums=1)

    def begin(self, config: Config, capacity: int, cache_dtype: Any, ahead: int) -> Any:
        """`start` for one device, with a cache of its own, of which `Decoder.extend` takes `ahead`.

        (weights, tokens, lengths, parameters) -> State.
        """

        def begin(
            weights: Weights, tokens: jax.Array, lengths: jax.Array, parameters: Parameters
        ) -> State:
            options = {"dtype": cache_dtype, "ahead": max(ahead, self.draft_tokens + 1)}
            cache = PagedCache.create(config, tokens.shape[0], capacity, **options)
            return self._start(weights, tokens, lengths, cache, parameters)

        return self._jit(begin)

    def resume(self) -> Any:
        """`start` of prompts that begin with what the cache holds; without a draft model.

        (weights, tokens, lengths, cache, parameters, text) -> State. tokens, lengths: of what
        follows; text: of the whole prompts, with room for the cache's capacity.
        """

        def resume(*arguments: Any) -> State:
            return self._start(*arguments)

        return self._jit(resume, donate_argnums=3)

    def _start(
        self,
        weights: Weights,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: PagedCache,
        parameters: Parameters,
        text: Text | None = None,
    ) -> State:
        """text: that of whole prompts, whose beginnings the cache holds; None: it is empty."""
        decoder, drafting, batch = self._decoder(self._own(weights)), None, tokens.shape[0]
        if self.draft is not None:
            drafter_cache = self._draft_cache(weights, tokens, lengths, cache)
            count = self.draft_tokens
            drafting = speculation.begin(batch, count, drafter_cache)
        goes_on = text is not None
        run = decoder.extend_vectors if goes_on else decoder.prefill_vectors
        vectors, cache = run(self._rows(tokens), lengths, cache)
        logits = decoder.logits(last_tokens(vectors, lengths))
        whole = text if text is not None else Text(_padded(tokens, cache.capacity), lengths)
        vocab_size = decoder.config.vocab_size
        state = State(
            cache=cache,
            token=jnp.zeros(batch, jnp.int32),
            tokens=jnp.zeros((batch, cache.capacity), jnp.int32),
            counts=jnp.zeros(batch, jnp.int32),
            finished=lengths == 0,  # rows that only fill up the batch
            step=jnp.int32(0),
            seen=count_tokens(*whole, vocab_size) if self.way.penalizes else None,
            text=whole.tokens if self.reads_text else None,
            logprobs=self._no_logprobs(batch, cache.capacity, vocab_size),
            drafting=drafting,
        )
        state = self._take(state, parameters, logits, cache)
        if drafting is None:
            return state
        return self._speculation(weights, decoder, parameters).begun(
            state, tokens, lengths, vectors
        )

    def _own(self, weights: Weights) -> Weights:
        """The model's, of both models' where there is a draft model."""
        return weights[0] if isinstance(self.draft, DraftModel | NextTokens) else weights

    def _draft_cache(
        self, weights: Weights, tokens: jax.Array, lengths: jax.Array, cache: PagedCache
    ) -> PagedCache | None:
        """The draft model's, with the prompts; None: there is no such model."""
        options = {"dtype": cache.dtype, "ahead": self.draft_tokens + 1}
        if isinstance(self.draft, NextTokens):  # its prompt's vectors are not there yet
            return PagedCache.create(self.draft.config, len(tokens), cache.capacity, **options)
        if not isinstance(self.draft, DraftModel):
            return None
        drafter = self.draft.model.decoder(weights[1])
        empty = PagedCache.create(drafter.config, len(tokens), cache.capacity, **options)
        return drafter.prefill(tokens, lengths, empty)[1]

    def _loop(
        self, weights: Weights, state: State, parameters: Parameters, until: jax.Array
    ) -> State:
        decoder = self._decoder(self._own(weights))
        if self.draft is not None:
            return self._speculation(weights, decoder, parameters).run(state, until)

        def unfinished(state: State) -> jax.Array:
            return (state.step < until) & ~jnp.all(state.finished)

        def step(state: State) -> State:
            token = self._rows(state.token)
            logits, cache = decoder.decode(token, state.cache, ~state.finished)
            return self._take(state, parameters, logits, cache)

        return jax.lax.while_loop(unfinished, step, state)

    def _speculation(
        self, weights: Weights, decoder: Decoder, parameters: Parameters
    ) -> speculation.Speculation:
        """Steps with drafts, by which a row may get some tokens more than asked for."""
        draft = self.draft
        assert draft is not None
        drafter: Decoder | Drafter | None = None
        if isinstance(draft, DraftModel):
            drafter = draft.model.decoder(weights[1])
        elif isinstance(draft, NextTokens):
            drafter = draft.drafter(weights[1], decoder)
        return speculation.Speculation(
            draft,
            self.draft_tokens,
            cost_of(self.draft_tokens, self.on_gpu),
            self.way,
            parameters,
            decoder,
            drafter,
            self._placement,
        )

    def _decode(
        self, weights: Weights, token: jax.Array, cache: PagedCache
    ) -> tuple[jax.Array, PagedCache]:
        return self._decoder(weights).decode(self._rows(token), cache)

    def _score(self, weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        logits = self._decoder(weights)(self._rows(tokens), lengths)
        log_p = jax.nn.log_softmax(_whole(logits)[:, :-1])
        taken = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2)[..., 0]
        predicted = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        return jnp.where(predicted, -taken, 0.0)

    def _rows(self, x: jax.Array) -> jax.Array:
        return x if self._placement is None else self._placement.rows(x)

    @property
    def reads_text(self) -> bool:
        """Whether states hold the text so far."""
        return self.draft is not None or self.way.reads_text

    def _no_logprobs(self, batch: int, capacity: int, vocab_size: int) -> Logprobs | None:
        if self.way.logprobs is None:
            return None
        shape = batch, capacity, min(self.way.logprobs, vocab_size)
        tokens, likeliest = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return Logprobs(jnp.zeros((batch, capacity), jnp.float32), tokens, likeliest)

    def _take(
        self, state: State, parameters: Parameters, logits: jax.Array, cache: PagedCache
    ) -> State:
        """Samples a token for every row that is not finished."""
        active = ~state.finished
        if not self.way.is_argmax:  # which is one of parts
            logits = _whole(logits)
        lengths, text = cache.context_lens, state.text
        given = None if text is None else Text(text, lengths)
        steps = state.counts + parameters.first_step
        token = sample(logits, self.way, parameters, steps, state.seen, given)
        if self._placement is not None:
            token = self._placement.all_rows(token)
        token = jnp.where(active, token, state.token)
        counts = state.counts + active.astype(jnp.int32)
        ended = parameters.are_ends(token) | (counts >= parameters.max_new_tokens)
        if text is not None:
            at = jnp.where(active, lengths, text.shape[1])  # beyond the last: dropped
            rows = jnp.arange(len(token), dtype=jnp.int32)
            text = text.at[rows, at].set(token, mode="drop")
        return dataclasses.replace(
            state,
            cache=cache,
            token=token,
            tokens=_stored(state.tokens, token, state.step),
            text=text,
            logprobs=self._with_logprobs(state, logits, token),
            counts=counts,
            finished=state.finished | ended,
            step=state.step + 1,
            seen=None if state.seen is None else count_token(state.seen, token),
        )

    def _with_logprobs(self, state: State, logits: jax.Array, token: jax.Array) -> Logprobs | None:
        if state.logprobs is None or self.way.logprobs is None:
            return None
        new = logprobs_of(logits, token, self.way.logprobs)
        return jax.tree.map(lambda all, x: _stored(all, x, state.step), state.logprobs, new)


def _padded(tokens: jax.Array, capacity: int) -> jax.Array:
    """Prompts (batch, time) in texts (batch, capacity)."""
    time = min(tokens.shape[1], capacity)  # a prompt's padding may be longer than the cache
    return jnp.pad(tokens[:, :time], ((0, 0), (0, capacity - time)))


def _stored(rows: jax.Array, column: jax.Array, step: jax.Array) -> jax.Array:
    """`rows` (batch, capacity, ...) with a step's values (batch, ...)."""
    return jax.lax.dynamic_update_slice_in_dim(rows, column[:, None], step, axis=1)


def _whole(logits: jax.Array) -> jax.Array:
    """Logits on every device: on an explicit mesh, a split axis is neither sorted nor indexed."""
    sharding = jax.typeof(logits).sharding
    if all(axes is None for axes in sharding.spec):
        return logits
    return jax.sharding.reshard(logits, NamedSharding(sharding.mesh, PartitionSpec()))


def abstract_programs(
    model: Any,
    *,
    batch: int = 1,
    prompt_length: int = 8,
    capacity: int = 64,
    sampling: Sampling | None = None,
    cache_dtype: Any = jnp.float32,
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Programs with shapes to lower them for: name -> (jitted function, arguments).

    No data is needed.

    `jitted.trace(*arguments).lower(lowering_platforms=("cuda",))` lowers one for a GPU on a machine
    without;
    pass CUDA_COMPILER_OPTIONS to `compile` then. Keys: `prefill`, `decode`, `generate` (the whole
    loop).
    """
    samplings = [sampling or Sampling()] * batch
    programs = Programs(model.decoder, Way.of(samplings), on_gpu=False)
    struct = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), model.weights)
    cache = jax.eval_shape(
        lambda: PagedCache.create(model.config, batch, capacity, dtype=cache_dtype)
    )
    tokens, vector = struct((batch, prompt_length), jnp.int32), struct((batch,), jnp.int32)
    parameters = jax.tree.map(lambda x: struct(x.shape, x.dtype), Parameters.of(samplings))
    state = jax.eval_shape(programs.start, weights, tokens, vector, cache, parameters)
    return {
        "prefill": (programs.start, (weights, tokens, vector, cache, parameters)),
        "decode": (programs.decode, (weights, vector, cache)),
        "generate": (programs.loop, (weights, state, parameters, struct((), jnp.int32))),
    }
