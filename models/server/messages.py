"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..chat.output import Content
from ..engine.outputs import Output, Piece
from . import bodies
from .answers import Answers
from .constraints import ResponseFormat, Wanted, of_format, only
from .conversations import prompt_of
from .errors import ApiError, json_response
from .events import EventStream, event
from .formats import Format
from .generation import respond, submit, usage_of, with_answers
from .message_blocks import ContentBlocks, chat_choice, chat_tools, messages_of
from .parameters import Parameters, check, check_number
from .service import Service
from .tools import Tools, tools_of


class Thinking(msgspec.Struct, kw_only=True):
    """Options of thoughts.

    Attributes:
      type: "enabled", "adaptive" or "disabled"; the template's variable `enable_thinking`.
      budget_tokens: most tokens of a thought.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Thinking | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Options of the answer.

    Attributes:
      format: its form.
    """

    format: ResponseFormat | None = None


class Message(Conversation, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None  # its earlier name

    @property
    def parameters(self) -> Parameters:
        return Parameters(
            model=self.model,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop_sequences,
        )

    @property
    def wanted(self) -> Wanted | None:
        """The constraint that it asks for."""
        config = self.output_config or OutputConfig()
        return only(
            of_format("output_config.format", config.format)
            + of_format("output_format", self.output_format)
        )


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a conversation's prompt."""
    service: Service = request.app.state.service
    body, ignored = await bodies.read(request, Conversation, service.settings)
    service.check_model(body.model)
    prompt, _ = await _prompt_of(service, body, _tools_of(body))
    return json_response({"input_tokens": len(prompt)}, headers=bodies.listed(ignored))


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response | EventStream:
    """Answers a conversation, as a whole or as a stream."""
    body, ignored = await bodies.read(request, Message, service.settings)
    service.check_model(body.model)
    parameters = body.parameters
    check(parameters)
    check_number("max_tokens", body.max_tokens, 1)
    tools = _tools_of(body)
    prompt, stops = await _prompt_of(service, body, tools)
    form = Format.of(service, prompt, tools)
    budget = None if body.thinking is None else body.thinking.budget_tokens
    wanted = await form.wanted(service, body.wanted, budget)
    options: Any = {"most": body.max_tokens, "stops": stops, "spelled": form.spelled}
    await submit(service, answers, [prompt], parameters, wanted=wanted, **options)
    reader, blocks = form.reader(), ContentBlocks(_event)
    head = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": service.name_of(body.model),
    }

    def added(pieces: Sequence[Piece]) -> Iterator[bytes]:
        yield from blocks.add(reader.read(pieces))
        if pieces[-1].output is not None:
            if not reader.has_begun:
                yield from blocks.add([Content("")])
            yield from blocks.finish("completed")

    def end_of(output: Output) -> dict[str, Any]:
        found = _end_of(output, body.stop_sequences)
        is_call = reader.calls and found["stop_reason"] == "end_turn"
        return found | {"stop_reason": "tool_use"} if is_call else found

    def whole(outputs: list[Output]) -> dict[str, Any]:
        (output,), (pieces,) = outputs, answers.pieces()
        list(added(pieces))
        usage = _usage(len(prompt), output)
        return {**head, "content": blocks.done, **end_of(output), "usage": usage}

    async def chunks() -> AsyncIterator[bytes]:
        # What is cached is known later; the last event has the right counts.
        cached = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        usage = {"input_tokens": len(prompt), **cached, "output_tokens": 0}
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _event("message_start", message={**head, **empty})
        async for news in answers.stream():
            if not news:
                yield _event("ping")
            for index, pieces in news:
                for one in added(pieces):
                    yield one
                if reader.is_done:
                    answers.end(index)
                if (output := pieces[-1].output) is not None:
                    usage = _usage(len(prompt), output)
                    yield _event("message_delta", delta=end_of(output), usage=usage)
        yield _event("message_stop")

    stream = chunks() if body.stream else None
    options = {"ignored": ignored, "error_event": _error_event}
    return await respond(request, service, answers, whole=whole, chunks=stream, **options)


async def _prompt_of(
    service: Service, body: Conversation, tools: Tools | None
) -> tuple[list[int], tuple[str, ...]]:
    system = [] if not body.system else [{"role": "system", "content": body.system}]
    messages = [*system, *messages_of(body.messages)]
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and "tool_calls" not in last
    variables = (
        {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    )
    return await prompt_of(service, messages, variables, tools=tools, continues=continues)


def _tools_of(body: Conversation) -> Tools | None:
    return tools_of(chat_tools(body.tools), *chat_choice(body.tool_choice))


def _end_of(output: Output, stops: list[str] | None) -> dict[str, Any]:
    """Returns why an answer ended, and which of the request's stop strings did it."""
    stop = output.stop if output.stop in (stops or ()) else None
    reason = {"length": "max_tokens"}.get(output.finish_reason, "end_turn")
    return {"stop_reason": reason if stop is None else "stop_sequence", "stop_sequence": stop}


def _usage(prompt_tokens: int, output: Output) -> dict[str, int]:
    usage = usage_of(prompt_tokens, [output], 1)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _error_event(error: ApiError) -> bytes:
    return event(error.anthropic_body, "error")


def _event(name: str, /, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
