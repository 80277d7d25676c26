"""Shared code of chat and text completions: submitted prompts, usage, streams."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

import jax_q4k

from ..engine.outputs import FinishReason, Output, Piece, TokenLogprobs
from ..tokenizer import Tokenizer
from .answers import Answers, while_connected
from .bodies import listed
from .constraints import Wanted, compile
from .errors import ApiError, json_response, late
from .events import DONE, PING, EventStream, error_event, event
from .parameters import Parameters, samplings_of
from .service import Service


class New(NamedTuple):
    """New part of an answer.

    Attributes:
      answer: its index.
      text, tokens: what is new; `tokens` are those that `logprobs` belong to.
      logprobs: None unless requested.
      pieces: the engine's pieces.
    """

    answer: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    pieces: list[Piece]

    @staticmethod
    def of(index: int, pieces: list[Piece]) -> New:
        known = [piece for piece in pieces if piece.token is not None]
        entries = [piece.logprobs for piece in known if piece.logprobs is not None]
        tokens = [piece.token for piece in known if piece.token is not None]
        text = "".join(piece.text for piece in pieces)
        return New(index, text, tokens, entries or None, pieces)


class Form(NamedTuple):
    """Form of a stream's chunks.

    Attributes:
      head: fields of every chunk.
      opening: further fields of the first chunk.
      first: function from an answer's index to the fields of its first chunk; None without one.
      choices: makes chunks' fields of what is new.
      last: fields of the choice that has the finish reason.
      reason: returns the finish reason of an answer and its output.
      reasoning: returns the number of tokens of thoughts so far.
    """

    head: dict[str, Any]
    first: Callable[[int], dict[str, Any]] | None
    choices: Callable[[New], list[dict[str, Any]]]
    last: dict[str, Any]
    opening: dict[str, Any] = {}
    reason: Callable[[int, Output], str] = lambda _, output: reason_of(output)
    reasoning: Callable[[], int] = lambda: 0


async def submit(
    service: Service,
    answers: Answers,
    prompts: list[list[int]],
    parameters: Parameters,
    *,
    wanted: Wanted | None,
    most: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    stops: tuple[str, ...] = (),
    spelled: tuple[str, ...] = (),
) -> None:
    """Submits `n` answers to each prompt, which share its pages.

    wanted: their constraint, which is compiled first, in a thread. most: maximum new tokens; None
    means what the context has room for. logprobs, prompt_logprobs: number of most likely tokens to
    report for each new token, and for each of the prompt; None means no log-probabilities. spelled:
    control tokens that are part of the texts. Raises ApiError.
    """
    constraint = await compile(service, wanted)
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
            prompt_logprobs=prompt_logprobs,
            stops=stops,
            constraint=constraint,
            spelled=spelled,
        )
        rows += [prompt] * len(new)
        samplings += new
    adapter = service.adapter_of(parameters.model)
    options: dict[str, Any] = {"priority": parameters.priority or 0, "adapter": adapter}
    options["drafts"] = parameters.drafts != 0
    answers.submit(rows, samplings, cache_salt=parameters.cache_salt or "", **options)


def check_length(service: Service, texts: Sequence[str], name: str) -> None:
    """Raises ApiError for texts that together exceed the context, without tokenizing them."""
    characters = sum(map(len, texts))
    most = service.most_bytes
    if characters > most or sum(len(text.encode(errors="replace")) for text in texts) > most:
        context = service.ready().stats().max_context
        message = f"{name} has {characters} characters, too many for a context of {context} tokens"
        raise ApiError(400, message, param=name, code="context_length_exceeded")


def with_answers(
    create: Callable[[Request, Service, Answers], Awaitable[Response | EventStream]],
) -> Callable[[Request], Awaitable[Response | EventStream]]:
    """Makes an endpoint of a function that takes Answers; closes them if the response is whole."""

    @functools.wraps(create)
    async def endpoint(request: Request) -> Response | EventStream:
        service: Service = request.app.state.service
        answers, streams = Answers(service), False
        try:
            found = await create(request, service, answers)
            streams = isinstance(found, EventStream)
            return found
        finally:
            if not streams:
                answers.close()

    return endpoint


async def respond(
    request: Request,
    service: Service,
    answers: Answers,
    *,
    whole: Callable[[list[Output]], dict[str, Any]],
    chunks: AsyncIterator[bytes] | None,
    ignored: list[str],
    error_event: Callable[[ApiError], bytes] = error_event,
) -> Response | EventStream:
    """Returns the response: a stream of `chunks`, or what `whole` makes of the outputs.

    ignored: names in the body that the server does not know. error_event: event of an error in a
    stream. Raises ApiError. ClientDisconnect: the client left.
    """
    settings = service.settings
    headers = {"jax-q4k-seed": str(answers.seed), **listed(ignored)}
    if chunks is not None:
        return EventStream(
            answers,
            chunks,
            seconds=settings.seconds,
            headers=headers,
            error_event=error_event,
        )
    try:
        async with asyncio.timeout(settings.seconds):
            outputs = await while_connected(request.receive, answers.outputs())
    except TimeoutError:
        raise late(settings.seconds) from None
    return json_response(whole(outputs), headers=headers)


async def chunks_of(
    answers: Answers, form: Form, parameters: Parameters, prompt_tokens: int
) -> AsyncIterator[bytes]:
    """Yields the events of a stream; prompt_tokens: of all prompts."""
    options = parameters.stream_options
    has_usage = bool(options and options.include_usage)

    def chunk(
        index: int, fields: dict[str, Any], output: Output | None = None, **others: Any
    ) -> bytes:
        reason = None if output is None else form.reason(index, output)
        choice = {"index": index, "logprobs": None, **fields, "finish_reason": reason}
        if has_usage:
            others["usage"] = None
        if output is not None:
            others["timings"] = timings_of([output])
        return event({**form.head, "choices": [choice], **others})

    outputs: list[Output | None] = [None] * answers.count
    opening = form.opening
    if form.first is not None:
        for index in range(answers.count):
            yield chunk(index, form.first(index), **opening)
            opening = {}
    async for news in answers.stream():
        if not news:
            yield PING
        for index, pieces in news:
            new = New.of(index, pieces)
            for fields in form.choices(new):
                yield chunk(index, fields)
            if (output := pieces[-1].output) is not None:
                outputs[index] = output
                yield chunk(index, form.last, output)
    if has_usage:
        found = [output for output in outputs if output is not None]
        reasoning = form.reasoning()
        usage = usage_of(prompt_tokens, found, parameters.answers, reasoning)
        timings = timings_of(found, parameters.answers)
        yield event({**form.head, "choices": [], "usage": usage, "timings": timings})
    yield DONE


def token_ids(parameters: Parameters, tokens: list[int]) -> dict[str, Any]:
    """Returns a choice's field of token ids, if the request asks for it."""
    return {"token_ids": tokens} if parameters.return_token_ids else {}


