"""Runs one generation batch: calls the programs on the device, tracks requests on the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_q4k import current_selection, page_dtype

from ..kv_cache import PagedCache
from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from ..runner.programs import Begin, Loop, Start
from ..runner.speculative.drafts import Draft, DraftModel, NextTokens, PromptLookup
from ..runner.state import State
from ..sampling import Sampling
from ..sampling.penalties import TokenHistory
from ..sampling.stages import SamplingArrays, SamplingStages
from ..support.buckets import bucket
from .outputs import Output, Timings, TokenLogprobs
from .prefix_cache import PIECE, Prefix
from .request import ContextShift, Request

#: Maximum tokens between two checks of the text, in a stream or with stop strings.
INTERVAL = 16

#: Target duration of one device call in seconds; Ctrl-C takes effect only between calls.
CALL = 0.1

#: Minimum capacity of the KV cache in tokens; smaller caches would only cause more compilations.
MIN_CAPACITY = 64


def capacity_of(
    prompts: list[np.ndarray], samplings: list[Sampling], context: int | None = None
) -> int:
    """Returns the KV cache capacity, in tokens per sequence, for these prompts; rounded up.

    context: maximum tokens of prompt and new tokens; None means no maximum.
    """
    rows = zip(prompts, samplings, strict=True)
    needed = max(len(ids) + sampling.max_new_tokens for ids, sampling in rows)
    needed = needed if context is None else min(needed, context)
    return max(bucket(needed), MIN_CAPACITY)


def draft_of(draft: Any, model: Model) -> Draft | None:
    """Converts the `draft` argument of `generate` to a Draft; None stays None.

    Accepts "lookup" (prompt lookup), a Model (a draft model), or one of the Draft classes.

    Raises:
      TypeError: any other argument. ValueError: a draft that does not fit the model.
    """
    if isinstance(draft, Model):
        draft = DraftModel(draft)
    elif isinstance(draft, str) and draft == "lookup":
        draft = PromptLookup()
    if draft is not None and not isinstance(draft, Draft):
        shown = repr(draft) if isinstance(draft, str) else f"a {type(draft).__name__}"
        raise TypeError(f"draft is {shown}; it must be 'lookup', a Model, or one of models.drafts")
    if isinstance(draft, DraftModel):
        theirs, ours = draft.model.config.vocab_size, model.config.vocab_size
        if theirs != ours:
            raise ValueError(f"draft has a vocabulary of {theirs} tokens, the model one of {ours}")
    if isinstance(draft, NextTokens):
        trunk, names = model.config, ("architecture", "hidden_size", "vocab_size")
        differing = [n for n in names if getattr(trunk, n) != getattr(draft.config, n)]
        if differing:
            raise ValueError(f"draft is the layer of another model: its {differing[0]} differs")
    return draft


def _breaks_of(model: Model) -> Callable[[tuple[str, ...]], np.ndarray]:
    """Returns a function from strings to the mask (vocab_size,) of tokens that contain a string."""

    def breaks(texts: tuple[str, ...]) -> np.ndarray:
        found = np.zeros(model.config.vocab_size, bool)
        if model.tokenizer is not None and texts:
            holding = model.tokenizer.tokens_with(texts)
            found[[i for i in holding if i < len(found)]] = True
        return found

    return breaks


def _with_room(sampling: Sampling, row: Request) -> Sampling:
    """Returns `sampling` with `max_new_tokens` limited to the request's free context."""
    room = max(row.room, 1)
    return sampling if room == sampling.max_new_tokens else sampling.replaced(max_new_tokens=room)


