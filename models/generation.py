"""Text and tokens from prompts: all at once, or piece by piece."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import current_selection, page_dtype, selected

from . import batches
from .buckets import bucket
from .drafts import Draft, DraftModel, NextTokens, PromptLookup
from .kept import kept_program
from .kv_cache import PagedCache
from .model import Model
from .sampler import Parameters, Way
from .sampling import Sampling
from .state import State
from .stopping import StopStrings
from .tokenizer import Tokenizer

FinishReason = Literal["length", "end", "stop"]

#: Most tokens generated between two looks at the text, in a stream or where stop strings are given.
INTERVAL = 16

#: Tokens. Caches of fewer would only mean more programs.
MIN_CAPACITY = 64

#: Seconds. A stream takes more tokens a call where calls are shorter than a reader sees, so that
#: little of their time is the host's, or where they are longer than this: plain JAX on a CPU
#: decodes all weights once a call.
FLUENT_CALL, SLOW_CALL = 1 / 60, 0.25


@dataclasses.dataclass
class Timings:
    """Seconds and counts of one call, of all its rows together.

    Attributes:
      prompt_tokens, new_tokens: sums over the rows.
      compile: tracing and compiling; 0 once a program for the shapes exists.
      drafted_tokens, accepted_tokens: of drafts in all, and those that stayed.
      first_token: from the checked prompt to the first token of every row.
      decode: from there to the last token.
      decoded_tokens: tokens that `decode` covers: all but each row's first.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    compile: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decoding's speed; NaN if a single token was asked for."""
        return (
            self.decoded_tokens / self.decode
            if self.decoded_tokens and self.decode
            else float("nan")
        )


@dataclasses.dataclass(frozen=True)
class Output:
    """One prompt's continuation.

    Attributes:
      tokens: the new token ids, without the end token, with those of a stop string.
      text: what follows the prompt's text, up to a stop string; None if the model has no tokenizer.
      finish_reason: `length` (max_new_tokens reached), `end` (an end token), `stop` (a stop
        string).
      timings: of the call; the outputs of a batch share them.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    timings: Timings


@dataclasses.dataclass(frozen=True)
class Piece:
    """One step of a stream: its token, and the text that became certain with it (perhaps empty).

    The last piece has `output`, and a token of None if all tokens were in pieces before it.
    """

    token: int | None
    text: str
    output: Output | None = None


def generate(
    model: Model,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    cache_dtype: Any = jnp.float32,
    draft: Any = None,
    **fields: Any,
) -> Any:
    """Continues prompts.

    The tokens come from one jitted `lax.while_loop` over a donated cache; with stop strings it is
    entered again every INTERVAL tokens. A row's tokens depend on its prompt, way of sampling and
    seed, and on the other rows no more than by rounding. Prompts are padded to
    `model.padded_length`; where memory does not suffice for all, some run after others.

    Args:
      prompts: a text, a sequence of token ids, or a list of either kind, whose lengths may differ.
      sampling: how, or a list of ways, one for each prompt; None takes the most likely of up to 64
        tokens. Other numbers compile nothing. Of one way for all, row i draws with `seed + i`.
      cache_dtype: of the cached keys and values: float32, bfloat16, float16, int8 (with a scale per
        token and head) or float8_e4m3fn.
      draft: guesses of the next tokens, which one pass over all of them checks; None: none are
        made. "lookup", or a `drafts.PromptLookup`: what followed the last tokens where they stood
        before; a smaller Model with the same vocabulary, or a `drafts.DraftModel`; or a
        what `load_nextn` reads, the layer of the model's file that predicts further ones. The
        tokens are those without drafts, but for rounding: with activations="f32" they are the same.
      fields: of `Sampling`, instead of those of `sampling`: `max_new_tokens=100`.

    Returns:
      An Output, or a list of them for a list of prompts.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, a prompt and new tokens beyond the
        context length, a text without a tokenizer, a field out of range. TypeError: prompts or
        fields of another type. All of them before any work.
    """
    rows, single = _rows(model, prompts)
    samplings = _samplings(sampling, fields, len(rows))
    _check(model, rows, samplings)
    outputs: list[Output] = []
    timings: list[Timings] = []
    most = _rows_at_once(model, rows, samplings, cache_dtype)
    for batch in batches.cut(len(rows), most):
        run = _Run(model, rows[batch], samplings[batch], cache_dtype, draft, filled_to=most)
        run.start()
        while not run.done:
            run.advance(INTERVAL if run.has_stops else run.most_tokens)
        outputs += run.outputs()
        timings.append(run.timings)
    if len(timings) > 1:
        whole = Timings(*map(sum, zip(*map(dataclasses.astuple, timings), strict=True)))
        outputs = [dataclasses.replace(output, timings=whole) for output in outputs]
    return outputs[0] if single else outputs