def new_id(prefix: str) -> dict[str, Any]:
    """Returns the fields of an answer that say which one it is, and which version made it."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "system_fingerprint": f"jax-q4k-{jax_q4k.__version__}",
    }


def reason_of(output: Output) -> str:
    """Returns OpenAI's name of a finish reason."""
    names: dict[FinishReason, str] = {"end": "stop", "cancelled": "stop"}
    return names.get(output.finish_reason, output.finish_reason)


def usage_of(
    prompt_tokens: int, outputs: list[Output], answers: int, reasoning: int = 0
) -> dict[str, Any]:
    """Returns token counts of a request.

    prompt_tokens: of the prompts, each counted once. answers: outputs for each prompt; the first of
    these tells what was cached. reasoning: tokens of thoughts.
    """
    new = sum(len(output.tokens) for output in outputs)
    cached = sum(output.timings.reused_tokens for output in outputs[::answers])
    accepted = sum(output.timings.accepted_tokens for output in outputs)
    drafted = sum(output.timings.drafted_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings_of(outputs: list[Output], answers: int = 1) -> dict[str, float]:
    """Returns times of a request under llama.cpp's names, in milliseconds.

    `prompt_ms` ends at the first new token and includes the wait for a row; `predicted_ms` is the
    time after it, and its rates leave that token out. Several outputs count together, with the
    longest times. answers: outputs for each prompt.
    """
    timings = [output.timings for output in outputs]
    cached = sum(one.reused_tokens for one in timings[::answers])
    prompt = sum(one.prompt_tokens for one in timings[::answers]) - cached
    first, decode = (
        max(getattr(one, name) for one in timings) for name in ("first_token", "decode")
    )
    decoded = sum(one.decoded_tokens for one in timings)
    drafted = sum(one.drafted_tokens for one in timings)
    found = {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": 1e3 * first,
        "prompt_per_token_ms": 1e3 * _ratio(first, prompt),
        "prompt_per_second": _ratio(prompt, first),
        "predicted_n": sum(one.new_tokens for one in timings),
        "predicted_ms": 1e3 * decode,
        "predicted_per_token_ms": 1e3 * _ratio(decode, decoded),
        "predicted_per_second": _ratio(decoded, decode),
    }
    if drafted:
        found["draft_n"] = drafted
        found["draft_n_accepted"] = sum(one.accepted_tokens for one in timings)
    return found


def _ratio(value: float, of: float) -> float:
    return value / of if of else 0.0


def prompt_logprobs_of(
    tokenizer: Tokenizer | None, prompt: list[int], output: Output, top: int | None
) -> dict[str, Any]:
    """Returns vLLM's field of the log-probabilities of a prompt's tokens, with `top` others each.

    top: None means that the request does not ask for them.
    """
    if top is None:
        return {}

    def entry(token: int, logprob: float, rank: int | None) -> tuple[str, dict[str, Any]]:
        text = token_text(tokenizer, token)[0]
        return str(token), {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def entries(token: int, one: TokenLogprobs | None) -> dict[str, Any] | None:
        if one is None:
            return None
        likeliest = (entry(*pair, rank) for rank, pair in enumerate(one.top[:top], 1))
        return dict([entry(token, one.logprob, one.rank), *likeliest])

    each = zip(prompt, output.prompt_logprobs or (), strict=True)
    return {"prompt_logprobs": [entries(*pair) for pair in each]}


def finite(logprob: float) -> float:
    """Returns a log-probability as a number of JSON; OpenAI's API has -9999 instead of -inf."""
    return max(logprob, -9999.0)


def token_text(tokenizer: Tokenizer | None, token: int) -> tuple[str, list[int]]:
    """Returns a token's text, with U+FFFD for parts of characters, and its bytes."""
    if tokenizer is None:
        return f"<{token}>", []
    raw = tokenizer.token_bytes(token)
    return raw.decode(errors="replace"), list(raw)