class GenerationBatch:
    """A batch of prompts that one `generate` or `stream` call runs.

    Holds the generation state on the device and the requests on the host.
    """

    def __init__(
        self,
        model: Model,
        prompts: list[np.ndarray],
        samplings: list[Sampling],
        cache_dtype: Any,
        draft: Any,
        filled_to: int = 1,
        prefix: Prefix | None = None,
        shift: ContextShift | None = None,
    ) -> None:
        """Checks the arguments and prepares the arrays of the batch.

        filled_to: minimum number of rows, so that batches of one call share programs.
        """
        self.max_tokens = max(sampling.max_new_tokens for sampling in samplings)
        self.has_stops = any(sampling.stop for sampling in samplings)
        end_ids = () if model.tokenizer is None else tuple(model.tokenizer.eos_token_ids)
        context = {} if shift is None else {"context": model.config.context_length}
        self.rows = [
            Request(model.tokenizer, sampling, end_ids, ids.tolist(), **context)
            for ids, sampling in zip(prompts, samplings, strict=True)
        ]
        self._shift = shift
        self.timings = Timings(prompt_tokens=sum(map(len, prompts)))
        self.shared = model.placement is not None and model.placement.spans_processes
        self._model = model
        kind = draft_of(draft, model)
        if all(sampling.ignore_end for sampling in samplings):
            end_ids = ()
        stages = model.stage_sets.serving(SamplingStages.of(samplings, end_ids))
        self._sampled = model.network, stages, kind  # fields of every program of this call
        weights: Any = model.weights
        if isinstance(kind, DraftModel):
            weights = model.weights, kind.model.weights
        elif isinstance(kind, NextTokens):
            weights = model.weights, dict(kind.weights)
        # taken at the call, because a stream may be read in another context
        self._selection = current_selection()
        self._programs = CachedPrograms(model, weights, self._selection)
        self._samplings, self._stages, self._end_ids = samplings, stages, end_ids
        self._batch = model.padded_batch(max(len(prompts), filled_to))
        self._lay_out()
        self._capacity = capacity_of(prompts, samplings, context.get("context"))
        self._cache_dtype = page_dtype(cache_dtype, "cache_dtype")
        self._state: State
        self._pushed = 0
        can_reuse = model.placement is None and not isinstance(kind, DraftModel | NextTokens)
        self._prefix = prefix if can_reuse else None

    def _lay_out(self) -> None:
        """Builds arrays of the unfinished requests' prompts and sampling parameters."""
        going_on = [row.prompt if row.finish_reason is None else [] for row in self.rows]
        length = self._model.padded_length(max(map(len, going_on)))
        self._lengths = np.zeros(self._batch, np.int32)  # 0: a padding row
        self._prompts = np.zeros((self._batch, length), np.int32)
        for row, ids in enumerate(going_on):
            self._lengths[row], self._prompts[row, : len(ids)] = len(ids), ids
        filling = self._batch - len(self.rows)
        rows = zip(self._samplings, self.rows, strict=True)
        samplings = [_with_room(*pair) for pair in rows]
        samplings += [Sampling()] * filling
        steps = [row.begun for row in self.rows] + [0] * filling
        args = self._end_ids, self._stages, _breaks_of(self._model), steps
        self._parameters = self._model.put(SamplingArrays.of(samplings, *args))

    @property
    def done(self) -> bool:
        return all(row.is_done for row in self.rows)

    def start(self) -> None:
        """Prefills the prompts and samples each request's first token."""
        self.timings.first_token = self._begin()

    def _begin(self) -> float:
        """Prefills the prompts and samples the first tokens; returns the seconds it took."""
        model = self._model
        if self._prefix is not None:
            prompt = self._prompts[0, : self._lengths[0]].tolist()
            wanted = prompt, self._capacity, self._cache_dtype, self._selection
            if taken := self._prefix.take(model, *wanted):
                cache, count = taken
                self._capacity = cache.capacity
                return self._resume(cache, count)
        prompts: Any = self._prompts, self._lengths
        program: Start | Begin
        if model.placement is None:
            ahead = 1 if self._prefix is None else PIECE
            options: Any = {"capacity": self._capacity, "cache_dtype": self._cache_dtype}
            program = Begin(*self._sampled, **options, ahead=ahead)
            others: Any = (self._parameters,)
        else:
            program = Start(*self._sampled)
            prompts = model.put(prompts)  # else XLA chooses the sharding of `lengths` in the result
            cache = PagedCache.create(
                model.config,
                len(self._prompts),
                self._capacity,
                dtype=self._cache_dtype,
                ahead=program.draft_tokens + 1,
                placement=model.placement,
            )
            others = cache, self._parameters
        return self._call(program, *prompts, *others) + self._collect()

    def _resume(self, cache: PagedCache, count: int) -> float:
        """Prefills the rest of one prompt in chunks; the cache holds its first `count` tokens.

        Returns the seconds it took.
        """
        seconds = 0.0
        length, batch = int(self._lengths[0]), len(self._prompts)
        self.timings.reused_tokens = count
        tokens = np.zeros((batch, self._capacity), np.int32)
        tokens[0, :length] = self._prompts[0, :length]
        for first in range(count, length, PIECE):
            last = min(first + PIECE, length)
            piece = np.zeros((batch, min(self._model.padded_length(last - first), PIECE)), np.int32)
            piece[0, : last - first] = tokens[0, first:last]
            history = TokenHistory(tokens, np.array([last], np.int32))  # type: ignore[arg-type]
            args = piece, np.array([last - first], np.int32), cache, self._parameters, history
            seconds += self._call(Start(*self._sampled), *args)
            cache = self._state.cache  # only the last chunk's token belongs to the output
        return seconds + self._collect()

    def advance(self, count: int) -> float:
        """Samples up to `count` more tokens per request; returns the seconds without compiling."""
        if self._shift is not None and all(row.is_full for row in self.rows if not row.is_done):
            seconds = self._shifted(self._shift)
            self.timings.decode += seconds
            return seconds
        until = np.int32(min(self._pushed + count, self.max_tokens))
        arguments = self._state, self._parameters, until
        seconds = self._call(Loop(*self._sampled), *arguments) + self._collect()
        self.timings.decode += seconds
        return seconds

    def _shifted(self, shift: ContextShift) -> float:
        """Shifts the context of unfinished requests and prefills it again; returns the seconds."""
        for row in self.rows:
            if not row.is_done:
                row.shift(shift)
        self._lay_out()
        self._pushed = 0
        return self._begin()

    def finish(self) -> None:
        """Samples all remaining tokens, in device calls of about CALL seconds each."""
        count = INTERVAL
        while not self.done:
            seconds, before = self.advance(count), count
            # Processes that share the devices must make the same calls, so clocks cannot decide.
            if self.shared:
                count = self.max_tokens
            elif not self.has_stops and seconds > 0:
                count = max(1, min(int(before * CALL / seconds), 8 * before))

    def outputs(self) -> list[Output]:
        self.timings.new_tokens = sum(len(row.tokens) for row in self.rows)
        return [
            Output(
                row.tokens,
                None if self._model.tokenizer is None else row.text,
                row.finish_reason,
                self.timings,
                None if row.top is None else row.logprobs,
            )
            for row in self.rows
            if row.finish_reason is not None
        ]

    def keep(self) -> None:
        """Stores the KV cache in the `Prefix` that was passed to this call, if any."""
        state, prefix = getattr(self, "_state", None), self._prefix
        if prefix is None or state is None:
            return
        if any(array.is_deleted() for array in jax.tree.leaves(state)):  # interrupted in a call
            return
        prompt = self._prompts[0, : self._lengths[0]].tolist()
        with jax.transfer_guard_device_to_host("allow"):
            (count,), (stored,) = state.counts.tolist(), state.cache.context_lens.tolist()
            new = np.asarray(state.tokens)[0, :count].tolist()
        prefix.keep(self._model, (prompt + new)[:stored], state.cache, self._selection)

    def _collect(self) -> float:
        """Copies new tokens from the device to the requests.

        Marks requests with a stop string as finished on the device. Returns the seconds that this
        took, waiting for the device included.
        """
        began = time.perf_counter()
        arrays = self._state.tokens, self._state.counts
        if self._model.network.on_gpu:  # on a CPU the call costs more than the copy
            for array in arrays:
                array.copy_to_host_async()
        with jax.transfer_guard_device_to_host("allow"):
            tokens, counts = (np.asarray(array)[: len(self.rows)] for array in arrays)
            counts = counts.tolist()
        logprobs_at = self._logprobs()
        for index, (row, new, count) in enumerate(zip(self.rows, tokens, counts, strict=True)):
            if row.is_done:
                continue
            wanted = min(count, row.room)  # speculative decoding may overshoot
            for at, token in enumerate(new[row.taken : wanted].tolist(), row.taken):
                row.push(token, logprobs_at(index, at))
            first = 0 if row.begun else 1  # prefill samples the first token of a request
            self.timings.decoded_tokens += max(wanted - max(row.taken, first), 0)
            row.taken = wanted
            if row.begun + wanted == row.max_tokens:
                row.finish("length")
        going_on = [row.taken for row in self.rows if row.finish_reason is None]
        self._pushed = max(going_on, default=self._pushed)
        if (speculation := self._state.speculation) is not None:
            with jax.transfer_guard_device_to_host("allow"):
                drafted, accepted = (
                    np.asarray(x) for x in (speculation.drafted, speculation.accepted)
                )
            self.timings.drafted_tokens = int(drafted[: len(self.rows)].sum())
            self.timings.accepted_tokens = int(accepted[: len(self.rows)].sum())
        if self.has_stops:
            finished = np.ones(len(self._prompts), bool)
            finished[: len(self.rows)] = [row.finish_reason is not None for row in self.rows]
            self._state = dataclasses.replace(self._state, finished=self._model.put(finished))
        return time.perf_counter() - began

    def _logprobs(self) -> Callable[[int, int], TokenLogprobs | None]:
        """Returns a function (row, index of token) -> the token's log-probabilities.

        Its result is None for requests that did not ask for log-probabilities.
        """
        if self._state.logprobs is None:
            return lambda row, at: None
        with jax.transfer_guard_device_to_host("allow"):
            found = jax.tree.map(np.asarray, self._state.logprobs)

        def logprobs_at(row: int, at: int) -> TokenLogprobs | None:
            top = self.rows[row].top
            if top is None:
                return None
            tokens, likeliest = (x[row, at, :top].tolist() for x in (found.tokens, found.likeliest))
            return TokenLogprobs(
                float(found.chosen[row, at]), list(zip(tokens, likeliest, strict=True))
            )

        return logprobs_at

    def _call(self, program: Start | Begin | Loop, *arguments: Any) -> float:
        """Runs a program; stores the State it returns. Returns the seconds without compiling."""
        self._state, seconds = self._programs.run(program, *arguments)
        self.timings.compile = self._programs.compile_seconds
        return seconds
