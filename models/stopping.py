"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on until a stop string completes, and holds back a beginning of one.

    The match that completes first wins, the longest of those that complete together; so the outcome
    does not depend on how the text is cut into pieces. Neither the stop string nor the text behind
    it is passed on.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        """Raises TypeError on a stop that is not a str, ValueError on an empty one."""
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop string is of type {type(stop).__name__}, expected str")
            if not stop:
                raise ValueError("stop string is empty, expected at least one character")
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to belong to the output; check `matched` afterwards."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [
            (at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0
        ]
        if found:
            _, at, self.matched = min(found)
            output, self._held = self._held[:at], ""
            return output
        return self._release(len(self._held) - self._partial())

    def finish(self) -> str:
        """The text still held back, once no more will come."""
        return self._release(len(self._held))

    def _partial(self) -> int:
        """Characters at the end of the held text that begin a stop string."""
        longest = min(len(self._held), max(map(len, self.stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self.stops):
                return size
        return 0

    def _release(self, count: int) -> str:
        output, self._held = self._held[:count], self._held[count:]
        return output
