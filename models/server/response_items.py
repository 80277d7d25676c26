"""Items of the Responses API: output items of an answer, and input items as messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..chat.output import CallBegin
from .blocks import Blocks, Kind
from .conversations import texts_of
from .errors import ApiError

_PREFIXES: dict[Kind, str] = {"text": "msg", "thought": "rs", "call": "fc"}


class Items(Blocks):
    """Output items of one answer, and the events of a stream that announce them."""

    def __init__(self, event: Callable[..., bytes]) -> None:
        """Begins without items; `event` makes an event of its name and fields."""
        super().__init__()
        self._event = event
        self._item: dict[str, Any] = {}

    def _begin(self, kind: Kind, call: CallBegin | None) -> Iterator[bytes]:
        item = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}", "status": "in_progress"}
        if call is not None:
            item |= {"type": "function_call", "call_id": call.id, "name": call.name}
            item["arguments"] = ""
        elif kind == "thought":
            item |= {"type": "reasoning", "summary": [], "content": []}  # type: ignore[dict-item]
        else:
            item |= {"type": "message", "role": "assistant", "content": []}  # type: ignore[dict-item]
        self._item = item
        yield self._event("response.output_item.added", output_index=len(self.done), item=item)
        if call is None:
            yield self._event("response.content_part.added", **self._part, part=_part(kind, ""))

    def _piece(self, kind: Kind, text: str) -> Iterator[bytes]:
        if kind == "call":
            yield self._event("response.function_call_arguments.delta", **self._place, delta=text)
        elif kind == "thought":
            yield self._event("response.reasoning_text.delta", **self._part, delta=text)
        else:
            yield self._event("response.output_text.delta", **self._part, delta=text, logprobs=[])

    def _end(self, kind: Kind, text: str, status: str) -> Iterator[bytes]:
        place, part, index = self._place, self._part, len(self.done)
        item = {**self._item, "status": status}
        self.done.append(item)
        if kind == "call":
            item["arguments"] = text
            fields = {**place, "arguments": text, "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **fields)
        else:
            item["content"] = [_part(kind, text)]
            if kind == "thought":
                yield self._event("response.reasoning_text.done", **part, text=text)
            else:
                yield self._event("response.output_text.done", **part, text=text, logprobs=[])
            yield self._event("response.content_part.done", **part, part=_part(kind, text))
        yield self._event("response.output_item.done", output_index=index, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.done)}

    @property
    def _part(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns input items as messages of a chat; raises ApiError for items of other kinds."""
    found: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(items):
        kind, content = item.get("type", "message"), item.get("content")
        if kind == "reasoning":
            thought += "".join(texts_of(content))
            continue
        if kind == "function_call":
            if not found or "tool_calls" not in found[-1]:
                said = bool(found) and found[-1]["role"] == "assistant" and not thought
                found += [] if said else [{"role": "assistant", "content": ""}]
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = item.get("output")
            text = result if isinstance(result, str) else "".join(texts_of(result))
            id = item.get("call_id")
            found.append({"role": "tool", "tool_call_id": id, "content": text})
        else:
            parts = content if isinstance(content, list) else []
            if kind != "message" or not all(map(_is_text, parts)):
                problem = f"input[{i}] must be a message of texts, a function_call or its output"
                raise ApiError(400, problem, param="input", code="unsupported_parameter")
            found.append({"role": item.get("role"), "content": "".join(texts_of(content))})
        if thought and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"], thought = thought, ""
    return found


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") in ("input_text", "output_text")
        and isinstance(part.get("text"), str)
    )


def chat_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Returns tools of the Responses API as those of Chat Completions; raises ApiError."""
    found = []
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            problem = f"tools[{i}] must be of type function"
            raise ApiError(400, problem, param="tools", code="unsupported_parameter")
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found or None
