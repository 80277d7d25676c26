"""Reads JSON as it arrives, so that each piece passed on extends a valid prefix of a JSON text."""

from __future__ import annotations

import json
import re
from typing import Any

from .source import Reading, Sink, Source

_MOST_DEPTH = 128
#: Characters of a number or name; json.loads refuses integers of more than 4300 digits.
_MOST_WORD = 400
#: Characters of a key or value that is read as a whole.
_MOST_STRING = 512

_SPACES = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')


class JsonScanner:
    """Checks one JSON value, which may come in pieces.

    Characters pass unchanged, with two exceptions that JSON forbids and models write: control
    characters in strings, and a backslash that begins no escape. They are escaped.

    Attributes:
      done: the value is complete; failed: the text is not JSON.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._closers: list[str] = []
        self._state = "value"
        self._is_key = False

    def feed(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        """Reads `text` from `at`; returns what to pass on, and the position of the first unread.

        The start of an escape, number or name at the end of the text is left unread, unless the
        text has ended.
        """
        out: list[str] = []
        while not self.done and not self.failed and at < len(text):
            before = at
            step = self._string if self._state == "string" else self._step
            at = step(text, at, ended, out)
            if at == before:
                break
        return "".join(out), at

    def _string(self, text: str, at: int, ended: bool, out: list[str]) -> int:
        match = _PLAIN.match(text, at)
        assert match is not None
        if match.end() > at:
            out.append(match[0])
            return match.end()
        character = text[at]
        if character == '"':
            if self._is_key:
                self._state, self._is_key = "colon", False
            else:
                self._end_value()
        elif character != "\\":
            out.append(escaped(character))
            return at + 1
        elif escape := _ESCAPE.match(text, at):
            out.append(escape[0])
            return escape.end()
        elif begun := _BEGUN_ESCAPE.match(text, at):
            if ended:
                out.append(begun[0])
                return begun.end()
            return at
        else:
            character = r"\\"
        out.append(character)
        return at + 1

    def _step(self, text: str, at: int, ended: bool, out: list[str]) -> int:
        """Reads white space, a mark, or a word."""
        match = _SPACES.match(text, at)
        assert match is not None
        if match.end() > at:
            out.append(match[0])
            return match.end()
        character, state = text[at], self._state
        if state in ("value", "value_or_end") and character not in "]}:,":
            if character not in '"{[':
                return self._word(text, at, ended, out)
            self._open(character)
        elif state in ("key", "key_or_end") and character == '"':
            self._state, self._is_key = "string", True
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state == "next" and character == ",":
            self._state = "key" if self._closers[-1] == "}" else "value"
        elif state in ("next", "key_or_end", "value_or_end") and character == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        else:
            self.failed = True
            return at
        if not self.failed:
            out.append(character)
        return at if self.failed else at + 1

    def _open(self, character: str) -> None:
        if character == '"':
            self._state, self._is_key = "string", False
            return
        self.failed = len(self._closers) >= _MOST_DEPTH
        self._closers.append("}" if character == "{" else "]")
        self._state = "key_or_end" if character == "{" else "value_or_end"

    def _word(self, text: str, at: int, ended: bool, out: list[str]) -> int:
        match = _WORD_CHARACTERS.match(text, at)
        assert match is not None
        whole = match.end() < len(text)
        if not whole and not ended and 0 < match.end() - at <= _MOST_WORD:
            return at
        valid = _WORD.fullmatch(match[0]) is not None
        if not whole and ended and not valid:
            valid = any(word.startswith(match[0]) for word in ("true", "false", "null", "-"))
        if not valid or len(match[0]) > _MOST_WORD:
            self.failed = True
            return at
        out.append(match[0])
        self._end_value()
        return match.end()

    def _end_value(self) -> None:
        self._state = "next"
        self.done = not self._closers


def escaped(text: str) -> str:
    """Returns a text as the inside of a JSON string."""
    if _PLAIN.fullmatch(text):  # most text
        return text
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parsed(text: str) -> Any:
    """Parses JSON; raises ValueError for anything that is not, also if nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def read_value(source: Source, sink: Sink) -> Reading[bool]:
    """Passes a JSON value on as it arrives; False where it stops being JSON or ends too early."""
    scanner = JsonScanner()
    while True:
        text, source.at = scanner.feed(source.text, source.at, source.ended)
        if text:
            sink(text)
        if scanner.done:
            return True
        if scanner.failed:
            return False
        if source.ended:
            source.short = True
            return False
        yield


def read_string(source: Source) -> Reading[str | None]:
    """Reads a short JSON string as a whole; None if none comes."""
    if (yield from source.peek()) != '"':
        return None
    while (match := _STRING.match(source.text, source.at)) is None:
        rest = len(source.text) - source.at
        if source.ended or rest > _MOST_STRING or "\n" in source.text[source.at :]:
            source.short = source.ended
            return None
        yield
    source.at = match.end()
    try:
        text = parsed(match[0])
    except ValueError:
        return None
    return text if isinstance(text, str) else None
