"""Values of arguments: JSON as it arrives, literals, and texts converted by a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_q4k.models.chat.output import families
from jax_q4k.models.chat.output.json_text import JsonScanner
from jax_q4k.models.chat.output.literals import literal_to_json
from jax_q4k.models.chat.output.tools import Tool

from .conversations import TOOLS, joined

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def scanned(text: str, size: int) -> tuple[str, JsonScanner, int]:
    """Returns what a scanner passes on of a text that comes in pieces of a size."""
    scanner, out, unread, read = JsonScanner(), [], "", 0
    for start in range(0, len(text), size):
        unread += text[start : start + size]
        piece, at = scanner.feed(unread, 0, start + size >= len(text))
        out.append(piece)
        unread, read = unread[at:], read + at
    return "".join(out), scanner, read


@settings(deadline=None, max_examples=200)
@given(VALUES, st.integers(1, 7), st.booleans())
def test_json_passes_unchanged(value: Any, size: int, ascii_only: bool) -> None:
    text = json.dumps({"a": value}, ensure_ascii=ascii_only)
    out, scanner, read = scanned(text + " rest", size)
    assert out == text and scanner.done and read == len(text)


@pytest.mark.parametrize(
    "text, passed",
    [
        ("{]", "{"),
        ('{"a" 1}', '{"a" '),
        ('{"a": }', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a": 1.}', '{"a": '),
        ('{"a": nul}', '{"a": '),
        ('{"a": NaN}', '{"a": '),
        ("{a: 1}", "{"),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": [1,]}', '{"a": [1,'),
        ('{"a": [}', '{"a": ['),
        ('{"a": "x" "y"}', '{"a": "x" '),
        ('{"a": ' + "9" * 500 + "}", '{"a": '),
        ("[" * 200, "[" * 128),
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_where_text_stops_being_json(text: str, passed: str, size: int) -> None:
    out, scanner, _ = scanned(text, size)
    assert scanner.failed and out == passed


@pytest.mark.parametrize("size", [1, 2, 100])
def test_faults_in_strings_are_repaired(size: int) -> None:
    out, scanner, _ = scanned('{"a": "x\n\t\\d \\u12G \\" \\u00e9"}', size)
    assert scanner.done and json.loads(out) == {"a": 'x\n\t\\d \\u12G " é'}


@settings(deadline=None, max_examples=200)
@given(VALUES, st.integers(1, 5))
def test_python_literals(value: Any, size: int) -> None:
    """Finite Python values come back, whatever Python prints for them."""
    text = f"<|tool_call_start|>[get(city={value!r}, days=2)]<|tool_call_end|>"
    parser = families.LFM2.parser(TOOLS)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    events = [*(e for piece in pieces for e in parser.push(piece)), *parser.finish()]
    if "'" not in str(value) and '"' not in str(value):  # quotes may seem to end a string
        (part,) = joined(events)
        assert json.loads(part[2]) == {"city": value, "days": 2}


@pytest.mark.parametrize(
    "text, found",
    [
        ("[1, 'a', (True, None)]", [1, "a", [True, None]]),
        ("{'a': {}, 'b': []}", {"a": {}, "b": []}),
        (r"['\x41\u0042\U00000043\n\'\d']", ["ABC\n'\\d"]),
        ("[1", None),
        ("[1] x", None),
        ("x", None),
        ("[" * 100, None),
    ],
)
def test_literals_of_python(text: str, found: Any) -> None:
    converted = literal_to_json(text)
    assert (None if converted is None else json.loads(converted)) == found


def tool(schema: Any) -> Tool:
    return Tool("f", {"properties": {"x": schema}, "$defs": {"i": {"type": "integer"}}})


@pytest.mark.parametrize(
    "schema, text, found",
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "05", "05"),
        ({"type": "integer"}, "9" * 400, "9" * 400),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "x", "x"),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "array"}, "[1", "[1"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"$ref": "#/$defs/i"}, "5", 5),
        ({"$ref": "#/properties/x"}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": "1"}, "1", "1"),
        ({}, "5", 5),
        ({}, "five", "five"),
        (True, "[1]", [1]),
        ({"type": "unknown"}, "x", "x"),
    ],
)
def test_texts_are_converted_by_the_schema(schema: Any, text: str, found: Any) -> None:
    assert json.loads(tool(schema).converted("x", text)) == found
    assert tool(schema).is_text("x") == (
        schema in ({"type": "string"}, {"enum": ["1", "2"]}, {"const": "1"})
    )
