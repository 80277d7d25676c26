"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's API, without stored responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import Output
from . import bodies
from .answers import Answers
from .constraints import ResponseFormat, of_format, only
from .conversations import prompt_of, texts_of
from .errors import ApiError, json_response
from .events import PING, EventStream, event
from .generation import New, respond, submit, usage_of, with_answers
from .parameters import Parameters, check, check_number, refuse
from .service import Service


class Reasoning(msgspec.Struct, kw_only=True):
    """Options of reasoning models.

    Attributes:
      effort: variable `reasoning_effort` of the chat template.
    """

    effort: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """Options of the text."""

    format: ResponseFormat | None = None


#: Pairs of `metadata`, which answers repeat.
_MOST_METADATA = 16


class CreateResponse(msgspec.Struct, kw_only=True):
    """Body of a request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    user: str | None = None
    # Known, and refused where they would change the result.
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    text: TextFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    truncation: str | None = None

    @property
    def form(self) -> ResponseFormat | None:
        """The form of the text."""
        return None if self.text is None else self.text.format


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a conversation's prompt."""
    service: Service = request.app.state.service
    body, ignored = await bodies.read(request, CreateResponse, service.settings)
    service.check_model(body.model)
    prompt, _ = await _prompt_of(service, body)
    found = {"object": "response.input_tokens", "input_tokens": len(prompt)}
    return json_response(found, headers=bodies.listed(ignored))


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response | EventStream:
    """Answers a conversation, as a whole or as a stream."""
    body, ignored = await bodies.read(request, CreateResponse, service.settings)
    service.check_model(body.model)
    options: Any = {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
    parameters = Parameters(model=body.model, **options)
    check(parameters)
    prompt, stops = await _prompt_of(service, body)
    wanted = only(of_format("text.format", body.form))
    options = {"most": body.max_output_tokens, "stops": stops}
    await submit(service, answers, [prompt], parameters, wanted=wanted, **options)
    answer = _Answer(service, body, len(prompt))

    def whole(outputs: list[Output]) -> dict[str, Any]:
        return answer.whole(outputs[0])

    stream = answer.events(answers) if body.stream else None
    return await respond(request, service, answers, whole=whole, chunks=stream, ignored=ignored)


async def _prompt_of(service: Service, body: CreateResponse) -> tuple[list[int], tuple[str, ...]]:
    _check(body)
    if len(body.metadata or ()) > _MOST_METADATA:
        raise ApiError(400, f"metadata may have {_MOST_METADATA} pairs", param="metadata")
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = {} if effort is None else {"reasoning_effort": effort}
    return await prompt_of(service, _messages(body), variables, "input")


class _Answer:
    """One response, as a whole or as events."""

    def __init__(self, service: Service, body: CreateResponse, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._item = f"msg_{secrets.token_hex(12)}"
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name_of(body.model),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format_of(body.form)},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        self._number = -1

    def whole(self, output: Output) -> dict[str, Any]:
        """Returns the finished response."""
        is_cut = output.finish_reason == "length"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        usage = usage_of(self._prompt_tokens, [output], 1)
        item = self._message(output.text or "", "incomplete" if is_cut else "completed")
        return {
            **self._head,
            **details,
            "status": item["status"],
            "output": [item],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yields the events of a stream."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        empty = {**self._message("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=empty)
        yield self._event("response.content_part.added", **place, part=_part(""))
        async for news in answers.stream():
            if not news:
                yield PING
            for index, pieces in news:
                if text := New.of(index, pieces).text:
                    delta = {**place, "delta": text, "logprobs": []}
                    yield self._event("response.output_text.delta", **delta)
                if (output := pieces[-1].output) is None:
                    continue
                text, found = output.text or "", self.whole(output)
                done = {**place, "text": text, "logprobs": []}
                yield self._event("response.output_text.done", **done)
                yield self._event("response.content_part.done", **place, part=_part(text))
                (item,) = found["output"]
                yield self._event("response.output_item.done", output_index=0, item=item)
                yield self._event(f"response.{found['status']}", response=found)

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item,
            "status": status,
            "role": "assistant",
            "content": [_part(text)],
        }

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format_of(form: ResponseFormat | None) -> dict[str, Any]:
    """Returns the form of the text as answers repeat it."""
    fields = {"type": "text"} if form is None else msgspec.to_builtins(form)
    return {name: value for name, value in fields.items() if value is not None}


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") in ("input_text", "output_text")
        and isinstance(part.get("text"), str)
    )


def _check(body: CreateResponse) -> None:
    """Raises ApiError for parameters that are out of range or not supported."""
    check_number("max_output_tokens", body.max_output_tokens, 1)
    refuse("background", bool(body.background))
    refuse("conversation", body.conversation is not None)
    refuse("previous_response_id", body.previous_response_id is not None)
    refuse("prompt", body.prompt is not None)
    refuse("tools", bool(body.tools))
    refuse("tool_choice", body.tool_choice not in (None, "none", "auto"))
    refuse("truncation", body.truncation not in (None, "disabled"))


def _messages(body: CreateResponse) -> list[dict[str, Any]]:
    """Returns the input as messages of a chat; raises ApiError for items that are not messages."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        kind, content = item.get("type", "message"), item.get("content")
        if kind == "reasoning":
            continue
        parts = content if isinstance(content, list) else []
        if kind != "message" or not all(map(_is_text, parts)):
            problem = f"input[{i}] must be a message of texts"
            raise ApiError(400, problem, param="input", code="unsupported_parameter")
        found.append({"role": item.get("role"), "content": "".join(texts_of(content))})
    return found
