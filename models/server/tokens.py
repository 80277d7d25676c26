"""POST /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..chat.transcript import text_of
from . import bodies
from .conversations import rendered
from .errors import ApiError, json_response
from .generation import check_length
from .service import Service


class Tokenize(msgspec.Struct, kw_only=True):
    """Body of /tokenize, with llama.cpp's names.

    Attributes:
      content, prompt: the text, under llama.cpp's and vLLM's name.
      add_special: whether tokens such as BOS are added.
      parse_special: whether texts of control tokens become these tokens.
      with_pieces: whether tokens are `{id, piece}`; a piece is a text, or bytes that are not UTF-8.
    """

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]


class ApplyTemplate(msgspec.Struct, kw_only=True):
    """Body of /apply-template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text."""
    service: Service = request.app.state.service
    body, ignored = await bodies.read(request, Tokenize, service.settings)
    text = body.content if body.prompt is None else body.prompt
    if text is None:
        raise ApiError(400, "content is missing", param="content")
    check_length(service, [text], "content")
    tokenizer, special, parse = service.tokenizer(), body.add_special, body.parse_special
    tokens = await asyncio.to_thread(
        lambda: tokenizer.encode(text, add_special=special, parse_special=parse)
    )
    found: list[Any] = tokens
    if body.with_pieces:
        found = [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in tokens]
    answer = {"tokens": found, "count": len(tokens)}
    return json_response(answer, headers=bodies.listed(ignored))


async def detokenize(request: Request) -> Response:
    """Returns the text of token ids."""
    service: Service = request.app.state.service
    body, ignored = await bodies.read(request, Detokenize, service.settings)
    tokenizer, most = service.tokenizer(), service.ready().model.config.context_length
    if len(body.tokens) > most:
        raise ApiError(
            400, f"tokens has {len(body.tokens)} ids; {most} are possible", param="tokens"
        )
    try:
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
    except (ValueError, TypeError, IndexError) as error:
        raise ApiError(400, str(error), param="tokens") from None
    return json_response({"content": text}, headers=bodies.listed(ignored))


async def apply_template(request: Request) -> Response:
    """Returns a conversation's prompt as text."""
    service: Service = request.app.state.service
    body, ignored = await bodies.read(request, ApplyTemplate, service.settings)
    render = functools.partial(text_of, tools=body.tools)
    variables = {"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs}
    text = await rendered(service, render, body.messages, variables)
    return json_response({"prompt": text}, headers=bodies.listed(ignored))


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
