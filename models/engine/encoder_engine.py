"""Defines EncoderEngine: requests of many threads for embeddings of one encoder, in batches."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jax_q4k import current_selection, selected

from ..runner.model import Model
from .arguments import embedding_rows, embedding_settings
from .encoding import TOKENS, EncoderRuns, Text, Vectors
from .engine import EngineClosedError, EngineStats

#: Engines that are not closed.
_OPEN: weakref.WeakSet[EncoderEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all engines: a thread that Python ends at its exit, inside of JAX, aborts."""
    for engine in list(_OPEN):
        engine.close()


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
    text: Text
    wanted: Vectors
    result: Future[np.ndarray]


class EncoderEngine:
    """Computes embeddings with an encoder for requests of any threads, batched by length.

    Use it as a context manager, or call `close`. `Engine` does the same for decoders.

    Attributes:
      model: the encoder.
    """

    def __init__(self, model: Model, *, max_rows: int = 64, max_context: int | None = None) -> None:
        """Starts the engine's thread.

        Args:
          max_rows: most texts of a batch.
          max_context: most tokens of a text; None means the model's context length.

        Raises:
          TypeError: `model` is not a Model. ValueError: it is a decoder, or a number out of range.
        """
        if not isinstance(model, Model):
            raise TypeError(f"model is of type {type(model).__name__}; it must be a Model")
        if not model.config.kind.bidirectional:
            architecture = model.config.architecture
            raise ValueError(f"model is a decoder, {architecture}; Engine runs it")
        most = model.config.context_length
        context = most if max_context is None else max_context
        for name, value, limit in (("max_rows", max_rows, 1024), ("max_context", context, most)):
            if not 1 <= value <= limit:
                raise ValueError(f"{name}={value} must be 1 to {limit}")
        self.model, self._rows, self._context = model, max_rows, context
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._wake = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._steps = self._tokens = self._run_tokens = self._running = 0
        self._step_tokens: collections.Counter[int] = collections.Counter()
        self._runs = EncoderRuns(model)
        self._thread = threading.Thread(
            target=self._run, args=(current_selection(),), daemon=True, name="jax-q4k-encoder"
        )
        self._thread.start()
        _OPEN.add(self)

    def submit(self, texts: Sequence[Text], wanted: Vectors) -> list[Future[np.ndarray]]:
        """Adds texts, whose ids must fit `max_context`, and returns at once.

        Raises EngineClosedError: the engine is closed or has failed.
        """
        added = [_Waiting(text, wanted, Future()) for text in texts]
        with self._wake:
            if not self.is_open:
                raise EngineClosedError(self._problem)
            self._waiting.extend(added)
            self._wake.notify_all()
        return [one.result for one in added]

    def embed(
        self,
        texts: Any,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        task: str | None = None,
    ) -> Any:
        """Computes embeddings of one text, or of each of a list of texts, like `models.embed`."""
        wanted = Vectors(*embedding_settings(self.model, pooling, normalize))
        rows, single = embedding_rows(self.model, texts, self._context, task)
        vectors = [found.result() for found in self.submit(rows, wanted)]
        if single:
            return vectors[0]
        return vectors if wanted.pooling == "none" else np.stack(vectors)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters: none."""
        return ()

    def stats(self) -> EngineStats:
        """Returns the engine's state and totals; an encoder has no pages and no new tokens."""
        with self._wake:
            return EngineStats(
                running=self._running,
                waiting=len(self._waiting),
                pages=1,
                free_pages=1,
                cached_pages=0,
                page_tokens=0,
                max_rows=self._rows,
                max_context=self._context,
                preemptions=0,
                compilations=self._runs.compilations,
                prompt_tokens=self._tokens,
                reused_tokens=0,
                new_tokens=0,
                lost_tokens={},
                steps=self._steps,
                run_tokens=self._run_tokens,
                step_tokens=dict(self._step_tokens),
                wait_seconds=0.0,
                host_seconds=0.0,
            )

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it is not closed, and has not failed."""
        return self._error is None and not self._closing

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine; None while it is open, and after `close`."""
        return self._error

    def close(self) -> None:
        """Ends the engine: requests that are not finished raise EngineClosedError."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> EncoderEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _problem(self) -> str:
        if self._error is None:
            return "the engine is closed"
        return f"the engine has failed: {str(self._error) or repr(self._error)}"

    def _run(self, selection: Any) -> None:
        """Runs the engine's thread."""
        try:
            with selected(selection):
                while batch := self._next():
                    self._step(batch)
        except BaseException as failure:
            self._error = failure
        with self._wake:
            self._closing = True
            left = list(self._waiting)
            self._waiting.clear()
        for one in left:
            if one.result.set_running_or_notify_cancel():
                one.result.set_exception(EngineClosedError(self._problem))

    def _next(self) -> list[_Waiting]:
        """Waits for requests; returns a batch of them, or [] when the engine is closed.

        The batch has the request that waits longest, and those of about its length.
        """
        with self._wake:
            batch: list[_Waiting] = []
            while not batch:  # all that were taken may have been cancelled
                while not self._waiting and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return []
                batch = self._taken(self._waiting[0])
            self._running = len(batch)
            return batch

    def _taken(self, first: _Waiting) -> list[_Waiting]:
        """Removes a request and others of its kind and padded length; returns those that wait."""
        padded = self.model.padded_length
        time = padded(len(first.text.ids))
        most = min(max(TOKENS // time, 1), self._rows)
        batch: list[_Waiting] = []
        for one in list(self._waiting):
            is_alike = one.wanted == first.wanted and padded(len(one.text.ids)) == time
            if is_alike and len(batch) < most:
                self._waiting.remove(one)
                if one.result.set_running_or_notify_cancel():
                    batch.append(one)
        return batch

    def _step(self, batch: list[_Waiting]) -> None:
        try:
            vectors = self._runs.vectors([one.text for one in batch], batch[0].wanted)
        except BaseException as failure:
            for one in batch:
                one.result.set_exception(failure)
            raise
        tokens = sum(len(one.text.ids) for one in batch)
        with self._wake:
            self._steps += 1
            self._tokens += tokens
            self._run_tokens += tokens
            self._step_tokens[1 << (tokens - 1).bit_length()] += 1
            self._running = 0
        for one, vector in zip(batch, vectors, strict=True):
            one.result.set_result(vector)
