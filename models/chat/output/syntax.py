"""Describes how a family writes tool calls: marks around the calls, and the form of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from .grammar import Rules
from .source import Reading, Sink, Source
from .tools import Tool

Marks = tuple[str, ...]


@dataclass(frozen=True)
class Header:
    """Start of a call, up to where it is certain that it is one.

    Attributes:
      arguments: the arguments, if they were read with the start; None if they follow.
    """

    tool: Tool
    arguments: str | None = None


class Body(ABC):
    """Form of one call, without the marks around it."""

    @abstractmethod
    def read_header(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        """Reads the start of a call of one of the tools; None if there is none."""

    @abstractmethod
    def read_arguments(self, source: Source, tool: Tool, sink: Sink) -> Reading[bool]:
        """Passes the arguments on as JSON; False where they stop being arguments."""

    @abstractmethod
    def read_tail(self, source: Source, header: Header) -> Reading[bool]:
        """Reads what follows the arguments; False if something else does."""

    @abstractmethod
    def rule(self, tool: Tool, rules: Rules) -> str:
        """Returns a grammar expression of a call of a tool."""


@dataclass(frozen=True)
class Syntax:
    """Marks around calls. White space as a mark is written, and may be missing when it is read.

    Attributes:
      section, section_end: around all calls of an answer.
      call, call_end: around each call.
      separator: between two calls.
      bare: at the start of an answer, `section` may be missing.
    """

    body: Body
    section: Marks = ()
    section_end: Marks = ()
    call: Marks = ()
    call_end: Marks = ()
    separator: Marks = ()
    bare: bool = False

    @property
    def openers(self) -> dict[str, Marks]:
        """First marks that calls may begin with -> marks that follow before the body."""
        opening = self.section + self.call
        found = {opening[0]: opening[1:]} if opening else {}
        if self.section and self.call:  # models forget the section's mark
            found.setdefault(self.call[0], self.call[1:])
        return found

    def read_first(
        self, source: Source, tools: dict[str, Tool], marks: Marks
    ) -> Reading[Header | None]:
        """Reads the start of the first call, behind its first mark."""
        if not (yield from source.marks(marks)):
            return None
        yield from source.spaces()
        return (yield from self.body.read_header(source, tools))

    def read_next(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        """Reads the start of a further call."""
        if not self.separator and not self.call:
            return None
        return (yield from self.read_first(source, tools, self.separator + self.call))

    @property
    def first_mark(self) -> str:
        """The mark that calls begin with in grammars; "" for none."""
        return "" if self.bare else next(iter(self.section + self.call), "")

    def grammar(
        self, tools: dict[str, Tool], rules: Rules, parallel: bool, *, begun: bool = False
    ) -> str:
        """Returns a grammar expression of one call, or one or more.

        begun: whether `first_mark` precedes it already.
        """
        bodies = " | ".join(self.body.rule(tool, rules) for tool in tools.values())
        body = rules.add("body", f"({bodies}) {rules.marks(self.call_end)}")
        section = () if self.bare else self.section
        opening = rules.marks((section + self.call)[1 if begun else 0 :])
        more = ""
        if parallel and (self.separator or self.call):
            more = f"({rules.marks(self.separator + self.call)} {body})*"
        return f"{opening} {body} {more} {rules.marks(self.section_end)}"


def read_marks(source: Source, marks: Marks) -> Reading[bool | None]:
    """Reads marks; None if others come. For `Source.attempt`."""
    return (yield from source.marks(marks)) or None
