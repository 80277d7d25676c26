"""Content blocks of Anthropic's API: blocks of an answer, and messages of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..chat.output import CallBegin
from .blocks import Blocks, Kind
from .errors import ApiError


class ContentBlocks(Blocks):
    """Content of one answer, and the events of a stream that announce it."""

    def __init__(self, event: Callable[..., bytes]) -> None:
        """Begins without blocks; `event` makes an event of its name and fields."""
        super().__init__()
        self._event = event
        self._block: dict[str, Any] = {}

    def _begin(self, kind: Kind, call: CallBegin | None) -> Iterator[bytes]:
        if call is not None:
            id = call.id.replace("call_", "toolu_")
            self._block = {"type": "tool_use", "id": id, "name": call.name, "input": {}}
        elif kind == "thought":
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._block = {"type": "text", "text": ""}
        index = len(self.done)
        yield self._event("content_block_start", index=index, content_block=self._block)

    def _piece(self, kind: Kind, text: str) -> Iterator[bytes]:
        if not text:
            return
        if kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        elif kind == "thought":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        yield self._event("content_block_delta", index=len(self.done), delta=delta)

    def _end(self, kind: Kind, text: str, status: str) -> Iterator[bytes]:
        if kind == "call":
            self._block["input"] = _input_of(text)
        else:
            self._block["thinking" if kind == "thought" else "text"] = text
        yield self._event("content_block_stop", index=len(self.done))
        self.done.append(self._block)


def _input_of(text: str) -> Any:
    """Returns a call's arguments as JSON data; nothing of those that were cut."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as those of OpenAI's API; raises ApiError for blocks of other kinds."""
    return [one for i, message in enumerate(messages) for one in _converted(message, i)]


def _converted(message: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list) or not any(_is_special(part) for part in content):
        yield dict(message)
        return
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_use":
            arguments = json.dumps(part.get("input", {}), ensure_ascii=False)
            function = {"name": part.get("name"), "arguments": arguments}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = part.get("content", "")
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result}
        elif kind == "thinking":
            thought += str(part.get("thinking", ""))
        elif kind == "text":
            texts.append(part)
        elif kind != "redacted_thinking":
            problem = f"messages[{index}].content[{i}] is of type {kind!r:.50}"
            raise ApiError(400, f"{problem}, which is not supported", param="messages")
    if texts or calls or thought:
        found = {**message, "content": texts or ""}
        found |= {"tool_calls": calls} if calls else {}
        found |= {"reasoning_content": thought} if thought else {}
        yield found


def _is_special(part: Any) -> bool:
    return not isinstance(part, Mapping) or part.get("type") != "text"


def chat_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Returns tools as those of Chat Completions; raises ApiError."""
    found = []
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            problem = f"tools[{i}] must be a tool of the client's own"
            raise ApiError(400, problem, param="tools", code="unsupported_parameter")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        fields = ("description", "strict")
        function |= {name: tool[name] for name in fields if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found or None


def chat_choice(choice: Any) -> tuple[Any, bool | None]:
    """Returns a choice as that of Chat Completions, and whether several calls are wanted."""
    if choice is None:
        return None, None
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(choice, dict) or choice.get("type") not in (*kinds, "tool"):
        problem = "tool_choice.type must be auto, any, tool or none"
        raise ApiError(400, problem, param="tool_choice")
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    return kinds[choice["type"]], parallel
