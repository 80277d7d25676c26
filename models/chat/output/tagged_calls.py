"""Tool calls with a tag for each parameter, such as <parameter=city>Zurich</parameter>."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .grammar import Rules
from .json_text import JsonScanner, escaped
from .literals import read_cut_name, read_name
from .source import Reading, Sink, Source
from .syntax import Body, Header, Marks
from .tools import Tool


@dataclass(frozen=True)
class Tagged(Body):
    """A name, and one tag for each parameter. Strings are raw text, other values are JSON.

    Attributes:
      name: texts before and behind the tool's name; white space, if `name_end` is.
      key, key_end: marks around a parameter's name; value: marks before its value.
      value_end: mark behind a value.
      end: mark behind the last parameter; it may be the mark that ends the call.
      lines: a value stands on lines of its own.
      gap: white space between tags.
    """

    name: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    value: Marks = ()
    lines: bool = False
    gap: str = "\n"

    def read_header(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        if self.name and (yield from source.choose((self.name,))) is None:
            return None
        name = yield from source.choose(tuple(tools))
        if name is None:
            return None
        if self.name_end:
            if (yield from source.choose((self.name_end,))) is None:
                return None
        elif (yield from source.spaces()) != "<":
            return None
        return Header(tools[name])

    def read_arguments(self, source: Source, tool: Tool, sink: Sink) -> Reading[bool]:
        separator = "{"
        while True:
            yield from source.spaces()
            mark = yield from source.choose((self.key, self.end))
            if mark != self.key:
                if mark is not None or not source.short:
                    sink("{}" if separator == "{" else "}")
                return mark is not None
            key = yield from source.attempt(self._read_key(source))
            if key is None:
                return read_cut_key(source, self.key_end, sink, separator)
            sink(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(source, tool, key, sink)):
                return False

    def _read_key(self, source: Source) -> Reading[str | None]:
        key = yield from read_name(source, self.key_end)
        if key is None or not (yield from source.marks(self.value)):
            return None
        return key.strip()

    def _read_value(self, source: Source, tool: Tool, key: str, sink: Sink) -> Reading[bool]:
        if self.lines and (yield from source.peek()) == "\n":
            source.at += 1
        stops = ("\n" + self.value_end, self.value_end) if self.lines else (self.value_end,)
        if tool.is_text(key):
            sink('"')
            stop = yield from source.until(stops, lambda text: sink(escaped(text)))
            sink("" if stop is None else '"')
            return stop is not None
        pieces: list[str] = []
        stop = yield from source.until(stops, pieces.append)
        text = "".join(pieces)
        sink(tool.converted(key, text) if stop is not None else _valid_start(text))
        return stop is not None

    def read_tail(self, source: Source, header: Header) -> Reading[bool]:
        yield from ()
        return True

    def rule(self, tool: Tool, rules: Rules) -> str:
        gap, parameters = rules.mark(self.gap), []
        for key, schema in tool.properties.items():
            marks = rules.marks((self.key, key, self.key_end, *self.value))
            line = rules.mark("\n") if self.lines else ""
            value = " | ".join(self._values(tool, key, schema, rules))
            expression = f"{marks} {line} ({value}) {gap}"
            name = rules.add("parameter", expression)
            parameters.append(name if key in tool.required else f"{name}?")
        start = rules.mark(f"{self.name}{tool.name}{self.name_end}")
        return f"{start} {gap} {' '.join(parameters)} {rules.mark(self.end)}"

    def _values(self, tool: Tool, key: str, schema: object, rules: Rules) -> Iterator[str]:
        """Yields expressions of a parameter's values, each with the mark behind it."""
        line = ("\n",) if self.lines else ()
        types, choices = tool.types_of(key), choices_of(schema)
        if "string" in types and choices:
            yield from (rules.marks((choice, *line, self.value_end)) for choice in choices)
        elif "string" in types:  # any text is one, whatever else the schema allows
            yield rules.add_text(self.value_end)
        else:
            yield f"{rules.add_json(tool.schema_of(key))} {rules.marks((*line, self.value_end))}"


def choices_of(schema: object) -> list[str]:
    """Returns the values of a parameter that may only have certain ones, as raw text."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    return [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]


def read_cut_key(source: Source, stop: str, sink: Sink, separator: str) -> bool:
    """Passes on a key that the end of the answer cuts off; otherwise ends the arguments."""
    key = read_cut_name(source, stop) if source.short else None
    if key is not None:
        sink(f'{separator}"{escaped(key)}' if key else "")
    else:
        sink("{}" if separator == "{" else "}")
    return False


def _valid_start(text: str) -> str:
    """Returns a value that was cut off as the start of a JSON value: itself, or as a string."""
    scanner, stripped = JsonScanner(), text.strip()
    out, at = scanner.feed(stripped, 0, True)
    if not scanner.failed and at == len(stripped):
        return out
    return f'"{escaped(text)}'
