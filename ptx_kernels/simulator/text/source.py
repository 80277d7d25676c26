"""PTX text without comments and debug directives; creates errors that name its lines."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator

from ..errors import ParseError

#: Comments, and line-oriented debug directives (which lack a ;).
_COMMENT = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*(?:\.loc|\.file|@@DWARF)\b[^\n]*", re.DOTALL | re.MULTILINE
)
_SECTION = re.compile(r"\.section\s+\S+\s*\{[^}]*\}")


class Source:
    """PTX text without comments.

    Attributes:
      kernel: name of the entry, for errors.
    """

    def __init__(self, text: str) -> None:
        def blank(match: re.Match[str]) -> str:
            return re.sub(r"[^\n]", " ", match.group())

        self.text = _SECTION.sub(blank, _COMMENT.sub(blank, text))
        self.kernel = "?"
        self._lines = text.split("\n")
        self._newlines = [m.start() for m in re.finditer("\n", text)]

    def fail(self, position: int, message: str) -> ParseError:
        line = self.line(position)
        shown = self._lines[line - 1].strip() if line <= len(self._lines) else ""
        return ParseError(f"kernel {self.kernel}: {message}\n  line {line}: {shown}", line)

    def line(self, position: int) -> int:
        """Returns the number of the line at a position, from 1."""
        return bisect_left(self._newlines, position) + 1

    def skip_space(self, position: int) -> int:
        while position < len(self.text) and self.text[position].isspace():
            position += 1
        return position


def parts(text: str) -> list[str]:
    """Splits a list at commas outside of braces and parentheses; returns the items."""
    return [part for part in map(str.strip, _split(text)) if part]


def _split(text: str) -> Iterator[str]:
    if "{" not in text and "(" not in text:
        yield from text.split(",")
        return
    depth = start = 0
    for i, character in enumerate(text):
        if character in "({":
            depth += 1
        elif character in ")}":
            depth -= 1
        elif character == "," and not depth:
            yield text[start:i]
            start = i + 1
    yield text[start:]
