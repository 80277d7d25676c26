"""Shared code of chat and text completions: submitted prompts, usage, streams."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import FinishReason, Output, Piece
from ..tokenizer import Tokenizer
from .answers import Answers, while_connected
from .errors import ApiError, json_response
from .events import DONE, PING, EventStream, event
from .parameters import Parameters, samplings_of
from .service import Service

#: Pieces of one answer -> its entry of `choices`, or None if there is nothing to say yet.
Choice = Callable[[int, list[Piece]], dict[str, Any] | None]


def submit(
    service: Service,
    answers: Answers,
    prompts: list[list[int]],
    parameters: Parameters,
    *,
    most: int | None,
    logprobs: int | None = None,
    stops: tuple[str, ...] = (),
) -> None:
    """Submits `n` answers to each prompt, which share its pages.

    most: maximum new tokens; None means what the context has room for. logprobs: number of most
    likely tokens to report; None means no log-probabilities. Raises ApiError.
    """
    context = answers.engine.stats().max_context
    rows, samplings = [], []
    for prompt in prompts:
        if len(prompt) >= context:
            message = f"the prompt has {len(prompt)} tokens; the context length is {context}"
            raise ApiError(400, message, code="context_length_exceeded")
        room = context - len(prompt)
        new = samplings_of(
            parameters,
            service.defaults,
            max_new_tokens=room if most is None else min(most, room),
            logprobs=logprobs,
            stops=stops,
        )
        rows += [prompt] * len(new)
        samplings += new
    options: dict[str, Any] = {"priority": parameters.priority or 0}
    answers.submit(rows, samplings, cache_salt=parameters.cache_salt or "", **options)


def check_length(service: Service, text: str, name: str) -> None:
    """Raises ApiError for a text that cannot fit into the context, without tokenizing it."""
    engine, tokenizer = service.ready(), service.tokenizer()
    context = engine.stats().max_context
    most = context * tokenizer.longest_token
    if len(text) > most or len(text.encode(errors="replace")) > most:
        message = f"{name} has {len(text)} characters, too many for a context of {context} tokens"
        raise ApiError(400, message, param=name, code="context_length_exceeded")


async def respond(
    request: Request,
    service: Service,
    answers: Answers,
    *,
    whole: Callable[[list[Output]], dict[str, Any]],
    chunks: AsyncIterator[bytes] | None,
    headers: dict[str, str],
) -> Response | EventStream:
    """Returns the response: a stream of `chunks`, or what `whole` makes of the outputs.

    Raises ApiError. ClientDisconnect: the client left.
    """
    settings = service.settings
    if chunks is not None:
        options: dict[str, Any] = {"stalled_seconds": settings.stalled_seconds}
        return EventStream(answers, chunks, seconds=settings.seconds, headers=headers, **options)
    try:
        async with asyncio.timeout(settings.seconds):
            outputs = await while_connected(request.receive, answers.outputs())
    except TimeoutError:
        raise ApiError(408, f"the request took longer than {settings.seconds:g} s") from None
    return json_response(whole(outputs), headers=headers)


async def chunks_of(
    service: Service,
    answers: Answers,
    head: dict[str, Any],
    choice: Choice,
    prompt_tokens: int,
    *,
    first: list[dict[str, Any]],
    has_usage: bool,
) -> AsyncIterator[bytes]:
    """Yields the events of a stream.

    head: fields of every chunk. choice: makes choices of pieces. first: choices to begin with.
    has_usage: whether a last chunk has the usage.
    """
    settings = service.settings
    usage: dict[str, Any] = {"usage": None} if has_usage else {}
    for one in first:
        yield event({**head, "choices": [one], **usage})
    outputs: list[Output] = []
    async for news in answers.news(settings.event_seconds, settings.ping_seconds):
        if not news:
            yield PING
        for index, pieces in news:
            found = choice(index, pieces)
            if found is not None:
                yield event({**head, "choices": [found], **usage})
            if (output := pieces[-1].output) is not None:
                outputs.append(output)
                end = _end_of(found or first[index] if first else found, index, output)
                yield event({**head, "choices": [end], **usage})
    if has_usage:
        yield event({**head, "choices": [], "usage": usage_of(prompt_tokens, outputs)})
    yield DONE


def _end_of(like: dict[str, Any] | None, index: int, output: Output) -> dict[str, Any]:
    """Returns the choice that has an answer's finish reason, without text."""
    empty: dict[str, Any] = {"delta": {}} if like is not None and "delta" in like else {"text": ""}
    return {"index": index, **empty, "logprobs": None, "finish_reason": reason_of(output)}


def new_id(prefix: str) -> dict[str, Any]:
    """Returns the fields `id` and `created` of an answer."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time())}


def reason_of(output: Output) -> str:
    """Returns OpenAI's name of a finish reason."""
    names: dict[FinishReason, str] = {"end": "stop", "cancelled": "stop"}
    return names.get(output.finish_reason, output.finish_reason)


def usage_of(prompt_tokens: int, outputs: list[Output]) -> dict[str, Any]:
    """Returns token counts of an answer.

    prompt_tokens: of the prompts, each counted once.
    """
    new = sum(len(output.tokens) for output in outputs)
    cached = max((output.timings.reused_tokens for output in outputs), default=0)
    accepted = sum(output.timings.accepted_tokens for output in outputs)
    drafted = sum(output.timings.drafted_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def token_text(tokenizer: Tokenizer | None, token: int) -> tuple[str, list[int]]:
    """Returns a token's text, with U+FFFD for parts of characters, and its bytes."""
    if tokenizer is None:
        return f"<{token}>", []
    raw = tokenizer.token_bytes(token)
    return raw.decode(errors="replace"), list(raw)
