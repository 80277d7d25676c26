"""Renders a conversation's prompt, for all routes that take messages."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..chat import ChatTemplateError, Limits, transcript
from ..chat.output import check_history
from ..tokenizer import Tokenizer
from .errors import ApiError, unavailable
from .generation import check_length
from .service import Service
from .settings import RESERVED
from .tools import Tools

T = TypeVar("T")

logger = logging.getLogger("jax_q4k.server")


async def prompt_of(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    name: str = "messages",
    *,
    tools: Tools | None = None,
    continues: bool = False,
) -> tuple[list[int], tuple[str, ...]]:
    """Returns the prompt's token ids, and stop strings that the model's format needs.

    variables: of the chat template. name: of the parameter that has the messages. continues:
    whether the answer continues the last message. Raises ApiError.
    """
    if not messages:
        raise ApiError(400, f"{name} is empty", param=name)
    described = None if tools is None else tools.described

    def render(tokenizer: Tokenizer, messages: Any, **options: Any) -> Any:
        check_history(messages)
        options |= {"continue_final_message": continues, "tools": described}
        return transcript.prompt_of(tokenizer, messages, **options)

    texts = None if described is None else json.dumps(described)
    return await rendered(service, render, messages, variables, name, more=texts)


async def rendered(
    service: Service,
    render: Callable[..., T],
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    name: str = "messages",
    *,
    more: str | None = None,
) -> T:
    """Returns what `render` makes of a tokenizer and messages, in a thread; raises ApiError.

    more: further text of the prompt.
    """
    tokenizer = service.tokenizer()
    texts = list(_strings_of([list(messages), dict(variables)]))
    check_length(service, [*texts, more or ""], name)
    if reserved := variables.keys() & RESERVED:
        problem = f"chat_template_kwargs may not have {', '.join(sorted(reserved))}"
        raise ApiError(400, problem, param="chat_template_kwargs")
    variables = {**service.settings.template_variables, **variables}
    limit = service.settings.template_seconds
    began = time.monotonic()

    def run() -> T:
        left = began + limit - time.monotonic()
        if left <= 0:
            raise unavailable("the chat template is rendering other conversations")
        return render(tokenizer, messages, limits=Limits(seconds=left), **variables)

    try:
        return await asyncio.get_running_loop().run_in_executor(service.rendering, run)
    except (ChatTemplateError, ValueError, TypeError) as error:
        raise ApiError(400, str(error), param=name) from None
    except OSError as error:  # no process could be started
        logger.error("a chat template could not be rendered: %s", error)
        raise unavailable("the chat template could not be rendered") from None


def _strings_of(value: Any) -> Iterator[str]:
    """Yields all texts in JSON data but names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings_of(inner)


def texts_of(content: Any) -> list[str]:
    """Returns the texts of a message's content."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    found = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in found if isinstance(text, str)]
