"""Tools that a request offers: their names, and the types of their parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .json_text import parsed
from .literals import literal_to_json

Schema = Mapping[str, Any]

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_STRING = frozenset({"string"})
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MOST_REFERENCES = 16
_ROOT = "root"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
      parameters: JSON schema of the arguments.
    """

    name: str
    parameters: Schema

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        found = self.parameters.get("required")
        return frozenset(found) if isinstance(found, list) else frozenset()

    def schema_of(self, parameter: str) -> Schema:
        """Returns a parameter's schema on its own: its references point into a copy of the root."""
        found = self.properties.get(parameter)
        if not isinstance(found, Mapping):
            return {}
        if next(_references(found), None) is None:
            return found
        return {**_moved(found), "$defs": {_ROOT: _moved(self.parameters)}}

    def types_of(self, parameter: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have; all of them if nothing tells."""
        return frozenset(_types(self.properties.get(parameter), self.parameters, 0)) or _TYPES

    def is_text(self, parameter: str) -> bool:
        """Returns whether a parameter is always a string."""
        return self.types_of(parameter) == _STRING

    def converted(self, parameter: str, text: str) -> str:
        """Returns a parameter's raw text as JSON of a type that its schema allows.

        Text that has none of the types is a string.
        """
        types, stripped = self.types_of(parameter), text.strip()
        word = _WORDS.get(stripped.lower())
        if word is not None and ("null" if word == "null" else "boolean") in types:
            return word
        if "integer" in types and _INTEGER.fullmatch(stripped):
            return stripped
        if types & {"number", "array", "object"}:
            try:
                value = parsed(stripped)
            except ValueError:  # templates print Python's form of objects
                stripped = literal_to_json(stripped) or "null"
                value = parsed(stripped)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if (
                (number and "number" in types)
                or (isinstance(value, list) and "array" in types)
                or (isinstance(value, dict) and "object" in types)
            ):
                return stripped
        return json.dumps(text, ensure_ascii=False)


def tools_of(tools: Sequence[Any] | None) -> dict[str, Tool]:
    """Returns tools by name, from descriptions as in OpenAI's API; others are ignored."""
    found = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        name = function.get("name")
        schema = function.get("parameters", function.get("input_schema"))
        if isinstance(name, str) and name:
            found[name] = Tool(name, schema if isinstance(schema, Mapping) else {})
    return found


def _types(schema: object, root: Schema, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(resolved(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            for part in parts:
                yield from _types(part, root, depth + 1)
    kind = schema.get("type")
    if kind is not None:
        yield from (k for k in (kind if isinstance(kind, list) else [kind]) if k in _TYPES)
    elif isinstance(values := schema.get("enum"), list):
        yield from map(_type_of, values)
    elif "const" in schema:
        yield _type_of(schema["const"])


def resolved(reference: str, root: Schema) -> object:
    """Returns the part of a schema to which a local reference points; None if there is none."""
    found: object = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _references(schema: object) -> Iterator[str]:
    """Yields the references in a schema."""
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _moved(schema: Any) -> Any:
    """Returns a schema whose local references point to the definition `_ROOT`."""
    if isinstance(schema, list):
        return [_moved(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_ROOT}{reference[1:].rstrip('/')}"
    return moved


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")
