"""Makes JSON schemas safe for llguidance, which accepts some that it does not enforce.

Schemas whose answers could be invalid, or that take very long, are refused or written differently.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from .constraint import ConstraintError

#: Keywords whose values are data, not schemas.
_DATA = frozenset(("const", "enum", "default", "examples"))
#: Keywords whose values have names of users, not keywords.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BOUNDS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"

#: Larger integers are rounded, as numbers of 64 bits.
_MOST_INTEGER = 1 << 53
#: The time and memory of compiling `multipleOf` grow with it.
_MOST_MULTIPLE = 5_000

#: Parts of a regular expression: an escape, the beginning or end of a class, any character.
_PART = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
#: Control characters, which strings of JSON do not have as they are.
_CONTROLS = r"\x00-\x1f"


def prepared(text: str) -> str:
    """Returns a JSON schema as llguidance should take it; raises ConstraintError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from None
    return json.dumps(prepared_schema(schema), ensure_ascii=False)


def prepared_schema(schema: Any) -> dict[str, Any]:
    """Returns a JSON schema as llguidance should take it; raises ConstraintError."""
    if schema is False:
        raise ConstraintError("no JSON has the schema `false`")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConstraintError("a schema must be an object or a boolean")
    try:
        _check_multiples(schema)
        found: dict[str, Any] = _schema(schema)
        return found
    except RecursionError:
        raise ConstraintError("the schema is nested too deeply") from None


def _schema(schema: Any) -> Any:
    """Returns a schema, or a list of them, with safe keywords."""
    if isinstance(schema, list):
        return [_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    _check(schema)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            found[key] = value
        elif key in _NAMED and isinstance(value, dict):
            rename = _pattern if key == "patternProperties" else str
            found[key] = {rename(name): _schema(inner) for name, inner in value.items()}
        elif key == "pattern" and isinstance(value, str):
            found[key] = _pattern(value)
        elif not (key == "uniqueItems" and value is False):  # which says nothing
            found[key] = _schema(value)
    return found


def _check(schema: dict[str, Any]) -> None:
    """Raises ConstraintError for keywords that would not be enforced."""
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least >= 2:
        raise ConstraintError("minProperties above 1 is not supported")
    if "prefixItems" in schema and "additionalItems" in schema:
        raise ConstraintError("additionalItems beside prefixItems is not supported: use items")
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        raise ConstraintError("items beside prefixItems must be a schema")
    numbers = [schema[name] for name in (*_BOUNDS, "const") if name in schema]
    for number in _numbers([*numbers, schema.get("enum")]):
        if abs(number) > _MOST_INTEGER and not isinstance(number, float):
            raise ConstraintError(f"the integer {number} is not supported: it exceeds 2^53")


def _numbers(value: Any) -> Iterator[int | float]:
    """Yields the numbers in JSON data."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)


def _check_multiples(schema: dict[str, Any]) -> None:
    """Raises ConstraintError if all multiples of a schema together are too large."""
    product = 1
    for value in _multiples(schema):
        if not 0 < value < math.inf:
            continue  # malformed, which llguidance says
        product = math.lcm(product, Fraction(str(value)).numerator)
        if product > _MOST_MULTIPLE:
            raise ConstraintError(f"multipleOf above {_MOST_MULTIPLE} in all is not supported")


def _multiples(schema: Any) -> Iterator[float]:
    if isinstance(schema, dict):
        value = schema.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
    if isinstance(schema, list | dict):
        for inner in schema.values() if isinstance(schema, dict) else schema:
            yield from _multiples(inner)


def _pattern(pattern: str) -> str:
    """Returns a regular expression whose classes mean what they do in JavaScript.

    Within a class, Rust's syntax has classes and operators. A class of all but quotes or
    backslashes would allow these if it allows control characters, which JSON escapes.
    """
    found, inside, excludes = "", False, False
    for match in _PART.finditer(pattern):
        part = match[0]
        if inside and (part[0] == "[" or pattern[match.start() :][:2] in ("&&", "--", "~~")):
            raise ConstraintError(f"pattern {pattern!r:.80}: a class has [, &&, -- or ~~")
        if not inside and part[0] == "[":
            inside, excludes = True, part.startswith("[^")
            part = part.replace("[^", f"[^{_CONTROLS}") if excludes else part
        elif inside and part == "]":
            inside = False
        found += part
    return found
