"""Parses an assistant's answer, as a stream or as a whole, into events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .events import Content, Event, Events, Reasoning, Trimmed
from .source import Reading, Source
from .syntax import Header, Marks, Syntax, read_marks
from .tools import Tool, tools_of


class Parser:
    """Parser of one answer. The events of a whole answer are those of all its pieces.

    A call is text that begins as the family's calls do, up to the name of a tool that the request
    offers. All other text is content. Text is held back while it may begin a call or a thought.
    """

    def __init__(
        self,
        read: Callable[[Parser], Reading[None]],
        tools: Sequence[Any] | None,
        splits_reasoning: bool,
    ) -> None:
        """Prepares parsing; `Family.parser` calls this.

        read: the family's reader of an answer. The other arguments are those of `Family.parser`.
        """
        self.source = Source()
        self.tools: dict[str, Tool] = tools_of(tools)
        self.splits = splits_reasoning
        self._events = Events()
        self.content = Trimmed(self._events, Content)
        self.reasoning = Trimmed(self._events, Reasoning) if splits_reasoning else self.content
        self._reading = read(self)

    def push(self, text: str) -> list[Event]:
        """Adds a piece of the answer; returns the events that are certain now."""
        if not text:
            return []
        self.source.push(text)
        next(self._reading, None)
        return self._events.take()

    def finish(self) -> list[Event]:
        """Ends the answer; returns the last events."""
        self.source.ended = True
        next(self._reading, None)
        self.content.end()
        self.reasoning.end()
        return self._events.take()

    def read_call(self, syntax: Syntax, header: Header) -> Reading[None]:
        """Reads the rest of a call, whose header was read."""
        source, index = self.source, self._events.begin_call(header.tool.name)

        def sink(text: str) -> None:
            self._events.add(index, text)

        complete = True
        if header.arguments is not None:
            sink(header.arguments)
        else:
            complete = yield from syntax.body.read_arguments(source, header.tool, sink)
        self._events.end_call(index)
        if complete:
            yield from self._read_end(_read_tail(syntax, source, header))
            yield from self._read_end(read_marks(source, syntax.call_end))

    def read_calls(self, syntax: Syntax, marks: Marks) -> Reading[bool]:
        """Reads calls behind their first mark; returns False, and reads nothing, without one."""
        source = self.source
        header = yield from source.attempt(syntax.read_first(source, self.tools, marks))
        if header is None:
            return False
        self.content.gap()
        while header is not None:
            yield from self.read_call(syntax, header)
            header = yield from source.attempt(syntax.read_next(source, self.tools))
        yield from self._read_end(read_marks(source, syntax.section_end))
        return True

    def _read_end(self, reading: Reading[bool | None]) -> Reading[None]:
        """Reads marks behind a call, if they follow; drops the start of one at the very end."""
        source = self.source
        if (yield from source.attempt(reading)) is None and source.short:
            source.at = len(source.text)


def _read_tail(syntax: Syntax, source: Source, header: Header) -> Reading[bool | None]:
    return (yield from syntax.body.read_tail(source, header)) or None
