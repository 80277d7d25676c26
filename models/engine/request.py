"""Defines Request, the handle of a prompt that an engine continues, and ContextShift."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..sampling import Sampling
from ..sampling.grammars import Matcher
from ..sampling.packing import pack
from ..sampling.stages import SamplingArrays, SamplingStages
from .outputs import Output, Piece, Timings, TokenLogprobs
from .prompt_results import PooledVector, PromptLogprobs, PromptResults, TokenVectors
from .sequence import Sequence
from .text import GeneratedText

if TYPE_CHECKING:
    from ..runner.model import Model


@dataclasses.dataclass(frozen=True)
class ContextShift:
    """Context shift: when the context is full, keeps its first tokens and the newer half.

    Attributes:
      keep: number of first tokens to keep, such as BOS and a system message.
    """

    keep: int = 1

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ValueError(f"keep={self.keep} must be at least 0")

    def rest(self, tokens: list[int]) -> list[int]:
        """Returns which of the context's `tokens` remain after the shift."""
        return tokens[: self.keep] + tokens[self.keep + (len(tokens) - self.keep + 1) // 2 :]


class Hooks(NamedTuple):
    """Functions of an engine that a request calls until its end.

    Attributes:
      cancel: called once, if the request is cancelled.
      wait: function (request, condition, timeout in seconds) that returns whether the condition
        holds, and returns when it does.
      now: clock for `Timings`, in seconds.
    """

    cancel: Callable[[Request], None]
    wait: Callable[[Request, Callable[[], bool], float | None], bool]
    now: Callable[[], float]


class Request:
    """A prompt that an engine continues. All methods may be called from any thread.

    Iterate over it for a `Piece` per token, as `models.stream` gives them, with `for` or
    `async for`; several loops may do so, and each gets all pieces.

    Attributes:
      prompt: token ids of the prompt.
      sampling: its sampling parameters.
      priority: requests with lower values are served first.
      salt: separates its cached prefixes from those of other requests.
      adapter: name of its LoRA adapter; None means none.
      place: the adapter's place in the engine; 0 means none.
      drafts: whether it takes part in speculative decoding.
      matcher: state of its text under its constraint; None without one.
      prompt_results: what is wanted of the prompt's tokens; None for nothing.
    """

    def __init__(
        self,
        model: Model,
        prompt: list[int],
        sampling: Sampling,
        shift: ContextShift | None,
        hooks: Hooks,
        vectors: TokenVectors | PooledVector | None = None,
    ) -> None:
        """Creates the request; an engine does so. Raises ConstraintError.

        vectors: the embedding to compute instead of new tokens; `sampling` is then PROMPT_ALONE.
        """
        self.prompt, self.sampling, self.shift = prompt, sampling, shift
        tokenizer = model.tokenizer
        end_ids = () if tokenizer is None else tuple(tokenizer.eos_token_ids)
        self.text = GeneratedText(tokenizer, sampling, end_ids)
        self.stages = SamplingStages.of([sampling], end_ids)
        self.priority, self.salt = 0, b""
        self.adapter: str | None = None
        self.place = 0
        self.drafts = True
        self.sequence: Sequence | None = None  # set and changed by the engine alone
        self.timings = Timings(prompt_tokens=len(prompt))
        self._model, self._end_ids = model, end_ids
        self.matcher = self._new_matcher()
        self._vectors = vectors
        self.prompt_results: PromptResults | None = vectors
        if vectors is None and sampling.prompt_logprobs is not None:
            self.prompt_results = PromptLogprobs(len(prompt), sampling.prompt_logprobs)
        self._hooks: Hooks | None = hooks  # None after the end; they refer to the engine
        self._packed: dict[SamplingStages, np.ndarray] = {}
        self.changed = threading.Condition()
        self._output: Output | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[bool], None]] = []  # called with whether it is done
        self._begun = self._first = hooks.now()
        self._sampled = 0  # tokens so far, end tokens included
        self._has_row = False  # whether it has had one
        self.is_streamed = False
        self.compiled = 0.0  # seconds that programs took to compile before the request

    # For users.

    def __iter__(self) -> Iterator[Piece]:
        reader, self.is_streamed = Reader(self), True
        while True:
            self._wait_for(reader.has_more, None)
            for piece in reader.take():
                yield piece
                if piece.output is not None:
                    return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        reader, self.is_streamed = Reader(self), True
        with Changes([self]) as changes:
            while True:
                await changes.until(reader.has_more)
                for piece in reader.take():
                    yield piece
                    if piece.output is not None:
                        return

    def result(self, timeout: float | None = None) -> Output:
        """Waits for the end of the text and returns it.

        timeout: seconds to wait; None means no limit.

        Raises:
          TimeoutError: the text is not finished in time; the request goes on. Other errors: the
            engine ended, or could not run this request.
        """
        if not self._wait_for(lambda: self.is_done, timeout):
            raise TimeoutError(f"the request is not finished after {timeout} seconds")
        return self._finished()

    def cancel(self) -> bool:
        """Ends the request and frees its pages within two steps.

        The text so far becomes its output, with `finish_reason` "cancelled". Returns whether this
        call ended it; False if it was finished or cancelled before.
        """
        with self.changed:
            hooks = self._hooks
            if hooks is None:
                return False
            self.finish("cancelled")
        hooks.cancel(self)
        return True

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The output's `prompt_logprobs`, known with the first new token; None unless requested."""
        results = self.prompt_results
        return results.entries if isinstance(results, PromptLogprobs) else None

    @property
    def is_done(self) -> bool:
        """Whether the text is finished, cancelled, or failed."""
        return self._output is not None or self._error is not None

    # For the engine.

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to report; None means no log-probabilities."""
        return self.sampling.logprobs

    def packed(self, stages: SamplingStages) -> np.ndarray:
        """Returns the sampling parameters as a row, int32, for a program with `stages`."""
        if stages not in self._packed:
            breaks = breaks_of(self._model)
            arrays = SamplingArrays.of([self.sampling], self._end_ids, stages, breaks)
            self._packed = {stages: pack(arrays)[0]}
        return self._packed[stages]

    def recover(self) -> None:
        """Puts the matcher right if an interrupt came between the text's token and its own."""
        self.matcher = self._new_matcher()
        if self.matcher is not None:
            for token in self.text.tokens:
                self.matcher.push(token)

    def take_row(self) -> None:
        """Notes that a step runs a part of the prompt."""
        if not self._has_row and (hooks := self._hooks) is not None:
            self._has_row, self.timings.queue = True, hooks.now() - self._begun

    def push(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Appends sampled tokens; returns how many of them belong to the text.

        The last of these may be an end token. Raises ConstraintError if the text leaves the form of
        its constraint.
        """
        with self.changed:
            if self._hooks is None:
                return 0
            if not self._sampled:
                self._first = self._hooks.now()
                self.timings.first_token = self._first - self._begun
            taken = 0
            for taken, token in enumerate(tokens, 1):
                if self.matcher is not None:
                    self.matcher.push(token)
                self.text.push(token, None if logprobs is None else logprobs[taken - 1])
                if self.matcher is not None and self.matcher.is_finished:
                    self.text.finish("end")
                if self.text.finish_reason is not None:
                    break
            self.timings.new_tokens = len(self.text.tokens)
            self._sampled += taken
            self.timings.decoded_tokens = self._sampled - 1  # the first is from prefill
            self._update()
            return taken

    def finish(self, reason: Any) -> None:
        """Ends the text, unless it is finished."""
        with self.changed:
            self.text.finish(reason)
            self._update()

    def end_prompt(self) -> None:
        """Ends a request without new tokens, whose prompt is computed."""
        with self.changed:
            if self._hooks is not None:
                self._first = self._hooks.now()
                self.timings.first_token = self._first - self._begun
                self.finish("length")

    def fail(self, error: BaseException) -> None:
        """Makes all waiting and later calls raise `error`, unless the text is finished."""
        with self.changed:
            if not self.is_done:
                self._error = error
            self._update()

    def _new_matcher(self) -> Matcher | None:
        constraint, grammars = self.sampling.constraint, self._model.grammars
        if constraint is None or grammars is None:
            return None
        return grammars.matcher(constraint)

    def _update(self) -> None:
        """Makes the output if the text is finished, and wakes everybody who waits."""
        text = self.text
        if text.finish_reason is not None and self._hooks is not None:
            self.timings.decode = self._hooks.now() - self._first
            self._output = Output(
                text.tokens,
                None if self._model.tokenizer is None else text.text,
                text.finish_reason,
                self.timings,
                None if self.top is None else text.logprobs,
                text.stop,
                self.prompt_logprobs,
                text.end_token,
                None if self._vectors is None else self._vectors.value(),
            )
        self.changed.notify_all()
        for wake in tuple(self._listeners):
            wake(self.is_done)
        if self.is_done:
            self._hooks = None

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Returns whether the condition holds, which it does after the end."""
        hooks = self._hooks
        return True if hooks is None else hooks.wait(self, condition, timeout)

    def _finished(self) -> Output:
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


class Changes:
    """Lets an event loop wait for changes of requests. Use it as a context manager.

    The engine's thread wakes the event loop only for the kind of change that it waits for.
    """

    def __init__(self, requests: SequenceOf[Request]) -> None:
        self._requests = requests
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self._waits = self._waits_for_tokens = False

    def __enter__(self) -> Changes:
        for request in self._requests:
            with request.changed:
                request._listeners.append(self._wake)
        return self

    def __exit__(self, *_: object) -> None:
        for request in self._requests:
            with request.changed:
                request._listeners.remove(self._wake)

    async def until(
        self, condition: Callable[[], bool], *, ends: bool = False, seconds: float | None = None
    ) -> bool:
        """Waits until the condition holds; returns False if it does not within `seconds`.

        ends: whether only the end of a request, not each token, can make it true.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    self._event.clear()
                    self._waits, self._waits_for_tokens = True, not ends
                    if condition():
                        return True
                    await self._event.wait()
        except TimeoutError:
            return False
        finally:
            self._waits = False

    def _wake(self, is_end: bool) -> None:
        """Called by the engine's thread after each change of a request."""
        if self._waits and (is_end or self._waits_for_tokens):
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._event.set)


