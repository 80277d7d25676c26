"""Groups an answer's events to blocks: runs of content, thoughts, and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ..chat.output import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning

Kind = Literal["text", "thought", "call"]


class Blocks:
    """Base of writers of blocks, in the form of one API.

    Attributes:
      done: finished blocks.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind: Kind | None = None
        self._pieces: list[str] = []

    def add(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Adds events of an answer; yields those of the stream."""
        for event in events:
            if isinstance(event, CallBegin):
                yield from self._start("call", event)
            elif isinstance(event, CallEnd):
                yield from self.finish("completed")
            else:
                assert isinstance(event, Content | Reasoning | CallArguments)
                kind: Kind = _KINDS[type(event)]
                if kind != self._kind:
                    yield from self._start(kind, None)
                self._pieces.append(event.text)
                yield from self._piece(kind, event.text)

    def finish(self, status: str) -> Iterator[bytes]:
        """Ends the block that has begun, if any. status: "completed", or "incomplete"."""
        if self._kind is not None:
            yield from self._end(self._kind, "".join(self._pieces), status)
        self._kind, self._pieces = None, []

    def _start(self, kind: Kind, call: CallBegin | None) -> Iterator[bytes]:
        yield from self.finish("completed")
        self._kind = kind
        yield from self._begin(kind, call)

    def _begin(self, kind: Kind, call: CallBegin | None) -> Iterator[bytes]:
        """Yields what announces a block; `call` is that of a tool call."""
        raise NotImplementedError

    def _piece(self, kind: Kind, text: str) -> Iterator[bytes]:
        """Yields what announces a piece of a block."""
        raise NotImplementedError

    def _end(self, kind: Kind, text: str, status: str) -> Iterator[bytes]:
        """Appends the block to `done`; yields what announces its end."""
        raise NotImplementedError


_KINDS: dict[type, Kind] = {Content: "text", Reasoning: "thought", CallArguments: "call"}
