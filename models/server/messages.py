"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import Output
from . import bodies
from .answers import Answers
from .constraints import ResponseFormat, Wanted, of_format, only
from .conversations import prompt_of
from .errors import ApiError, json_response
from .events import EventStream, event
from .generation import New, respond, submit, usage_of, with_answers
from .parameters import Parameters, check, check_number, refuse
from .service import Service


class Conversation(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    # Known, and refused where they would change the result.
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None


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
    prompt, _ = await _prompt_of(service, body)
    return json_response({"input_tokens": len(prompt)}, headers=bodies.listed(ignored))


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response | EventStream:
    """Answers a conversation, as a whole or as a stream."""
    body, ignored = await bodies.read(request, Message, service.settings)
    service.check_model(body.model)
    parameters = body.parameters
    check(parameters)
    check_number("max_tokens", body.max_tokens, 1)
    prompt, stops = await _prompt_of(service, body)
    options: Any = {"most": body.max_tokens, "stops": stops}
    await submit(service, answers, [prompt], parameters, wanted=body.wanted, **options)
    head = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": service.name_of(body.model),
    }

    def whole(outputs: list[Output]) -> dict[str, Any]:
        (output,) = outputs
        content = [{"type": "text", "text": output.text}]
        end = _end_of(output, body.stop_sequences)
        return {**head, "content": content, **end, "usage": _usage(len(prompt), output)}

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
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        async for news in answers.stream():
            if not news:
                yield _event("ping")
            for index, pieces in news:
                if text := New.of(index, pieces).text:
                    delta = {"type": "text_delta", "text": text}
                    yield _event("content_block_delta", index=0, delta=delta)
                if (output := pieces[-1].output) is not None:
                    yield _event("content_block_stop", index=0)
                    end = _end_of(output, body.stop_sequences)
                    yield _event("message_delta", delta=end, usage=_usage(len(prompt), output))
        yield _event("message_stop")

    stream = chunks() if body.stream else None
    options = {"ignored": ignored, "error_event": _error_event}
    return await respond(request, service, answers, whole=whole, chunks=stream, **options)


async def _prompt_of(service: Service, body: Conversation) -> tuple[list[int], tuple[str, ...]]:
    refuse("tools", bool(body.tools))
    refuse("tool_choice", body.tool_choice not in (None, {"type": "auto"}, {"type": "none"}))
    refuse("thinking", body.thinking not in (None, {"type": "disabled"}))
    system = [] if not body.system else [{"role": "system", "content": body.system}]
    messages = [*system, *body.messages]
    continues = bool(messages) and messages[-1].get("role") == "assistant"
    return await prompt_of(service, messages, {}, continues=continues)


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


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