class Reader:
    """Position of one loop over a request's pieces."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens = self._characters = 0

    def has_more(self) -> bool:
        return self._request.is_done or len(self._request.text.tokens) > self._tokens

    def is_at_end(self) -> bool:
        """Whether the request is done; then no further pieces come but those of `take`."""
        return self._request.is_done

    def take(self) -> list[Piece]:
        """Returns the pieces since the last call; raises the request's error if there are none."""
        request, pieces = self._request, []
        with request.changed:
            text = request.text
            for i in range(self._tokens, len(text.tokens)):
                piece = text.text[self._characters : text.ends[i]]
                logprobs = text.logprobs[i] if text.logprobs else None
                pieces.append(Piece(text.tokens[i], piece, logprobs=logprobs))
                self._characters = text.ends[i]
            self._tokens = len(text.tokens)
            if request.is_done and (request._error is None or not pieces):
                rest = text.text[self._characters :]
                pieces.append(Piece(None, rest, request._finished()))
        return pieces


def breaks_of(model: Model) -> Callable[[tuple[str, ...]], np.ndarray]:
    """Returns a function from strings to the mask (vocab_size,) of tokens that contain a string."""

    def breaks(texts: tuple[str, ...]) -> np.ndarray:
        found = np.zeros(model.config.vocab_size, bool)
        if model.tokenizer is not None and texts:
            holding = model.tokenizer.tokens_with(texts)
            found[[i for i in holding if i < len(found)]] = True
        return found

    return breaks
