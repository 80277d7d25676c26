"""POST /v1/chat/completions and /v1/chat/completions/input_tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from ..chat.output import Message, message_of
from ..engine.outputs import Output, TokenLogprobs
from ..tokenizer import Tokenizer
from . import bodies
from .answers import Answers
from .conversations import prompt_of
from .errors import ApiError, json_response
from .events import EventStream
from .formats import Format, assistant_of, deltas_of
from .generation import (
    Form,
    New,
    chunks_of,
    finite,
    new_id,
    prompt_logprobs_of,
    reason_of,
    respond,
    submit,
    timings_of,
    token_ids,
    token_text,
    usage_of,
    with_answers,
)
from .parameters import (
    MOST_LOGPROBS,
    Parameters,
    check,
    check_number,
    check_prompt_logprobs,
    refuse,
    wanted_of,
)
from .service import Service
from .tools import Tools, tools_of


class ChatCompletion(Parameters, kw_only=True):
    """Body of a chat completion."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    include_reasoning: bool | None = None
    thinking_budget_tokens: int | None = None
    # Known, and refused where they would change the result.
    modalities: list[str] | None = None


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a conversation's prompt."""
    service: Service = request.app.state.service
    body, ignored = await bodies.read(request, ChatCompletion, service.settings)
    service.check_model(body.model)
    _check(body)
    prompt, _ = await _prompt_of(service, body, _tools_of(body))
    return json_response({"input_tokens": len(prompt)}, headers=bodies.listed(ignored))


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response | EventStream:
    """Answers a conversation, as a whole or as a stream."""
    body, ignored = await bodies.read(request, ChatCompletion, service.settings)
    service.check_model(body.model)
    check(body)
    most = _check(body)
    tools = _tools_of(body)
    prompt, stops = await _prompt_of(service, body, tools)
    tokenizer = service.tokenizer()
    form = Format.of(service, prompt, tools, splits=body.reasoning_format != "none")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = await form.wanted(service, wanted_of(body), body.thinking_budget_tokens)
    options: Any = {"most": most, "logprobs": logprobs, "stops": stops, "spelled": form.spelled}
    options["prompt_logprobs"] = body.prompt_logprobs
    await submit(service, answers, [prompt], body, wanted=wanted, **options)
    head = {**new_id("chatcmpl"), "model": service.name_of(body.model)}
    ids = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    readers = [form.reader() for _ in range(answers.count)]
    hides = body.include_reasoning is False

    def reasoning() -> int:
        return sum(reader.reasoning_tokens for reader in readers)

    def reason(answer: int, output: Output) -> str:
        found = reason_of(output)
        return "tool_calls" if readers[answer].calls and found == "stop" else found

    def whole(outputs: list[Output]) -> dict[str, Any]:
        events = [
            reader.read(pieces) for reader, pieces in zip(readers, answers.pieces(), strict=True)
        ]
        choices = [
            {
                "index": i,
                "message": assistant_of(_shown(message_of(events[i]), hides)),
                "logprobs": _logprobs(tokenizer, output.tokens, output.logprobs),
                "finish_reason": reason(i, output),
                **token_ids(body, output.tokens),
            }
            for i, output in enumerate(outputs)
        ]
        usage = usage_of(len(prompt), outputs, body.answers, reasoning())
        timings = timings_of(outputs, body.answers)
        found = {"choices": choices, "usage": usage, "timings": timings}
        scores = prompt_logprobs_of(tokenizer, prompt, outputs[0], body.prompt_logprobs)
        return {**head, "object": "chat.completion", **found, **ids, **scores}

    def choices(new: New) -> list[dict[str, Any]]:
        reader = readers[new.answer]
        deltas = deltas_of(reader.read(new.pieces))
        if hides:
            deltas = [delta for delta in deltas if "reasoning_content" not in delta]
        if reader.is_done:
            answers.end(new.answer)
        if not deltas and (new.logprobs or (body.return_token_ids and new.tokens)):
            deltas = [{"content": ""}]  # their text is held back, or dropped
        found: list[dict[str, Any]] = [{"delta": delta} for delta in deltas]
        if found:
            logprobs = _logprobs(tokenizer, new.tokens, new.logprobs)
            found[0] |= {"logprobs": logprobs, **token_ids(body, new.tokens)}
        return found

    chunks = None
    if body.stream:
        first = {"delta": {"role": "assistant", "content": ""}}
        head |= {"object": "chat.completion.chunk"}
        chunk = Form(head, lambda _: first, choices, {"delta": {}}, ids, reason, reasoning)
        chunks = chunks_of(answers, chunk, body, len(prompt))
    return await respond(request, service, answers, whole=whole, chunks=chunks, ignored=ignored)


async def _prompt_of(
    service: Service, body: ChatCompletion, tools: Tools | None
) -> tuple[list[int], tuple[str, ...]]:
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other"
        raise ApiError(400, problem, param="continue_final_message")
    options: dict[str, Any] = {"tools": tools, "continues": continues}
    return await prompt_of(service, body.messages, _variables(body), **options)


def _tools_of(body: ChatCompletion) -> Tools | None:
    return tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)


def _shown(answer: Message, hides: bool) -> Message:
    """Returns an answer, without its thought if that is hidden."""
    return dataclasses.replace(answer, reasoning="") if hides else answer


def _variables(body: ChatCompletion) -> dict[str, Any]:
    """Returns variables of the chat template."""
    found = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        found["reasoning_effort"] = body.reasoning_effort
    if body.add_generation_prompt is not None:
        found["add_generation_prompt"] = body.add_generation_prompt
    return found


def _check(body: ChatCompletion) -> int | None:
    """Returns the maximum new tokens; raises ApiError for parameters of chats."""
    refuse("modalities", body.modalities not in (None, ["text"]))
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    check_number("top_logprobs", body.top_logprobs, 0, MOST_LOGPROBS)
    check_prompt_logprobs(body.prompt_logprobs, body.stream)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_number("max_tokens", most, 1)
    return most


def _logprobs(
    tokenizer: Tokenizer, tokens: list[int], logprobs: list[TokenLogprobs] | None
) -> dict[str, Any] | None:
    if logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    content = [
        {**entry(token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]}
        for token, one in zip(tokens, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}
