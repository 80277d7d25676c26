"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import Output, TokenLogprobs
from . import bodies
from .answers import Answers
from .errors import ApiError
from .events import EventStream
from .generation import (
    Form,
    New,
    check_length,
    chunks_of,
    finite,
    new_id,
    reason_of,
    respond,
    submit,
    timings_of,
    token_ids,
    token_text,
    usage_of,
    with_answers,
)
from .parameters import MOST_LOGPROBS, Parameters, check, check_number, refuse, wanted_of
from .service import Service

#: Most prompts of a request, and the tokens of an answer if it does not say.
MOST_PROMPTS, DEFAULT_TOKENS = 64, 16


class Completion(Parameters, kw_only=True):
    """Body of a text completion."""

    prompt: str | list[Any]  # a text, texts, ids, or lists of ids
    logprobs: int | None = None
    echo: bool | None = None
    # Known, and refused where they would change the result.
    suffix: str | None = None
    prompt_logprobs: int | None = None


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response | EventStream:
    """Continues one or several prompts, as a whole or as a stream."""
    body, ignored = await bodies.read(request, Completion, service.settings)
    service.check_model(body.model)
    check(body)
    refuse("echo with logprobs", bool(body.echo) and body.logprobs is not None)
    refuse("suffix", bool(body.suffix))
    refuse("prompt_logprobs", body.prompt_logprobs is not None)
    check_number("logprobs", body.logprobs, 0, MOST_LOGPROBS)
    check_number("max_tokens", body.max_tokens, 1)
    prompts = await prompts_of(service, body.prompt)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    options: Any = {"most": most, "logprobs": body.logprobs}
    await submit(service, answers, prompts, body, wanted=wanted_of(body), **options)
    total = sum(map(len, prompts))
    head = {**new_id("cmpl"), "object": "text_completion", "model": service.name_of(body.model)}
    lengths: dict[int, int] = {}  # characters of each answer so far

    echoed = await _echoed(service, body)

    def ids(answer: int) -> dict[str, Any]:
        prompt = prompts[answer // body.answers]
        return {"prompt_token_ids": prompt} if body.return_token_ids else {}

    def first(answer: int) -> dict[str, Any]:
        return {"text": echoed[answer // body.answers]} | ids(answer)

    def choices(new: New) -> list[dict[str, Any]]:
        if not (new.text or new.logprobs or (body.return_token_ids and new.tokens)):
            return []
        before = lengths.get(new.answer, 0)
        lengths[new.answer] = before + len(new.text)
        found = _logprobs(service, new.tokens, new.logprobs, before)
        return [{"text": new.text, "logprobs": found} | token_ids(body, new.tokens)]

    def whole(outputs: list[Output]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "text": echoed[i // body.answers] + (output.text or ""),
                "logprobs": _logprobs(service, output.tokens, output.logprobs, 0),
                "finish_reason": reason_of(output),
                **ids(i),
                **token_ids(body, output.tokens),
            }
            for i, output in enumerate(outputs)
        ]
        usage = usage_of(total, outputs, body.answers)
        timings = timings_of(outputs, body.answers)
        return {**head, "choices": choices, "usage": usage, "timings": timings}

    chunks = None
    if body.stream:
        begins = first if body.echo or body.return_token_ids else None
        chunks = chunks_of(answers, Form(head, begins, choices, {"text": ""}), body, total)
    return await respond(request, service, answers, whole=whole, chunks=chunks, ignored=ignored)


async def _echoed(service: Service, body: Completion) -> list[str]:
    """Returns each prompt's text if it is to be part of the answers; else empty texts."""
    rows = _rows_of(body.prompt)
    if not body.echo:
        return [""] * len(rows)
    tokenizer = service.tokenizer()

    def texts() -> list[str]:
        return [row if isinstance(row, str) else tokenizer.decode(row) for row in rows]

    return await asyncio.to_thread(texts)


def _rows_of(prompt: str | list[Any]) -> list[Any]:
    """Returns the prompts in a parameter that has one or several, each a text or ids."""
    is_one = isinstance(prompt, str) or (bool(prompt) and type(prompt[0]) is int)
    return [prompt] if is_one else prompt  # type: ignore[return-value]


async def prompts_of(
    service: Service, prompt: str | list[Any], name: str = "prompt", *, add_end: bool = False
) -> list[list[int]]:
    """Returns the token ids of each prompt; raises ApiError, about parameter `name`.

    add_end: whether texts get the end token that the model's file asks for.
    """
    rows = _rows_of(prompt)
    if not rows:
        raise ApiError(400, f"{name} is empty", param=name)
    if len(rows) > MOST_PROMPTS:
        raise ApiError(400, f"{name} may have {MOST_PROMPTS} texts at most", param=name)
    config = service.ready().model.config
    for row in rows:
        if isinstance(row, list) and len(row) > config.context_length:  # before looking at each
            problem = f"{name} has {len(row)} tokens; the context length is {config.context_length}"
            raise ApiError(400, problem, param=name, code="context_length_exceeded")
    if not all(isinstance(row, str) or _are_ids(row) for row in rows):
        problem = f"{name} must be a text, a list of texts, token ids, or a list of lists of these"
        raise ApiError(400, problem, param=name)
    vocab = config.vocab_size
    for row in rows:
        if isinstance(row, str):
            check_length(service, [row], name)
        elif wrong := [token for token in row if not 0 <= token < vocab]:
            problem = f"{name} has the id {wrong[0]}; ids must be 0 to {vocab - 1}"
            raise ApiError(400, problem, param=name)

    def ids_of(row: Any) -> list[int]:
        return service.tokenizer().encode(row, add_end=add_end) if isinstance(row, str) else row

    def encoded() -> list[list[int]]:
        return [ids_of(row) for row in rows]

    try:
        found = await asyncio.to_thread(encoded)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param=name) from None
    if not all(found):
        raise ApiError(400, f"{name} has a text without tokens", param=name)
    return found


def _are_ids(row: Any) -> bool:
    return isinstance(row, list) and all(type(one) is int for one in row)


def _logprobs(
    service: Service, tokens: list[int], logprobs: list[TokenLogprobs] | None, offset: int
) -> dict[str, Any] | None:
    """Returns log-probabilities; offset: characters of the text before these tokens."""
    if logprobs is None:
        return None
    tokenizer = service.ready().model.tokenizer
    texts = [token_text(tokenizer, token)[0] for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [
            {token_text(tokenizer, token)[0]: finite(value) for token, value in one.top}
            for one in logprobs
        ],
        "text_offset": offsets,
    }
