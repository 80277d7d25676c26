"""Reads literals that are not JSON, such as Python's, and passes them on as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from .json_text import escaped
from .source import Reading, Sink, Source

_MOST_DEPTH = 64
_MOST_WORD = 400
_WORD = re.compile(r"[^,\]})]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
#: Text behind the quote that ends a string: models do not escape every quote inside it.
_AFTER_STRING = re.compile(r"[ \t\r\n]{0,8}(?:[,\]}):]|\Z)")
_BEGUN_AFTER_STRING = re.compile(r"[ \t\r\n]{0,8}\Z")
_PYTHON_ESCAPE = re.compile(
    r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|[\s\S]"
)
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_LONGEST_ESCAPE = 9
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}


@dataclass(frozen=True)
class Dialect:
    """Notation of literals. What may be written in several forms is read in all of them.

    Attributes:
      quotes: marks that begin and end a string; escapes: a backslash escapes in it.
      true, false, none: texts of the constants.
      colon, comma: texts behind a key and between items; bare_keys: keys have no quotes.
    """

    quotes: tuple[str, ...]
    escapes: bool
    true: str
    false: str
    none: str
    colon: str = ": "
    comma: str = ", "
    bare_keys: bool = False


PYTHON = Dialect(('"', "'"), True, "True", "False", "None")
GEMMA = Dialect(('<|"|>',), False, "true", "false", "null", ":", ",", bare_keys=True)


def literal_to_json(text: str) -> str | None:
    """Returns a list or dict in Python's notation as JSON; None if the text is neither."""
    if not text.startswith(("[", "{")):
        return None
    source = Source()
    source.push(text)
    source.ended = True
    pieces: list[str] = []
    reading = read_literal(source, PYTHON, pieces.append)
    try:
        while True:
            next(reading)
    except StopIteration as end:
        return "".join(pieces) if end.value and source.at == len(text) else None


def read_literal(source: Source, dialect: Dialect, sink: Sink, depth: int = 0) -> Reading[bool]:
    """Passes a literal on as JSON; False where it is none or ends too early."""
    yield from source.spaces()
    if (quote := (yield from source.choose(dialect.quotes))) is not None:
        return (yield from _read_string(source, dialect, quote, sink))
    character = yield from source.peek()
    if character not in _CLOSERS:
        return (yield from _read_word(source, sink))
    if depth >= _MOST_DEPTH:
        return False
    source.at += 1
    keyed, closer = character == "{", _CLOSERS[character]
    sink("{" if keyed else "[")
    first = True
    while True:
        following = yield from source.spaces()
        if following == "," and not first:
            source.at += 1
            following = yield from source.spaces()
        elif not first and following != closer:
            return False
        if following == closer:
            source.at += 1
            sink("}" if keyed else "]")
            return True
        sink("" if first else ", ")
        if keyed and not (yield from _read_key(source, dialect, sink)):
            return False
        if not (yield from read_literal(source, dialect, sink, depth + 1)):
            return False
        first = False


def _read_key(source: Source, dialect: Dialect, sink: Sink) -> Reading[bool]:
    """Passes the key of a dict on, with or without quotes, and its colon."""
    if (quote := (yield from source.choose(dialect.quotes))) is not None:
        if not (yield from _read_string(source, dialect, quote, sink)):
            return False
        if (yield from source.spaces()) != ":":
            return False
        source.at += 1
    else:
        name = yield from read_name(source, ":")
        if name is None:
            return False
        sink(json.dumps(name.strip(), ensure_ascii=False))
    sink(": ")
    return True


def read_name(source: Source, stop: str) -> Reading[str | None]:
    """Reads a short name up to a stop, and the stop; None, and nothing, if none comes."""
    while (end := source.text.find(stop, source.at, source.at + _MOST_WORD)) < 0:
        if source.ended or len(source.text) - source.at >= _MOST_WORD:
            source.short = source.ended
            return None
        yield
    name = source.text[source.at : end]
    source.at = end + len(stop)
    return name


def read_cut_name(source: Source, stop: str) -> str | None:
    """Reads a name that the end of the answer cuts off; None, and nothing, if it is no name."""
    rest = source.text[source.at :]
    if not source.ended or len(rest) >= _MOST_WORD:
        return None
    source.at = len(source.text)
    return rest.partition(stop)[0].strip()


def _read_word(source: Source, sink: Sink) -> Reading[bool]:
    while True:
        match = _WORD.match(source.text, source.at)
        assert match is not None
        whole = match.end() < len(source.text)
        if whole or source.ended or len(match[0]) > _MOST_WORD:
            break
        yield
    word = match[0].strip()
    if not word or len(match[0]) > _MOST_WORD:
        source.short = not whole
        return False
    source.at = match.end()
    number = _NUMBER.fullmatch(word)
    known = _WORDS.get(word, word if number else None)
    source.short = not whole
    text = known or json.dumps(word, ensure_ascii=False)
    sink(text if whole or known else text[:-1])  # the word may be cut off
    return whole


def _read_string(source: Source, dialect: Dialect, quote: str, sink: Sink) -> Reading[bool]:
    def piece(text: str) -> None:
        sink(escaped(text))

    sink('"')
    stops = (quote, "\\") if dialect.escapes else (quote,)
    while True:
        stop = yield from source.until(stops, piece)
        if stop is None:
            source.short = True
            return False
        if stop == "\\":
            yield from _read_escape(source, sink)
        elif not dialect.escapes or (yield from _ends(source)):
            sink('"')
            return True
        else:
            piece(quote)


def _ends(source: Source) -> Reading[bool]:
    """Returns whether the quote that was read ends the string."""
    while _BEGUN_AFTER_STRING.match(source.text, source.at) and not source.ended:
        yield
    return _AFTER_STRING.match(source.text, source.at) is not None


def _read_escape(source: Source, sink: Sink) -> Reading[None]:
    """Passes on what follows a backslash."""
    begins = yield from source.peek()
    if begins in ("x", "u", "U"):
        while len(source.text) - source.at < _LONGEST_ESCAPE and not source.ended:
            if not _may_be_number(source.text[source.at :]):
                break
            yield
    match = _PYTHON_ESCAPE.match(source.text, source.at)
    if match is None:
        return
    source.at = match.end()
    text = match[0]
    if text[0] == "u" and len(text) > 1:
        sink("\\" + text)  # a surrogate's half is no character
    elif len(text) > 1:
        sink(escaped(chr(int(text[1:], 16))))
    elif text in "\\'\"":
        sink(escaped(text))
    else:
        sink(escaped(_SIMPLE_ESCAPES.get(text, "\\" + text)))


def _may_be_number(text: str) -> bool:
    sizes = {"x": 2, "u": 4, "U": 8}
    return len(text) <= sizes[text[0]] and all(c in "0123456789abcdefABCDEF" for c in text[1:])
