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
from .placement import Placement
from .sampler import Parameters, Way, count_token, count_tokens, sample
from .sampling import Sampling
from .state import State

if TYPE_CHECKING:
    from .decoder import Decoder

#: Makes XLA put the whole loop, its kernels included, into one CUDA graph: the device then runs it
#: by itself.
CUDA_COMPILER_OPTIONS: dict[str, str] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": "1",
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
      loop: (weights, state, until) -> State: one `lax.while_loop` that goes on until `until` tokens
        are sampled in all or every row is finished. The state is donated.
      decode: (weights, token (batch,), cache) -> logits, cache: one step by itself. The cache is
        donated.
      score: (weights, tokens (rows, time), lengths (rows,)) -> float32 (rows,): -log p of tokens
        1 to length - 1 of each row, summed. It depends on no sampling.
      way, draft: that they are for.
      on_gpu: whether they run on one.
      ready: what `generate` has compiled so far, or found in `jax_q4k.kept`.
    """

    def __init__(
        self,
        decoder: Callable[[Weights], Decoder],
        way: Way,
        *,
        draft: Draft | None = None,
        on_gpu: bool,
        placement: Placement | None = None,
    ) -> None:
        self._decoder = decoder
        self.draft = draft
        self.draft_tokens = 0 if draft is None else tokens_of(draft, on_gpu)
        self.way = way
        self._placement = placement
        self.ready: dict[Any, Callable[..., State]] = {}
        self.on_gpu = on_gpu
        jit = functools.partial(jax.jit, compiler_options=CUDA_COMPILER_OPTIONS if on_gpu else None)
        self._jit_whole = functools.partial(jit, keep_unused=True)  # as `jax_q4k.kept` needs
        self.start = jit(self._start, donate_argnames="cache")
        self.loop = self._jit_whole(self._loop, donate_argnames="state")
        self.decode = jit(self._decode, donate_argnames="cache")
        self.score = jax.jit(self._score)

    def begin(self, config: Config, capacity: int, cache_dtype: Any) -> Any:
        """`start` for one device, with a cache of its own.

        (weights, tokens, lengths, parameters) -> State.
        """

        def begin(
            weights: Weights, tokens: jax.Array, lengths: jax.Array, parameters: Parameters
        ) -> State:
            ahead = {"dtype": cache_dtype, "ahead": self.draft_tokens + 1}
            cache = PagedCache.create(config, tokens.shape[0], capacity, **ahead)
            return self._start(weights, tokens, lengths, cache, parameters)

        return self._jit_whole(begin)

    def _start(
        self,
        weights: Weights,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: PagedCache,
        parameters: Parameters,
    ) -> State:
        decoder, drafting = self._decoder(self._own(weights)), None
        if self.draft is not None:
            drafter_cache = self._draft_cache(weights, tokens, lengths, cache)
            count = self.draft_tokens
            drafting = speculation.begin(tokens, cache.capacity, count, drafter_cache)
        vectors, cache = decoder.prefill_vectors(self._rows(tokens), lengths, cache)
        logits = decoder.logits(last_tokens(vectors, lengths))
        batch = tokens.shape[0]
        vocab_size = decoder.config.vocab_size
        state = State(
            cache=cache,
            token=jnp.zeros(batch, jnp.int32),
            tokens=jnp.zeros((batch, cache.capacity), jnp.int32),
            counts=jnp.zeros(batch, jnp.int32),
            finished=lengths == 0,  # rows that only fill up the batch
            step=jnp.int32(0),
            parameters=parameters,
            seen=count_tokens(tokens, lengths, vocab_size) if self.way.penalizes else None,
            drafting=drafting,
        )
        state = self._take(state, logits, cache)
        if drafting is None:
            return state
        steps = self._speculation(weights, decoder)
        return steps.begun(speculation.with_first_token(state), tokens, lengths, vectors)

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

    def _loop(self, weights: Weights, state: State, until: jax.Array) -> State:
        decoder = self._decoder(self._own(weights))
        if self.draft is not None:
            return self._drafting_loop(weights, decoder, state, until)

        def unfinished(state: State) -> jax.Array:
            return (state.step < until) & ~jnp.all(state.finished)

        def step(state: State) -> State:
            token = self._rows(state.token)
            logits, cache = decoder.decode(token, state.cache, ~state.finished)
            return self._take(state, logits, cache)

        return jax.lax.while_loop(unfinished, step, state)

    def _drafting_loop(
        self, weights: Weights, decoder: Decoder, state: State, until: jax.Array
    ) -> State:
        """`_loop` with drafts, by which a row may get some tokens more than `until`."""
        return self._speculation(weights, decoder).run(state, until)

    def _speculation(self, weights: Weights, decoder: Decoder) -> speculation.Speculation:
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
        return -jnp.sum(taken, axis=1, where=predicted)

    def _rows(self, x: jax.Array) -> jax.Array:
        return x if self._placement is None else self._placement.rows(x)

    def _take(self, state: State, logits: jax.Array, cache: PagedCache) -> State:
        """Samples a token for every row that is not finished."""
        active = ~state.finished
        if not self.way.is_argmax:  # which is one of parts
            logits = _whole(logits)
        token = sample(logits, self.way, state.parameters, state.counts, state.seen)
        if self._placement is not None:
            token = self._placement.all_rows(token)
        token = jnp.where(active, token, state.token)
        counts = state.counts + active.astype(jnp.int32)
        ended = state.parameters.are_ends(token) | (counts >= state.parameters.max_new_tokens)
        return dataclasses.replace(
            state,
            cache=cache,
            token=token,
            tokens=jax.lax.dynamic_update_slice(
                state.tokens, token[:, None], (jnp.int32(0), state.step)
            ),
            counts=counts,
            finished=state.finished | ended,
            step=state.step + 1,
            seen=None if state.seen is None else count_token(state.seen, token),
        )


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
        "generate": (programs.loop, (weights, state, struct((), jnp.int32))),
    }
