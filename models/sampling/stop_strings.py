"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

#: Marks stand in a text for tokens that it does not show: no decoded text holds lone surrogates.
_FIRST_MARK, _LAST_MARK = 0xD800, 0xDFFF
_MARKS = re.compile("[\ud800-\udfff]+")


class StopStrings:
    """Passes text on until a stop string completes, and holds back a beginning of one.

    The match that completes first wins, the longest of those that complete together; so the outcome
    does not depend on how the text is cut into pieces. Neither the stop string nor the text behind
    it is passed on.

    Control tokens have no text. A stop string that holds a control token's text matches that token
    in its place, as well as the text: "<|im_end|>\\n" is the token <|im_end|> and a line end.

    Attributes:
      marks: ids of control tokens that stop strings name -> what to push where one stands.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        """Raises TypeError on a stop that is not a str, ValueError on an empty one."""
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop string is of type {type(stop).__name__}, expected str")
            if not stop:
                raise ValueError("stop string is empty, expected at least one character")
        self.marks: dict[int, str] = {}
        # Forms in the text -> the stop strings; those that no text holds would be taken for marks.
        self._forms = [(stop, stop) for stop in self.stops if not _MARKS.search(stop)]
        self.matched: str | None = None
        self._held = ""

    def read_controls(self, cut: Callable[[str], Sequence[str | int]]) -> StopStrings:
        """Takes stop strings as control tokens, too; `cut` cuts a text into texts and their ids."""
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
        """The text that is certain to belong to the output; check `matched` afterwards."""
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
        """The text still held back, once no more will come."""
        return self._release(len(self._held))

    def _partial(self) -> int:
        """Characters at the end of the held text that begin a stop string."""
        longest = max((len(form) for form, _ in self._forms), default=1) - 1
        for size in range(min(len(self._held), longest), 0, -1):
            if any(form.startswith(self._held[-size:]) for form, _ in self._forms):
                return size
        return 0

    def _release(self, count: int) -> str:
        output, self._held = self._held[:count], self._held[count:]
        return _MARKS.sub("", output)
