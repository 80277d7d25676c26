"""Reads text that arrives in pieces: the scanner of all families.

Readers are generators. They yield where they need more text, and `Parser.push` continues them when
it has arrived, so a format is written as straight code. No reader looks at a character more often
than a constant number of times: what is looked at again is shorter than a mark or a fixed limit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

#: A reader that yields where it needs more text, and returns a T.
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

#: White space that may stand between two marks; longer white space is prose.
_MOST_SPACE = 256
_SPACES = re.compile(r"[ \t\r\n]*")


class Source:
    """Text that has arrived, and the position in it.

    Attributes:
      text: text from some point on; at: position of the first unread character.
      ended: no more text will arrive.
      short: a reader failed only because the text ended.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = self.short = False
        self._tried: list[str] | None = None  # text read since `begin`, except text[_begin:at]
        self._begin = 0

    def push(self, text: str) -> None:
        """Adds text, and forgets text that was read."""
        if self._tried is not None and self.at > self._begin:
            self._tried.append(self.text[self._begin : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._begin = 0

    def attempt(self, reading: Reading[T | None]) -> Reading[T | None]:
        """Runs a reader; if it returns None, nothing has been read. Attempts are not nested."""
        self._tried, self._begin, self.short = [], self.at, False
        result = yield from reading
        if result is None:
            if self._tried:
                self.text = "".join(self._tried) + self.text[self._begin :]
                self._begin = 0
            self.at = self._begin
        self._tried = None
        return result

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it, "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                self.short = True
                return ""
            yield
        return self.text[self.at]

    def spaces(self, sink: Sink | None = None) -> Reading[str]:
        """Skips white space, of limited length without a sink; returns the next character."""
        count = 0
        while True:
            match = _SPACES.match(self.text, self.at)
            assert match is not None
            if sink is not None and match.end() > self.at:
                sink(match[0])
            count += match.end() - self.at
            self.at = match.end()
            if self.at < len(self.text) or (sink is None and count > _MOST_SPACE):
                return self.text[self.at : self.at + 1]
            if self.ended:
                self.short = True
                return ""
            yield

    def choose(self, options: tuple[str, ...]) -> Reading[str | None]:
        """Reads the longest of several texts that comes next; None, and nothing, if none does."""
        while True:
            rest = len(self.text) - self.at
            found, may_come = None, False
            for option in options:
                if self.text.startswith(option, self.at):
                    if found is None or len(option) > len(found):
                        found = option
                elif rest < len(option) and option.startswith(self.text[self.at :]):
                    may_come = True
            if may_come and not self.ended:
                yield
                continue
            if found is not None:
                self.at += len(found)
            elif may_come:
                self.short = True
            return found

    def marks(self, marks: tuple[str, ...]) -> Reading[bool]:
        """Reads marks in sequence, with any white space around them."""
        for mark in marks:
            if mark.isspace():
                continue
            yield from self.spaces()
            if (yield from self.choose((mark,))) is None:
                return False
        return True

    def until(self, stops: tuple[str, ...], sink: Sink) -> Reading[str | None]:
        """Reads text up to one of the stops, and the stop; returns it, None at the end.

        Text that can no longer become a stop goes to the sink at once.
        """
        if not stops:
            while True:
                sink(self.text[self.at :])
                self.at = len(self.text)
                if self.ended:
                    return None
                yield
        first, pattern = _stops_patterns(stops)
        while True:
            match = first.search(self.text, self.at)
            match = match and pattern.search(self.text, match.start())
            whole = match is not None and match[1] is not None
            end = len(self.text) if match is None or (self.ended and not whole) else match.start()
            if end > self.at:
                sink(self.text[self.at : end])
            if match is not None and whole:
                self.at = match.end()
                return match[1]
            self.at = end
            if self.ended:
                return None
            yield


@functools.lru_cache(256)
def _stops_patterns(stops: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns a pattern of the stops' first characters, because most text has none of them, and
    one that finds a stop (group 1), or one that has begun at the text's end.
    """
    first = "|".join(re.escape(stop[0]) for stop in stops)
    longest = sorted(stops, key=len, reverse=True)
    whole = "|".join(map(re.escape, longest))
    begun = "|".join(_begun(stop) for stop in longest)
    return re.compile(first), re.compile(rf"({whole})|(?:{begun})\Z")


def _begun(stop: str) -> str:
    """Returns a pattern of the beginnings of a text: a(?:b(?:c)?)? for abcd."""
    pattern = ""
    for character in reversed(stop[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern or "(?!)"
