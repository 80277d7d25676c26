"""Checks tool calls and tool results in the messages of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..template_capabilities import parsed_arguments


def check_history(messages: Sequence[Mapping[str, Any]]) -> None:
    """Checks tool calls and tool results in a conversation.

    Raises:
      ValueError: a call has no name, or arguments that are not a JSON object; or a result has no
        text. The message names the field, such as "messages[3].tool_calls[0].function.name".
    """
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise _error(name, message, "an object")
        calls = message.get("tool_calls")
        if calls is not None:
            if not isinstance(calls, list | tuple):
                raise _error(f"{name}.tool_calls", calls, "a list")
            if calls and message.get("role") != "assistant":
                raise ValueError(f"{name}.tool_calls: only messages of the assistant have calls")
            for j, call in enumerate(calls):
                _check_call(call, f"{name}.tool_calls[{j}]")
        if message.get("role") == "tool":
            _check_result(message, name)


def _check_call(call: object, name: str) -> None:
    if not isinstance(call, Mapping):
        raise _error(name, call, "an object")
    if call.get("type", "function") != "function":
        raise ValueError(f"{name}.type is {call['type']!r:.100}, expected 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _error(f"{name}.function", function, "an object")
    if not isinstance(function.get("name"), str):
        raise _error(f"{name}.function.name", function.get("name"), "a string")
    if not function["name"]:
        raise ValueError(f"{name}.function.name is empty")
    for key in ("id",):
        if not isinstance(call.get(key, ""), str):
            raise _error(f"{name}.{key}", call[key], "a string")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        return
    if not isinstance(arguments, str):
        raise _error(f"{name}.function.arguments", arguments, "JSON text of an object")
    if parsed_arguments(arguments) is None:
        problem = f"is {arguments!r:.100}, expected JSON text of an object"
        raise ValueError(f"{name}.function.arguments {problem}")


def _check_result(message: Mapping[str, Any], name: str) -> None:
    content = message.get("content")
    if not isinstance(content, str | list):
        raise _error(f"{name}.content", content, "text")
    for j, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping):
            raise _error(f"{name}.content[{j}]", part, "an object")
        if part.get("type", "text") == "text" and not isinstance(part.get("text"), str):
            raise _error(f"{name}.content[{j}].text", part.get("text"), "a string")
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise _error(f"{name}.{key}", message[key], "a string")


def _error(name: str, value: object, expected: str) -> ValueError:
    if value is None:
        return ValueError(f"{name} is missing, expected {expected}")
    return ValueError(f"{name} is of type {type(value).__name__}, expected {expected}")
