"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's API, without stored responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..chat.output import Content
from ..engine.outputs import Output, Piece
from . import bodies
from .answers import Answers
from .constraints import ResponseFormat, of_format, only
from .conversations import prompt_of
from .errors import ApiError, json_response
from .events import PING, EventStream, event
from .formats import Format
from .generation import respond, submit, usage_of, with_answers
from .parameters import Parameters, check, check_number, refuse
from .response_items import Items, chat_tools, messages_of
from .service import Service
from .tools import Tools, tools_of


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
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Known, and refused where they would change the result.
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    text: TextFormat | None = None
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
    prompt, _ = await _prompt_of(service, body, _tools_of(body))
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
    tools = _tools_of(body)
    prompt, stops = await _prompt_of(service, body, tools)
    form = Format.of(service, prompt, tools)
    wanted = await form.wanted(service, only(of_format("text.format", body.form)))
    options = {"most": body.max_output_tokens, "stops": stops, "spelled": form.spelled}
    await submit(service, answers, [prompt], parameters, wanted=wanted, **options)
    answer = _Answer(service, body, form, len(prompt))

    def whole(outputs: list[Output]) -> dict[str, Any]:
        (pieces,) = answers.pieces()
        list(answer.add(pieces))
        return answer.whole(outputs[0])

    stream = answer.events(answers) if body.stream else None
    return await respond(request, service, answers, whole=whole, chunks=stream, ignored=ignored)


async def _prompt_of(
    service: Service, body: CreateResponse, tools: Tools | None
) -> tuple[list[int], tuple[str, ...]]:
    _check(body)
    if len(body.metadata or ()) > _MOST_METADATA:
        raise ApiError(400, f"metadata may have {_MOST_METADATA} pairs", param="metadata")
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = {} if effort is None else {"reasoning_effort": effort}
    return await prompt_of(service, _messages(body), variables, "input", tools=tools)


def _tools_of(body: CreateResponse) -> Tools | None:
    return tools_of(chat_tools(body.tools), body.tool_choice, body.parallel_tool_calls)


class _Answer:
    """One response, as a whole or as events."""

    def __init__(
        self, service: Service, body: CreateResponse, form: Format, prompt_tokens: int
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._reader, self._items = form.reader(), Items(self._event)
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format_of(body.form)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        self._number = -1

    def add(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Adds pieces of the answer; yields the events of its items."""
        yield from self._items.add(self._reader.read(pieces))
        if (output := pieces[-1].output) is not None:
            if not self._items.done and not self._reader.has_begun:
                yield from self._items.add([Content("")])
            is_cut = output.finish_reason == "length"
            yield from self._items.finish("incomplete" if is_cut else "completed")

    def whole(self, output: Output) -> dict[str, Any]:
        """Returns the finished response."""
        is_cut = output.finish_reason == "length"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        usage = usage_of(self._prompt_tokens, [output], 1, self._reader.reasoning_tokens)
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            **self._head,
            **details,
            "status": "incomplete" if is_cut else "completed",
            "output": self._items.done,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yields the events of a stream."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        async for news in answers.stream():
            if not news:
                yield PING
            for index, pieces in news:
                for one in self.add(pieces):
                    yield one
                if self._reader.is_done:
                    answers.end(index)
                if (output := pieces[-1].output) is not None:
                    found = self.whole(output)
                    yield self._event(f"response.{found['status']}", response=found)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)


def _format_of(form: ResponseFormat | None) -> dict[str, Any]:
    """Returns the form of the text as answers repeat it."""
    fields = {"type": "text"} if form is None else msgspec.to_builtins(form)
    return {name: value for name, value in fields.items() if value is not None}


def _check(body: CreateResponse) -> None:
    """Raises ApiError for parameters that are out of range or not supported."""
    check_number("max_output_tokens", body.max_output_tokens, 1)
    refuse("background", bool(body.background))
    refuse("conversation", body.conversation is not None)
    refuse("previous_response_id", body.previous_response_id is not None)
    refuse("prompt", body.prompt is not None)
    refuse("truncation", body.truncation not in (None, "disabled"))


def _messages(body: CreateResponse) -> list[dict[str, Any]]:
    """Returns the input as messages of a chat; raises ApiError."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    return [*found, *messages_of(body.input)]
