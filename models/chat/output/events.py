"""Events of an assistant's answer: pieces of content, thoughts and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the text that the user sees."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Begins the tool call `index` of the answer; `id` is new, `name` is a tool's."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all pieces together are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Ends the tool call `index`."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class Call:
    """A whole tool call; `arguments` is the JSON text of an object, or its start if cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A whole answer."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def message_of(events: Iterable[Event]) -> Message:
    """Returns the answer that all of its events describe."""
    texts: dict[type, list[str]] = {Content: [], Reasoning: []}
    begun: list[tuple[CallBegin, list[str]]] = []
    for event in events:
        if isinstance(event, CallBegin):
            begun.append((event, []))
        elif isinstance(event, CallArguments):
            begun[event.index][1].append(event.text)
        elif not isinstance(event, CallEnd):
            texts[type(event)].append(event.text)
    calls = tuple(Call(begin.id, begin.name, "".join(pieces)) for begin, pieces in begun)
    return Message("".join(texts[Content]), "".join(texts[Reasoning]), calls)


class Events:
    """Collects the events of one push, with adjacent pieces of one kind joined."""

    def __init__(self) -> None:
        self._done: list[Event] = []
        self._kind: type[Content] | type[Reasoning] | int | None = None  # int: a call's arguments
        self._pieces: list[str] = []
        self._calls = 0

    def add(self, kind: type[Content] | type[Reasoning] | int, text: str) -> None:
        """Adds a piece of content, of a thought, or of the arguments of a call, by its index."""
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._pieces.append(text)

    def begin_call(self, name: str) -> int:
        """Begins a call; returns its index."""
        self._close()
        index, self._calls = self._calls, self._calls + 1
        self._done.append(CallBegin(index, f"call_{secrets.token_hex(12)}", name))
        return index

    def end_call(self, index: int) -> None:
        """Ends a call."""
        self._close()
        self._done.append(CallEnd(index))

    def take(self) -> list[Event]:
        """Returns the events since the last call of this method."""
        self._close()
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        kind, text = self._kind, "".join(self._pieces)
        self._kind = None
        self._pieces.clear()
        if not text or kind is None:
            return
        self._done.append(CallArguments(kind, text) if isinstance(kind, int) else kind(text))


class Trimmed:
    """Passes content or thoughts on without white space at gaps.

    White space at the end is held until text follows it, because it is dropped before a gap: the
    place of a thought, of a call, or of a mark of the template.
    """

    def __init__(self, events: Events, kind: type[Content] | type[Reasoning]) -> None:
        self._events, self._kind = events, kind
        self._space: list[str] = []
        self._after_gap = False

    def add(self, text: str) -> None:
        """Adds text."""
        if self._after_gap:
            text = text.lstrip(_SPACE)
            if not text:
                return
            self._after_gap = False
        body = text.rstrip(_SPACE)
        if body:
            self.end()
            self._events.add(self._kind, body)
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def gap(self) -> None:
        """Marks a gap: drops the white space around it."""
        self._space.clear()
        self._after_gap = True

    def end(self) -> None:
        """Passes on the white space that is held."""
        for text in self._space:
            self._events.add(self._kind, text)
        self._space.clear()
