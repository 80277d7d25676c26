"""The jitted programs of a model: prefill, generation loop, single step, and scoring of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..config import Config
from ..kv_cache import PagedCache
from ..network.rows import last_tokens
from ..sampling import Sampling
from ..sampling.penalties import TokenHistory, count_token, count_tokens
from ..sampling.sampler import Logprobs, logprobs_of, sample
from ..sampling.stages import SamplingArrays, SamplingStages
from ..sharding.placement import Placement
from .speculative import verify
from .speculative.drafts import Draft, DraftModel, NextTokens, cost_of, tokens_of
from .speculative.mtp import Drafter
from .state import State

if TYPE_CHECKING:
    from ..network.decoder import Decoder

#: Makes XLA put the whole loop with its kernels into one CUDA graph, which runs without the host.
#: Products of dequantized weights use cuBLAS. When XLA compiles ahead of time and cannot measure,
#: it would otherwise choose Triton kernels with tiles far too small for long prompts.
CUDA_COMPILER_OPTIONS: dict[str, str] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": "1",
    "xla_gpu_enable_triton_gemm": "False",
}

#: Weights of a model; with a draft model, a tuple of both models' weights.
Weights = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model without its weights: everything that its programs depend on besides arguments.

    Compared by identity; each model has its own.

    Attributes:
      merge: maps weights, which may be tracers, to the decoder.
      fingerprint: returns a SHA-256; networks with equal fingerprints have equal programs.
      on_gpu: whether the weights are on a GPU.
    """

    config: Config
    merge: Callable[[Weights], Decoder]
    fingerprint: Callable[[], str]
    on_gpu: bool = False
    placement: Placement | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """Base of a model's programs: a function of arrays to be jitted, such as prefill or decode.

    A program depends only on its class, its fields, the types of its arguments and JAX's settings,
    so equal programs compile to the same code. Caches in memory use the program itself as key, and
    caches on disk use `about`.

    Attributes:
      stages: sampling stages.
      draft: kind of drafts; None means no speculative decoding.
    """

    network: Network
    stages: SamplingStages = SamplingStages()
    draft: Draft | None = None

    #: Positions of the arguments that are donated.
    donated: ClassVar[tuple[int, ...]] = ()

    @property
    def name(self) -> str:
        return type(self).__qualname__.lower()

    def jitted(self, *, keep_unused: bool = False) -> Any:
        """Returns the jitted function, whose compiled code is freed with its last reference.

        keep_unused: pass True only for `jax_q4k.cache.program_cache`, which needs it. With it JAX
        0.12 never frees compiled code: its cache of jaxprs without dead code holds its own keys.
        """
        run: Any = self

        def function(*arguments: Any) -> Any:
            return run(*arguments)

        # JAX caches executables by function, and functions of equal programs are not equal.
        function.__name__ = function.__qualname__ = self.name
        return jax.jit(
            function,
            donate_argnums=self.donated,
            compiler_options=CUDA_COMPILER_OPTIONS if self.network.on_gpu else None,
            keep_unused=keep_unused,
        )

    def about(self) -> dict[str, Any]:
        """Returns the program's fields as JSON, for the key of the on-disk cache.

        Raises TypeError for a field that text cannot identify, such as a user's function.
        """
        return {"program": type(self).__name__, **_fields_as_json(self)}

    @property
    def draft_tokens(self) -> int:
        return 0 if self.draft is None else tokens_of(self.draft, self.network.on_gpu)

    @property
    def reads_history(self) -> bool:
        """Whether the program needs the token history in its State."""
        return self.draft is not None or self.stages.reads_history

    def _decoder(self, weights: Weights) -> Decoder:
        return self.network.merge(self._main_weights(weights))

    def _main_weights(self, weights: Weights) -> Weights:
        """Returns the main model's weights, without the draft model's."""
        return weights[0] if isinstance(self.draft, DraftModel | NextTokens) else weights

    def _rows(self, x: jax.Array) -> jax.Array:
        placement = self.network.placement
        return x if placement is None else placement.shard_rows(x)