def stream(
    model: Model,
    prompt: Any,
    sampling: Sampling | None = None,
    *,
    cache_dtype: Any = jnp.float32,
    draft: Any = None,
    **fields: Any,
) -> Iterator[Piece]:
    """Continues one prompt token by token; arguments, checks and result as `generate`'s.

    The checks run at the call. Where processes share the model's devices, all of them must read the
    stream. The texts of all pieces together are the text of the last piece's
    `output`.
    """
    rows, single = _rows(model, prompt)
    if not single:
        raise TypeError("prompt is a list of prompts; stream takes one")
    samplings = _samplings(sampling, fields, 1)
    _check(model, rows, samplings)
    return _pieces(_Run(model, rows, samplings, cache_dtype, draft))


def _samplings(sampling: Any, fields: dict[str, Any], rows: int) -> list[Sampling]:
    """The ways of rows, each with its own seed."""
    if isinstance(sampling, Sequence):
        if len(sampling) != rows:
            problem = f"sampling holds {len(sampling)} ways for {rows} prompts"
            raise ValueError(f"{problem}; it must be one, or one for each")
        return [_sampling(one, fields) for one in sampling]
    one = _sampling(sampling, fields)
    # `dataclasses.replace` checks every field again.
    return [
        dataclasses.replace(one, seed=(one.seed + i) % 2**32) if i else one for i in range(rows)
    ]


def _sampling(sampling: Any, fields: dict[str, Any]) -> Sampling:
    if sampling is None:
        return Sampling(**fields)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is of type {type(sampling).__name__}; it must be a Sampling")
    return dataclasses.replace(sampling, **fields) if fields else sampling


def _pieces(run: _Run) -> Iterator[Piece]:
    run.start()
    (row,) = run.rows
    yielded, interval = 0, 1
    while True:
        for token, end in zip(row.tokens[yielded:], row.ends[yielded:], strict=True):
            yield Piece(token, row.take_text(end))
        yielded = len(row.tokens)
        if run.done:
            (output,) = run.outputs()
            yield Piece(None, row.take_text(), output)
            return
        seconds = run.advance(interval)
        # Processes that share the devices must make the same calls, whatever their clocks say.
        if run.shared or not FLUENT_CALL < seconds < SLOW_CALL:
            interval = min(2 * interval, INTERVAL)


def _rows(model: Model, prompts: Any) -> tuple[list[np.ndarray], bool]:
    """Every prompt as int32 ids, and whether there was a single one instead of a list."""
    if not isinstance(prompts, Sequence | np.ndarray | jax.Array):  # a str is a Sequence
        raise TypeError(
            f"prompts is of type {type(prompts).__name__}; "
            "it must be a text, ids, or a list of either"
        )
    single = isinstance(prompts, str) or (
        len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    )
    rows = [prompts] if single else list(prompts)
    if not rows or (single and len(prompts) == 0):
        raise ValueError("prompts is empty; at least one prompt of at least one token is needed")
    return [
        _ids(model, row, "prompt" if single else f"prompts[{i}]") for i, row in enumerate(rows)
    ], single


def _ids(model: Model, prompt: Any, name: str) -> np.ndarray:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{name} is a text, but the model has no tokenizer: pass token ids")
        prompt = model.tokenizer.encode(prompt)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(
            f"{name} has shape {ids.shape}; it must be a text or ids (time,), at least one"
        )
    model.check_ids(name, ids)
    return ids.astype(np.int32)


def _draft(draft: Any, model: Model) -> Draft | None:
    """The drafts that an argument asks for."""
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


def _check(model: Model, prompts: list[np.ndarray], samplings: list[Sampling]) -> None:
    """Raises ValueError where a row does not fit the model."""
    context = model.config.context_length
    for ids, sampling in zip(prompts, samplings, strict=True):
        if len(ids) + sampling.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} are "
                f"more than the context length, {context}"
            )
        if sampling.stop and model.tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} needs a tokenizer, which the model has not")
        vocab_size = model.config.vocab_size
        most = max((token for token, _ in sampling.biases), default=0)
        if most >= vocab_size:
            raise ValueError(f"logit_bias names token {most}; ids must be 0 to {vocab_size - 1}")


