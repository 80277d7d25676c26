"""Tool calls whose arguments are JSON: as an object with the name, or behind the name."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .grammar import Rules, quoted
from .json_text import parsed, read_string, read_value
from .source import Reading, Sink, Source
from .syntax import Body, Header, Marks
from .tools import Tool

#: Keys that models write beside the name and the arguments.
_OTHER_KEYS = frozenset({"type", "id", "index", "tool_call_id"})


@dataclass(frozen=True)
class JsonObject(Body):
    """A call like {"name": "f", "arguments": {...}}.

    Attributes:
      name, arguments: keys as written; "name", "arguments" and "parameters" are read, too.
      number: key of a number that is written before the name; "" for none.
    """

    name: str = "name"
    arguments: str = "arguments"
    number: str = ""

    def read_header(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        if (yield from source.choose(("{",))) is None:
            return None
        names = {json.dumps(name, ensure_ascii=False): name for name in tools}
        tool, arguments = None, None
        while True:
            yield from source.spaces()
            key = yield from read_string(source)
            if key is None or not (yield from source.marks((":",))):
                return None
            begins = yield from source.spaces()
            if key in (self.name, "name") and tool is None:
                name = yield from source.choose(tuple(names))
                if name is None:
                    return None
                tool = tools[names[name]]
            elif key in (self.arguments, "arguments", "parameters") and arguments is None:
                if begins == "{" and tool is not None:
                    return Header(tool)
                arguments = yield from _whole_arguments(source)
                if arguments is None:
                    return None
            elif key not in _OTHER_KEYS or not (yield from read_value(source, _ignore)):
                return None
            following = yield from source.spaces()
            if following == "}" and tool is not None:
                return Header(tool, arguments or "{}")
            if following != ",":
                return None
            if tool is not None and arguments is not None:
                return Header(tool, arguments)
            source.at += 1

    def read_arguments(self, source: Source, tool: Tool, sink: Sink) -> Reading[bool]:
        return (yield from read_value(source, sink))

    def read_tail(self, source: Source, header: Header) -> Reading[bool]:
        while True:
            yield from source.spaces()
            if (mark := (yield from source.choose((",", "}")))) != ",":
                return mark is not None
            yield from source.spaces()
            if (yield from read_string(source)) is None:
                return False
            if not (yield from source.marks((":",))):
                return False
            if not (yield from read_value(source, _ignore)):
                return False

    def rule(self, tool: Tool, rules: Rules) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        number = ""
        if self.number:
            begin, end = quoted(f'"{self.number}": "'), quoted('", ')
            number = f"{begin} /[0-9]+/ {end}"
        start = quoted(f'"{self.name}": {name}, "{self.arguments}": ')
        return f'"{{" {number} {start} {rules.add_json(object_schema(tool))} "}}"'


@dataclass(frozen=True)
class NamedJson(Body):
    """A name, marks, and the arguments as a JSON object.

    Attributes:
      prefix: marks before the name; after: between the name and the arguments.
      optional: a mark, with a short id behind it, that may stand before `after`.
      written: text behind the name in grammars.
      end: marks behind the arguments.
    """

    after: Marks
    prefix: Marks = ()
    optional: str = ""
    written: str = ""
    end: Marks = ()

    def read_header(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        if not (yield from source.marks(self.prefix)):
            return None
        yield from source.spaces()
        name = yield from source.choose(tuple(tools))
        if name is None:
            return None
        yield from source.spaces()
        if self.optional and (yield from source.choose((self.optional,))) is not None:
            yield from self._skip(source)
        if not (yield from source.marks(self.after)):
            return None
        return Header(tools[name]) if (yield from source.spaces()) == "{" else None

    def _skip(self, source: Source) -> Reading[None]:
        """Skips the characters of an id."""
        for _ in range(64):
            character = yield from source.peek()
            if not (character.isalnum() or character in ("_", "-")) or not character:
                return
            source.at += 1

    def read_arguments(self, source: Source, tool: Tool, sink: Sink) -> Reading[bool]:
        return (yield from read_value(source, sink))

    def read_tail(self, source: Source, header: Header) -> Reading[bool]:
        return (yield from source.marks(self.end))

    def rule(self, tool: Tool, rules: Rules) -> str:
        name = rules.mark(tool.name + self.written)
        schema = rules.add_json(object_schema(tool))
        before, after = rules.marks(self.prefix), rules.marks(self.after)
        return f"{before} {name} {after} {schema} {rules.marks(self.end)}"


def object_schema(tool: Tool) -> dict[str, object]:
    """Returns the schema of a tool's arguments, which are an object."""
    return {**tool.parameters, "type": "object"}


def _ignore(text: str) -> None:
    """Drops a piece."""


def _whole_arguments(source: Source) -> Reading[str | None]:
    """Reads arguments as a whole: an object, null, or an object as the text of a string."""
    pieces: list[str] = []
    if not (yield from read_value(source, pieces.append)):
        return None
    try:
        text = "".join(pieces)
        value = parsed(text)
        if isinstance(value, str):
            text = value
            value = parsed(text)
    except ValueError:
        return None
    return "{}" if value is None else text if isinstance(value, dict) else None
