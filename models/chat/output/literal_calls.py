"""Tool calls written like function calls, with literals as values: f(city="Zurich", days=2)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .grammar import Rules, quoted
from .literal_rules import LiteralRules
from .literals import Dialect, read_literal, read_name
from .source import Reading, Sink, Source
from .syntax import Body, Header
from .tagged_calls import read_cut_key
from .tools import Tool


@dataclass(frozen=True)
class LiteralCall(Body):
    """A name, and keys with literals in brackets.

    Attributes:
      prefix: text before the name; opening, closing: brackets; equals: text behind a key.
      comma: text between two arguments, as written.
    """

    dialect: Dialect
    prefix: str = ""
    opening: str = "("
    closing: str = ")"
    equals: str = "="
    comma: str = ", "

    def read_header(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        if self.prefix and (yield from source.choose((self.prefix,))) is None:
            return None
        yield from source.spaces()
        name = yield from source.choose(tuple(tools))
        if name is None or (yield from source.choose((self.opening,))) is None:
            return None
        return Header(tools[name])

    def read_arguments(self, source: Source, tool: Tool, sink: Sink) -> Reading[bool]:
        separator = "{"
        while True:
            following = yield from source.spaces()
            if following == self.closing:
                source.at += 1
                sink("{}" if separator == "{" else "}")
                return True
            if separator != "{":
                if following != ",":
                    sink("}" if following else "")
                    return False
                source.at += 1
                yield from source.spaces()
            key = yield from read_name(source, self.equals)
            if key is None:
                return read_cut_key(source, self.equals, sink, separator)
            key = key.strip().strip("\"'")
            sink(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from read_literal(source, self.dialect, sink)):
                return False

    def read_tail(self, source: Source, header: Header) -> Reading[bool]:
        yield from ()
        return True

    def rule(self, tool: Tool, rules: Rules) -> str:
        start, end = quoted(self.prefix + tool.name + self.opening), quoted(self.closing)
        values = LiteralRules(self.dialect, rules, tool.parameters)
        arguments = values.members(tool.parameters, self.equals, self.comma, bare=True)
        return f"{start} {arguments} {end}"
