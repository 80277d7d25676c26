"""Matches stop strings in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

#: Characters that mark tokens without text; decoded text never contains lone surrogates.
_FIRST_MARK, _LAST_MARK = 0xD800, 0xDFFF
_MARKS = re.compile("[\ud800-\udfff]+")


class StopStrings:
    """Passes text on until a stop string is complete, and holds back a possible prefix of one.

    The match that completes first wins, or the longest of those that complete together, so the
    result does not depend on how the text is split. Neither the stop string nor the text after it
    is passed on.

    Control tokens have no text. A stop string that contains the name of a control token matches
    that token as well as the literal text: "<|im_end|>\\n" is the token <|im_end|> and a newline.

    Attributes:
      marks: id of a control token in a stop string -> character to push in its place.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        """Raises TypeError for a stop that is not a str, ValueError for an empty one."""
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop string is of type {type(stop).__name__}, expected str")
            if not stop:
                raise ValueError("stop string is empty, expected at least one character")
        self.marks: dict[int, str] = {}
        # (form in the text, stop string); stops with surrogates would be mistaken for marks.
        self._forms = [(stop, stop) for stop in self.stops if not _MARKS.search(stop)]
        self.matched: str | None = None
        self._held = ""

    def read_controls(self, cut: Callable[[str], Sequence[str | int]]) -> StopStrings:
        """Makes stop strings also match control tokens that they spell; returns self.

        cut: splits a text into ordinary text and ids of control tokens.
        """
        for stop in self.stops:
            parts = cut(stop)
            ids = [part for part in parts if isinstance(part, int)]
            for token in ids:
                code = _FIRST_MARK + len(self.marks)
                if token not in self.marks and code > _LAST_MARK:
                    raise ValueError(
                        f"stop strings name more than {len(self.marks)} control tokens"
                    )
                self.marks.setdefault(token, chr(code))
            if ids:
                form = "".join(self.marks[p] if isinstance(p, int) else p for p in parts)
                self._forms.append((form, stop))
        return self

    def push(self, text: str) -> str:
        """Adds text; returns the text that can no longer become part of a stop string.

        Check `matched` afterwards.
        """
        if self.matched is not None:
            return ""
        self._held += text
        found = [
            (at + len(form), at, stop)
            for form, stop in self._forms
            if (at := self._held.find(form)) >= 0
        ]
        if found:
            _, at, self.matched = min(found)
            output, self._held = self._held[:at], ""
            return _MARKS.sub("", output)
        return self._release(len(self._held) - self._partial())

    def finish(self) -> str:
        """Returns the text still held back, at the end of the input."""
        return self._release(len(self._held))

    def _partial(self) -> int:
        """Returns how many characters at the end of the held text may begin a stop string."""
        longest = max((len(form) for form, _ in self._forms), default=1) - 1
        for size in range(min(len(self._held), longest), 0, -1):
            if any(form.startswith(self._held[-size:]) for form, _ in self._forms):
                return size
        return 0

    def _release(self, count: int) -> str:
        output, self._held = self._held[:count], self._held[count:]
        return _MARKS.sub("", output)