def _capacity(prompts: list[np.ndarray], samplings: list[Sampling]) -> int:
    """Tokens that caches have room for."""
    rows = zip(prompts, samplings, strict=True)
    needed = max(len(ids) + sampling.max_new_tokens for ids, sampling in rows)
    return max(bucket(needed), MIN_CAPACITY)


def _rows_at_once(
    model: Model, prompts: list[np.ndarray], samplings: list[Sampling], cache_dtype: Any
) -> int:
    longest, capacity = max(map(len, prompts)), _capacity(prompts, samplings)
    dtype = page_dtype(cache_dtype, "cache_dtype")
    return batches.rows_at_once(model, len(prompts), longest, capacity, dtype)


class _Row:
    """One sequence on the host: its new tokens, and their text as far as it is certain."""

    def __init__(
        self, tokenizer: Tokenizer | None, sampling: Sampling, end_ids: tuple[int, ...]
    ) -> None:
        self.tokens: list[int] = []
        self.ends: list[int] = []  # of the text that was certain with each token
        self.text = ""
        self.finish_reason: FinishReason | None = None
        # The ids continue a text, so their first space counts.
        self._decoder = None if tokenizer is None else tokenizer.stream(strip_prefix=False)
        self._stop = StopStrings(sampling.stop)
        self._end_ids = () if sampling.ignore_end else end_ids
        self._taken = 0
        self.most_tokens = sampling.max_new_tokens
        self.taken = 0  # of the tokens that the device has sampled

    def push(self, token: int) -> None:
        """Takes the next token; ignored once the row is finished."""
        if self.finish_reason is not None:
            return
        if token in self._end_ids:
            self.finish("end")
            return
        self.tokens.append(token)
        if self._decoder is not None:
            self.text += self._stop.push(self._decoder.push(token))
            if self._stop.matched is not None:
                self.finish_reason = "stop"
        self.ends.append(len(self.text))

    def finish(self, reason: FinishReason) -> None:
        """Ends the row, unless it has ended, with the text that was held back."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        if self._decoder is not None:
            self.text += self._stop.push(self._decoder.finish()) + self._stop.finish()
        if self.ends:
            self.ends[-1] = len(self.text)

    def take_text(self, end: int | None = None) -> str:
        """The text from where the last call ended, up to `end`."""
        end = len(self.text) if end is None else end
        text, self._taken = self.text[self._taken : end], end
        return text


class _Run:
    """One call of `generate` or `stream`: the state on the device, the rows on the host."""

    def __init__(
        self,
        model: Model,
        prompts: list[np.ndarray],
        samplings: list[Sampling],
        cache_dtype: Any,
        draft: Any,
        filled_to: int = 1,
    ) -> None:
        """filled_to: rows of the batch at least, as batches before it had."""
        longest = max(map(len, prompts))
        self.most_tokens = max(sampling.max_new_tokens for sampling in samplings)
        self.has_stops = any(sampling.stop for sampling in samplings)
        end_ids = () if model.tokenizer is None else tuple(model.tokenizer.eos_token_ids)
        self.rows = [_Row(model.tokenizer, sampling, end_ids) for sampling in samplings]
        self.timings = Timings(prompt_tokens=sum(map(len, prompts)))
        self.shared = model.placement is not None and model.placement.spans_processes
        self._model = model
        kind = _draft(draft, model)
        if all(sampling.ignore_end for sampling in samplings):
            end_ids = ()
        way = Way.of(samplings, end_ids)
        self._programs = model.programs(way, kind)
        self._weights: Any = model.weights
        if isinstance(kind, DraftModel):
            self._weights = model.weights, kind.model.weights
        elif isinstance(kind, NextTokens):
            self._weights = model.weights, dict(kind.weights)
        batch = model.padded_batch(max(len(prompts), filled_to))
        self._lengths = np.zeros(batch, np.int32)  # 0: a row that only fills up the batch
        self._prompts = np.zeros((batch, model.padded_length(longest)), np.int32)
        for row, ids in enumerate(prompts):
            self._lengths[row], self._prompts[row, : len(ids)] = len(ids), ids
        filling = [Sampling()] * (batch - len(prompts))
        self._parameters = Parameters.of([*samplings, *filling], end_ids, way)
        self._capacity = _capacity(prompts, samplings)
        self._cache_dtype = page_dtype(cache_dtype, "cache_dtype")
        # of the call: a stream's steps run wherever it is read
        self._selection = current_selection()
        self._state: State
        self._pushed = 0

    @property
    def done(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    def start(self) -> None:
        """Runs the prompts and samples each row's first token."""
        model = self._model
        prompts: Any = self._prompts, self._lengths
        if model.placement is None:
            program = self._programs.begin(model.config, self._capacity, self._cache_dtype)
            others: Any = (self._parameters,)
        else:
            program = self._programs.start
            prompts = model.put(prompts)  # else XLA chooses where lengths, a result too, lie
            cache = PagedCache.create(
                model.config,
                len(self._prompts),
                self._capacity,
                dtype=self._cache_dtype,
                ahead=self._programs.draft_tokens + 1,
                placement=model.placement,
            )
            others = cache, model.put(self._parameters)
        arguments = self._weights, *prompts, *others
        self.timings.first_token = self._call("start", program, *arguments)

    def advance(self, count: int) -> float:
        """Samples up to `count` more tokens per row; returns the seconds without compiling."""
        until = np.int32(min(self._pushed + count, self.most_tokens))
        arguments = self._weights, self._state, until
        seconds = self._call("loop", self._programs.loop, *arguments)
        self.timings.decode += seconds
        return seconds

    def outputs(self) -> list[Output]:
        self.timings.new_tokens = sum(len(row.tokens) for row in self.rows)
        return [
            Output(
                row.tokens,
                None if self._model.tokenizer is None else row.text,
                row.finish_reason,
                self.timings,
            )
            for row in self.rows
            if row.finish_reason is not None
        ]

    def _collect(self) -> None:
        """Hands new tokens to the rows, and rows that met a stop string back to the device."""
        arrays = self._state.tokens, self._state.counts
        if self._programs.on_gpu:  # else they are there: the call takes longer than the copy
            for array in arrays:
                array.copy_to_host_async()
        with jax.transfer_guard_device_to_host("allow"):
            tokens, counts = (np.asarray(array)[: len(self.rows)] for array in arrays)
            counts = counts.tolist()
        for row, new, count in zip(self.rows, tokens, counts, strict=True):
            wanted = min(count, row.most_tokens)  # drafts may have given some more
            for token in new[row.taken : wanted].tolist():
                row.push(token)
            self.timings.decoded_tokens += max(wanted - max(row.taken, 1), 0)
            row.taken = wanted
            if wanted == row.most_tokens:
                row.finish("length")
        going_on = [row.taken for row in self.rows if row.finish_reason is None]
        self._pushed = max(going_on, default=self._pushed)
        if (drafting := self._state.drafting) is not None:
            with jax.transfer_guard_device_to_host("allow"):
                drafted, accepted = (np.asarray(x) for x in (drafting.drafted, drafting.accepted))
            self.timings.drafted_tokens = int(drafted[: len(self.rows)].sum())
            self.timings.accepted_tokens = int(accepted[: len(self.rows)].sum())
        if self.has_stops:
            finished = np.ones(len(self._prompts), bool)
            finished[: len(self.rows)] = [row.finish_reason is not None for row in self.rows]
            self._state = dataclasses.replace(self._state, finished=self._model.put(finished))

    def _call(self, name: str, program: Any, *arguments: Any) -> float:
        """Runs a program and collects its tokens; returns the seconds without compiling."""
        batch, prompt_length = self._prompts.shape
        length = prompt_length if name == "start" else 0
        key = name, batch, length, self._capacity, self._cache_dtype, self._selection
        # NumPy's arguments are meant to go to the device; `device_put` takes ten times as long.
        allowed = jax.transfer_guard_host_to_device("allow")
        with selected(self._selection), self._model.on_devices(), allowed:
            if key not in self._programs.ready:
                began = time.perf_counter()
                drafts_too = self._programs.draft is not None
                if self._model.kept is None or self._model.placement is not None or drafts_too:
                    program.lower(*arguments).compile()  # calling it reuses what this compiles
                    ready = program
                else:
                    ready = kept_program(
                        self._model, self._programs, name, program, arguments, self._cache_dtype
                    )
                self._programs.ready[key] = ready
                self.timings.compile += time.perf_counter() - began
            began = time.perf_counter()
            self._state = self._programs.ready[key](*arguments)
        self._collect()
        return time.perf_counter() - began