@dataclasses.dataclass(frozen=True)
class _Sampling(Program):
    """Base of the programs that sample tokens and return a State."""

    def _speculation(
        self, weights: Weights, decoder: Decoder, parameters: SamplingArrays
    ) -> verify.Speculation:
        """Returns the Speculation, with which rows may get a few more tokens than requested."""
        draft = self.draft
        assert draft is not None
        drafter: Decoder | Drafter | None = None
        if isinstance(draft, DraftModel):
            drafter = draft.model.decoder(weights[1])
        elif isinstance(draft, NextTokens):
            drafter = draft.drafter(weights[1], decoder)
        return verify.Speculation(
            draft,
            self.draft_tokens,
            cost_of(self.draft_tokens, self.network.on_gpu),
            self.stages,
            parameters,
            decoder,
            drafter,
            self.network.placement,
        )

    def _take(
        self, state: State, parameters: SamplingArrays, logits: jax.Array, cache: PagedCache
    ) -> State:
        """Samples a token for every unfinished row; returns the new State.

        logits: (batch, vocab_size) after the last token. cache: the cache after it.
        """
        active = ~state.finished
        if not self.stages.is_argmax:  # an argmax works on sharded logits
            logits = _replicated(logits)
        lengths, history = cache.context_lens, state.history
        past = None if history is None else TokenHistory(history, lengths)
        steps = state.counts + parameters.first_step
        token = sample(logits, self.stages, parameters, steps, state.seen, past)
        if self.network.placement is not None:
            token = self.network.placement.replicate_rows(token)
        token = jnp.where(active, token, state.token)
        counts = state.counts + active.astype(jnp.int32)
        ended = parameters.are_ends(token) | (counts >= parameters.max_new_tokens)
        if history is not None:
            at = jnp.where(active, lengths, history.shape[1])  # out of range is dropped
            rows = jnp.arange(len(token), dtype=jnp.int32)
            history = history.at[rows, at].set(token, mode="drop")
        return dataclasses.replace(
            state,
            cache=cache,
            token=token,
            tokens=_stored(state.tokens, token, state.step),
            history=history,
            logprobs=self._with_logprobs(state, logits, token),
            counts=counts,
            finished=state.finished | ended,
            step=state.step + 1,
            seen=None if state.seen is None else count_token(state.seen, token),
        )

    def _with_logprobs(self, state: State, logits: jax.Array, token: jax.Array) -> Logprobs | None:
        if state.logprobs is None or self.stages.logprobs is None:
            return None
        new = logprobs_of(logits, token, self.stages.logprobs)
        return jax.tree.map(lambda all, x: _stored(all, x, state.step), state.logprobs, new)


