"""Reads answers that consist of thoughts and of text with calls in it."""

from __future__ import annotations

from dataclasses import dataclass

from .parser import Parser
from .source import Reading
from .syntax import Marks, Syntax


@dataclass(frozen=True)
class Tags:
    """Marks before and behind a part of an answer."""

    begin: str
    end: str


class AnswerReader:
    """Reader of one answer. Thoughts stand at its start, or behind another thought or a call."""

    def __init__(
        self, parser: Parser, syntaxes: tuple[Syntax, ...], thought: Tags | None, frame: Tags | None
    ) -> None:
        """Prepares reading.

        syntaxes: forms of calls, in the order in which they are tried. frame: marks that stand
        around the text behind a thought, and are dropped.
        """
        self._parser, self._source = parser, parser.source
        self._thought, self._frame = thought, frame
        self._framed = False
        self._bare = [syntax for syntax in syntaxes if syntax.bare]
        self._openers: dict[str, list[tuple[Syntax, Marks]]] = {}
        for syntax in syntaxes:
            for opener, marks in syntax.openers.items():
                self._openers.setdefault(opener, []).append((syntax, marks))

    def read(self, inside: bool) -> Reading[None]:
        """Reads the answer; `inside` a thought if the prompt began one."""
        if inside and self._thought is not None:
            yield from self._think(self._thought, "")
        while (yield from self._source.peek()):
            while (yield from self._read_start()):
                pass
            yield from self._read_text()

    def _read_start(self) -> Reading[bool]:
        """Reads a thought, a mark or calls; returns False where text begins."""
        source, content, thought, frame = (
            self._source,
            self._parser.content,
            self._thought,
            self._frame,
        )
        yield from source.spaces(content.add)
        if thought is not None and (yield from source.choose((thought.begin,))) is not None:
            yield from self._think(thought, thought.begin)
            return True
        if frame is not None and (yield from source.choose((frame.begin,))) is not None:
            content.gap()
            self._framed = True
            return True
        for syntax in self._bare:
            if (yield from self._parser.read_calls(syntax, syntax.call)):
                return True
        return False

    def _think(self, thought: Tags, begin: str) -> Reading[None]:
        """Reads a thought, behind its first mark."""
        parser = self._parser
        if parser.splits:
            parser.content.gap()
            parser.reasoning.gap()
        else:
            parser.content.add(begin)
        stop = yield from self._source.until((thought.end,), parser.reasoning.add)
        if parser.splits and stop is not None:
            parser.reasoning.gap()
        elif stop is not None:
            parser.content.add(stop)

    def _read_text(self) -> Reading[None]:
        """Reads text up to the end of calls or of the frame."""
        content, frame = self._parser.content, self._frame
        stops = tuple(self._openers)
        if self._framed and frame is not None:
            stops = (*stops, frame.end)
        while (stop := (yield from self._source.until(stops, content.add))) is not None:
            if stop not in self._openers:
                content.gap()
                self._framed = False
                return
            for syntax, marks in self._openers[stop]:
                if (yield from self._parser.read_calls(syntax, marks)):
                    return
            content.add(stop)
