"""Runs the engine's requests of one HTTP request, for as long as the client stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect

from ..engine.engine import EngineClosedError
from ..engine.outputs import Output, Piece, TokenLogprobs
from ..engine.request import Changes, Reader, Request
from ..sampling import ConstraintError, Sampling
from .errors import ApiError, unavailable
from .parameters import wrong_value
from .service import Service

#: Pieces of an answer: its index, and what is new.
News = list[tuple[int, list[Piece]]]


class Answers:
    """Requests of an engine that end when their client leaves.

    Takes its places before anything is awaited. Use it as a context manager, or call `close`.
    """

    def __init__(self, service: Service) -> None:
        """Takes a place; raises ApiError if there is none, or nothing can be served."""
        self.engine = service.generator()
        self._service, self._places = service, 0
        self._counted = 0  # requests whose end is in the metrics
        self._requests: list[Request] = []
        self._take(1)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is not finished, and gives the places back."""
        for request in self._requests:
            request.cancel()
        self._service.metrics.cancelled(self.count - self._counted)
        self._counted = self.count
        self._service.places.give_back(self._places)
        self._places = 0

    def submit(
        self, prompts: Sequence[list[int]], samplings: Sequence[Sampling], **options: Any
    ) -> None:
        """Submits a request for each prompt and its sampling; raises ApiError."""
        if len(prompts) > self._places:
            self._take(len(prompts) - self._places)
        try:
            with failures():
                for prompt, sampling in zip(prompts, samplings, strict=True):
                    self._requests.append(self.engine.submit(prompt, sampling, **options))
        except (ValueError, TypeError) as error:
            raise wrong_value(error) from None

    def rejected(self, error: ApiError) -> None:
        """Counts an error that ended a stream."""
        self._service.metrics.rejected(error.code or str(error.status))

    @property
    def count(self) -> int:
        """Number of submitted requests."""
        return len(self._requests)

    def prompt_logprobs(self, answer: int) -> list[TokenLogprobs | None] | None:
        """Returns those of an answer's prompt; complete when it has a token, or has ended."""
        return self._requests[answer].prompt_logprobs

    @property
    def seed(self) -> int:
        """Seed of the first request."""
        return self._requests[0].sampling.seed

    async def outputs(self, first: int = 0) -> list[Output]:
        """Waits for all answers from index `first` on; raises ApiError if the engine fails."""
        requests = self._requests[first:]
        with failures(), Changes(requests) as changes:
            for request in requests:
                await changes.until(Reader(request).is_at_end, ends=True)
                self._count(request.result(0))
        return [request.result(0) for request in requests]

    async def embeddings(
        self, texts: Sequence[list[int]], pooling: str | None, *, normalize: bool
    ) -> list[np.ndarray]:
        """Returns the embedding of each text, as many at a time as the engine has rows.

        All take one place: they are short, and other requests run between them. pooling: None
        means the model's.
        """
        found: list[np.ndarray] = []
        most = self.engine.stats().max_rows
        for first in range(0, len(texts), most):
            try:
                with failures():
                    for text in texts[first : first + most]:
                        request = self.engine.submit_embedding(
                            text, pooling=pooling, normalize=normalize
                        )
                        self._requests.append(request)
            except (ValueError, TypeError) as error:
                raise ApiError(400, str(error), param="input") from None
            outputs = await self.outputs(first)
            found += [output.embedding for output in outputs if output.embedding is not None]
        return found

    def pieces(self) -> list[list[Piece]]:
        """Returns all pieces of each finished answer."""
        return [Reader(request).take() for request in self._requests]

    def end(self, answer: int) -> None:
        """Ends an answer of which no more is wanted."""
        self._requests[answer].cancel()

    async def stream(self) -> AsyncIterator[News]:
        """Yields news for a client that reads them as they come: short steps, pings in silence.

        Closes after the last, so that the places are free when the client has all.
        """
        for request in self._requests:
            request.is_streamed = True  # the engine makes its steps short
        async for news in self._news():
            yield news
        self.close()

    async def _news(self) -> AsyncIterator[News]:
        """Yields what is new of all answers, at most once in `event_seconds` until the last ends.

        Yields an empty list after `ping_seconds` without news. Raises ApiError if the engine fails.
        """
        settings = self._service.settings
        readers = [(i, Reader(request)) for i, request in enumerate(self._requests)]

        def has_more() -> bool:
            return any(reader.has_more() for _, reader in readers)

        def has_end() -> bool:
            return any(reader.is_at_end() for _, reader in readers)

        with failures(), Changes(self._requests) as changes:
            while readers:
                if not await changes.until(has_more, seconds=settings.ping_seconds):
                    yield []
                    continue
                new = [(i, reader.take()) for i, reader in readers if reader.has_more()]
                outputs = {i: output for i, pieces in new if (output := pieces[-1].output)}
                for output in outputs.values():
                    self._count(output)
                readers = [(i, reader) for i, reader in readers if i not in outputs]
                yield new
                if readers and settings.event_seconds:
                    await changes.until(has_end, ends=True, seconds=settings.event_seconds)

    def _count(self, output: Output) -> None:
        self._service.metrics.finished(output)
        self._counted += 1

    def _take(self, count: int) -> None:
        self._service.places.take(count, self._places)
        self._places += count


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Converts errors of an engine that has ended, and of answers that fail, to an ApiError."""
    try:
        yield
    except EngineClosedError as error:
        raise unavailable(str(error)) from None
    except ConstraintError as error:
        raise ApiError(400, str(error), code="constraint_failed") from None


async def while_connected(receive: Any, work: Any) -> Any:
    """Returns the result of the coroutine `work`, which is cancelled when the client leaves.

    receive: of ASGI, after the body. Raises ClientDisconnect if the client left.
    """
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
