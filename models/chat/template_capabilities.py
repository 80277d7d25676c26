"""Adapts messages to the formats that a chat template supports, detected by rendering probes.

Messages have the formats of OpenAI's API. A template supports some of them; others raise an error,
vanish, or are printed as Python reprs. A probe renders a message in two formats, and an unsupported
format is converted to a supported one, as in llama.cpp (common/chat.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

#: Renders a context; returns None if the template raises an error.
Probe = Callable[[dict[str, Any]], str | None]

Messages = list[dict[str, Any]]

#: Fields in which templates read the thoughts of an answer; messages have the first.
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_MARK = "Zq8xProbe"  # does not occur in templates, and none modifies it
_PARTS = [{"type": "text", "text": _MARK}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


class TemplateCapabilities:
    """Message formats that one template supports; each is probed on first use."""

    def __init__(self, template: str, probe: Probe, found: dict[str, str]) -> None:
        """Prepares probing a template.

        probe: renders the template with the given variables; None if it fails. found: cache of
        probe results by name, which this object extends.
        """
        self._template = template
        self._probe = probe
        self._found = found

    def adapt(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        """Returns copies of the messages in formats that the template supports.

        Raises ValueError for a part that is not text if the template supports only text.
        """
        adapted = [self._with_thought(self._with_calls(dict(message))) for message in messages]
        if "developer" not in self._template:
            for message in adapted:
                if message["role"] == "developer":
                    message["role"] = "system"
        for i, message in enumerate(adapted):
            message |= self._content(message, f"messages[{i}].content")
        if len(adapted) > 1 and adapted[0]["role"] == "system" and self._is("system", "merged"):
            return _merged(adapted)
        return adapted

    def _is(self, name: str, value: str) -> bool:
        """Returns whether the result of the probe `_probe_NAME` is `value`."""
        return self._result(name) == value

    def _result(self, name: str) -> str:
        """Returns the result of the probe `_probe_NAME`."""
        if name not in self._found:
            self._found[name] = getattr(self, f"_probe_{name}")()
        return self._found[name]

    def _content(self, message: dict[str, Any], name: str) -> dict[str, Any]:
        """Returns {"content": new content} for a message, or {} if it does not change."""
        role, content = message["role"], message.get("content")
        if content is None:
            needed = "tool_calls" in message and self._is("no_content", "text")
            return {"content": ""} if needed else {}
        if role not in ("system", "user", "assistant", "tool"):
            return {}
        if isinstance(content, str):
            typed = self._is(f"content_of_{role}", "parts")
            return {"content": [{"type": "text", "text": content}]} if typed else {}
        if _are_parts(content) and self._is(f"content_of_{role}", "text"):
            return {"content": _joined(content, name)}
        return {}

    def _with_thought(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message with its thought in the field that the template reads.

        A message with calls and a text stays as it is, because gpt-oss's template refuses a thought
        beside both.
        """
        given, *others = _THOUGHT_FIELDS
        thought = message.get(given)
        if not isinstance(thought, str) or any(name in message for name in others):
            return message
        name = self._result("thought")
        if name == given or (message.get("content") and message.get("tool_calls")):
            return message
        return {key: value for key, value in message.items() if key != given} | {name: thought}

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message with arguments of tool calls in the template's format.

        They become objects or JSON strings. A string that is not a JSON object is unchanged.
        """
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            return message
        return message | {"tool_calls": [self._with_arguments(dict(call)) for call in calls]}

    def _with_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), Mapping):
            return call | {"function": self._with_arguments(dict(call["function"]))}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and self._is("arguments", "object"):
            parsed = parsed_arguments(arguments)
            return call if parsed is None else call | {"arguments": parsed}
        if isinstance(arguments, Mapping) and self._is("arguments", "text"):
            return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _render(self, *messages: dict[str, Any], tools: bool = False) -> str | None:
        asks = messages[-1]["role"] != "assistant"
        offered = [_TOOL] if tools else None
        return self._probe(
            {"messages": list(messages), "tools": offered, "add_generation_prompt": asks}
        )

    def _probe_system(self) -> str:
        """Probes whether the template supports a system message; returns "kept" or "merged".

        "merged" means that the system message must become part of the first user message.
        """
        typed = self._is("content_of_system", "parts")
        system = {"role": "system", "content": _PARTS if typed else _MARK}
        text = self._render(system, {"role": "user", "content": "A"})
        without_system = self._render({"role": "user", "content": "A"})
        refused = text is None or _MARK not in text
        return "merged" if refused and without_system is not None else "kept"

    def _probe_content(self, *before: dict[str, Any], role: str, tools: bool = False) -> str:
        """Probes the content format of a role's messages: returns "text", "parts" or "both"."""

        def rendered(content: Any) -> str | None:
            after = [{"role": "user", "content": "A"}] if role == "system" else []
            return self._render(*before, {"role": role, "content": content}, *after, tools=tools)

        text, parts = rendered(_MARK), rendered(_PARTS)
        if text is not None and _MARK in text:
            return "both" if text == parts else "text"
        return "parts" if parts is not None and _MARK in parts else "text"

    def _probe_content_of_system(self) -> str:
        return self._probe_content(role="system")

    def _probe_content_of_user(self) -> str:
        return self._probe_content(role="user")

    def _probe_content_of_assistant(self) -> str:
        return self._probe_content({"role": "user", "content": "A"}, role="assistant")

    def _probe_content_of_tool(self) -> str:
        before = [{"role": "user", "content": "A"}, self._call({"key": "A"})]
        return self._probe_content(*map(self._with_calls, before), role="tool", tools=True)

    def _probe_arguments(self) -> str:
        """Probes which formats of tool call arguments work: JSON strings, objects, or both."""
        arguments = {"key": _MARK}
        text, parsed = (self._after_call(self._call(a)) for a in (json.dumps(arguments), arguments))
        if text == parsed:
            return "both"
        if parsed is None or (text is not None and f"'key': {_MARK!r}" in parsed):
            return "text"  # objects raise an error, or are printed as Python reprs
        return "object"

    def _probe_thought(self) -> str:
        """Probes in which field the template reads a thought; the first if it reads none."""
        user = {"role": "user", "content": "A"}
        calling = self._with_calls(self._call({"key": "A"}))
        for name in _THOUGHT_FIELDS:
            plain = {"role": "assistant", "content": "A", name: _MARK}
            for text in (
                self._render(user, calling | {name: _MARK}, tools=True),
                self._render(user, plain),
            ):
                if text is not None and _MARK in text:
                    return name
        return _THOUGHT_FIELDS[0]

    def _probe_no_content(self) -> str:
        """Probes whether a message with tool calls needs an empty content."""
        call = self._with_calls(self._call({"key": "A"}))
        missing = self._after_call(call | {"content": None})
        return "none" if missing == self._after_call(call) else "text"

    def _call(self, arguments: Any) -> dict[str, Any]:
        function = {"name": "tool", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}  # 9, as Mistral's ids
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _after_call(self, call: dict[str, Any]) -> str | None:
        result = {"role": "tool", "tool_call_id": "call00001", "name": "tool", "content": "A"}
        return self._render({"role": "user", "content": "A"}, call, result, tools=True)


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """Parses a tool call's arguments; returns None if they are not the JSON text of an object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _are_parts(content: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    )


def _joined(parts: Sequence[Mapping[str, Any]], name: str) -> str:
    """Joins the texts of parts with newlines."""
    texts = []
    for i, part in enumerate(parts):
        text = part.get("text")
        if part["type"] != "text" or not isinstance(text, str):
            kind = f"of type {part['type']!r:.100}"
            raise ValueError(f"{name}[{i}] is {kind}; the template takes parts of type 'text' only")
        texts.append(text)
    return "\n".join(texts)


def _merged(messages: Messages) -> Messages:
    """Merges the system message, the first one, into the second if that is a user message."""
    system, user = messages[0].get("content"), messages[1].get("content")
    if _are_parts(system):
        system = _joined(system, "messages[0].content")
    if messages[1]["role"] != "user" or not isinstance(system, str):
        return messages
    if _are_parts(user):
        merged: Any = [{"type": "text", "text": system}, *user]
    elif isinstance(user, str):
        merged = f"{system}\n\n{user}"
    else:
        return messages
    return [messages[1] | {"content": merged}, *messages[2:]]