@dataclasses.dataclass(frozen=True)
class Start(_Sampling):
    """Prefill: appends prompts to the cache and samples the first tokens.

    (weights, tokens (batch, time), lengths (batch,), cache, parameters, history) -> State. A row of
    length 0 is finished. The cache is donated.
    """

    donated: ClassVar[tuple[int, ...]] = (3,)

    def __call__(
        self,
        weights: Weights,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: PagedCache,
        parameters: SamplingArrays,
        history: TokenHistory | None = None,
    ) -> State:
        """Runs the program.

        history: complete prompts, if the cache holds their first tokens; None means that the cache
        is empty.
        """
        decoder, speculation, batch = self._decoder(weights), None, tokens.shape[0]
        if self.draft is not None:
            drafter_cache = self._draft_cache(weights, tokens, lengths, cache)
            count = self.draft_tokens
            speculation = verify.begin(batch, count, drafter_cache)
        run = decoder.prefill_vectors if history is None else decoder.extend_vectors
        vectors, cache = run(self._rows(tokens), lengths, cache)
        logits = decoder.logits(last_tokens(vectors, lengths))
        if history is None:
            history = TokenHistory(_padded(tokens, cache.capacity), lengths)
        vocab_size = decoder.config.vocab_size
        state = dataclasses.replace(
            _state(self, batch, cache, jnp.zeros),
            finished=lengths == 0,  # padding rows of the batch
            seen=count_tokens(*history, vocab_size) if self.stages.penalizes else None,
            history=history.tokens if self.reads_history else None,
            speculation=speculation,
        )
        state = self._take(state, parameters, logits, cache)
        if speculation is None:
            return state
        return self._speculation(weights, decoder, parameters).start(
            state, tokens, lengths, vectors
        )

    def _draft_cache(
        self, weights: Weights, tokens: jax.Array, lengths: jax.Array, cache: PagedCache
    ) -> PagedCache | None:
        """Prefills the draft model's cache with the prompts; None if there is no draft model."""
        options = {"dtype": cache.dtype, "ahead": self.draft_tokens + 1}
        if isinstance(self.draft, NextTokens):  # needs hidden states, which are computed later
            return PagedCache.create(self.draft.config, len(tokens), cache.capacity, **options)
        if not isinstance(self.draft, DraftModel):
            return None
        drafter = self.draft.model.decoder(weights[1])
        empty = PagedCache.create(drafter.config, len(tokens), cache.capacity, **options)
        return drafter.prefill(tokens, lengths, empty)[1]

    def results(self, arguments: tuple[Any, ...]) -> State:
        """Returns shapes and dtypes of the result, without drafts.

        arguments: the program's arguments, or their shapes and dtypes.
        """
        return _state(self, len(arguments[1]), _shapes(arguments[3]), jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begin(Start):
    """Prefill on one device that also creates the KV cache.

    (weights, tokens, lengths, parameters) -> State.

    Attributes:
      capacity: capacity of the cache per sequence, in tokens.
      cache_dtype: dtype of the cache's pages.
      ahead: tokens that `Decoder.extend` may append to the cache at a time.
    """

    capacity: int
    cache_dtype: Any
    ahead: int

    donated: ClassVar[tuple[int, ...]] = ()

    def __call__(  # type: ignore[override]
        self, weights: Weights, tokens: jax.Array, lengths: jax.Array, parameters: SamplingArrays
    ) -> State:
        cache = PagedCache.create(*self._cache(len(tokens)), **self._options)
        return super().__call__(weights, tokens, lengths, cache, parameters)

    def results(self, arguments: tuple[Any, ...]) -> State:
        cache = PagedCache.shapes(*self._cache(len(arguments[1])), **self._options)
        return _state(self, len(arguments[1]), cache, jax.ShapeDtypeStruct)

    def _cache(self, batch: int) -> tuple[Config, int, int]:
        return self.network.config, batch, self.capacity

    @property
    def _options(self) -> dict[str, Any]:
        return {"dtype": self.cache_dtype, "ahead": max(self.ahead, self.draft_tokens + 1)}


@dataclasses.dataclass(frozen=True)
class Loop(_Sampling):
    """Generation loop: decodes and samples tokens in one `lax.while_loop`.

    (weights, state, parameters, until) -> State. Stops when every row has `until` tokens
    or is finished. The state is donated.
    """

    donated: ClassVar[tuple[int, ...]] = (1,)

    def __call__(
        self, weights: Weights, state: State, parameters: SamplingArrays, until: jax.Array
    ) -> State:
        decoder = self._decoder(weights)
        if self.draft is not None:
            return self._speculation(weights, decoder, parameters).run(state, until)

        def unfinished(state: State) -> jax.Array:
            return (state.step < until) & ~jnp.all(state.finished)

        def step(state: State) -> State:
            token = self._rows(state.token)
            logits, cache = decoder.decode(token, state.cache, ~state.finished)
            return self._take(state, parameters, logits, cache)

        return jax.lax.while_loop(unfinished, step, state)

    def results(self, arguments: tuple[Any, ...]) -> State:
        """Returns shapes and dtypes of the result.

        arguments: the program's arguments, or their shapes and dtypes.
        """
        shapes: State = _shapes(arguments[1])
        return shapes


@dataclasses.dataclass(frozen=True)
class Decode(Program):
    """Single decode step: (weights, token (batch,), cache) -> logits, cache. Donates the cache."""

    donated: ClassVar[tuple[int, ...]] = (2,)

    def __call__(
        self, weights: Weights, token: jax.Array, cache: PagedCache
    ) -> tuple[jax.Array, PagedCache]:
        return self._decoder(weights).decode(self._rows(token), cache)


@dataclasses.dataclass(frozen=True)
class Score(Program):
    """Scoring: negative log-likelihoods of given tokens, independent of sampling.

    (weights, tokens (rows, time), lengths (rows,)) -> float32 (rows, time - 1): -log p of each
    row's tokens from the second on, and 0 for padding.
    """

    def __call__(self, weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        logits = self._decoder(weights)(self._rows(tokens), lengths)
        log_p = jax.nn.log_softmax(_replicated(logits)[:, :-1])
        taken = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2)[..., 0]
        predicted = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        return jnp.where(predicted, -taken, 0.0)


class Programs:
    """Jitted programs for one model, one set of sampling stages and one kind of drafts.

    Each program compiles once per shape of its arguments.
    """

    def __init__(
        self, network: Network, stages: SamplingStages, draft: Draft | None = None
    ) -> None:
        args = network, stages, draft
        self.start, self.loop = Start(*args).jitted(), Loop(*args).jitted()
        self.decode, self.score = Decode(*args).jitted(), Score(network).jitted()


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _state(program: Program, batch: int, cache: PagedCache, array: Callable[..., Any]) -> State:
    """Returns a program's initial State, before the first new token, without drafts.

    array: maps (shape, dtype) to an array (`jnp.zeros`) or its `jax.ShapeDtypeStruct`.
    """
    stages, vocab_size, rows = (
        program.stages,
        program.network.config.vocab_size,
        (batch, cache.capacity),
    )
    logprobs = None
    if stages.logprobs is not None:
        likeliest = *rows, min(stages.logprobs, vocab_size)
        of_tokens = array(likeliest, jnp.int32), array(likeliest, jnp.float32)
        logprobs = Logprobs(array(rows, jnp.float32), *of_tokens)
    return State(
        cache=cache,
        token=array((batch,), jnp.int32),
        tokens=array(rows, jnp.int32),
        counts=array((batch,), jnp.int32),
        finished=array((batch,), bool),
        step=array((), jnp.int32),
        seen=array((batch, vocab_size), jnp.int32) if stages.penalizes else None,
        history=array(rows, jnp.int32) if program.reads_history else None,
        logprobs=logprobs,
    )


def _fields_as_json(value: Any) -> dict[str, Any]:
    return {f.name: _as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _as_json(value: Any) -> Any:
    """Returns the value of a program's field as JSON; unequal values have unequal JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, Network):
        if value.placement is not None:
            raise TypeError("programs over several devices have no key")
        return {"fingerprint": value.fingerprint(), "on_gpu": value.on_gpu}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        items = [_as_json(item) for item in value]
        return dict(zip(names, items, strict=True)) if names else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: _fields_as_json(value)}
    raise TypeError(f"a {type(value).__name__} cannot be part of a key")


def _padded(tokens: jax.Array, capacity: int) -> jax.Array:
    """Pads prompts (batch, time) to (batch, capacity)."""
    time = min(tokens.shape[1], capacity)  # a padded prompt may be longer than the cache
    return jnp.pad(tokens[:, :time], ((0, 0), (0, capacity - time)))


def _stored(rows: jax.Array, column: jax.Array, step: jax.Array) -> jax.Array:
    """Returns `rows` (batch, capacity, ...) with `column` (batch, ...) written at index `step`."""
    return jax.lax.dynamic_update_slice_in_dim(rows, column[:, None], step, axis=1)


def _replicated(logits: jax.Array) -> jax.Array:
    """Replicates logits over devices; JAX cannot sort or index split axes of an explicit mesh."""
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
    """Returns name -> (jitted function, abstract arguments), to lower programs without data.

    `jitted.trace(*arguments).lower(lowering_platforms=("cuda",))` lowers a program for a GPU on a
    machine without one; then pass CUDA_COMPILER_OPTIONS to `compile`. Names: `prefill`, `decode`,
    `generate` (the whole loop).
    """
    samplings = [sampling or Sampling()] * batch
    network = dataclasses.replace(model.network, on_gpu=False)  # the caller sets compiler options
    programs = Programs(network, SamplingStages.of(samplings))
    struct = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), model.weights)
    cache = jax.eval_shape(
        lambda: PagedCache.create(model.config, batch, capacity, dtype=cache_dtype)
    )
    tokens, vector = struct((batch, prompt_length), jnp.int32), struct((batch,), jnp.int32)
    parameters = jax.tree.map(lambda x: struct(x.shape, x.dtype), SamplingArrays.of(samplings))
    state = jax.eval_shape(programs.start, weights, tokens, vector, cache, parameters)
    return {
        "prefill": (programs.start, (weights, tokens, vector, cache, parameters)),
        "decode": (programs.decode, (weights, vector, cache)),
        "generate": (programs.loop, (weights, state, parameters, struct((), jnp.int32))),
    }
