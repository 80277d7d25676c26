"""Grammar rules of literals that satisfy a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .grammar import Rules, quoted
from .literals import Dialect
from .tools import resolved

_MOST_DEPTH = 32
_NAME = "/[A-Za-z_][A-Za-z0-9_]*/"
_DOUBLE = r'/"(?:[^"\\\x00-\x1f]|\\["\\nt])*"/'
_NUMBER = r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?/"
_INTEGER = r"/-?(?:0|[1-9][0-9]*)/"


class LiteralRules:
    """Rules for the parameters of one tool, in a dialect.

    The schema's types, enums, items and properties hold; its patterns and limits do not.
    """

    def __init__(self, dialect: Dialect, rules: Rules, root: Mapping[str, Any]) -> None:
        self._dialect, self._rules, self._root = dialect, rules, root
        self._named: dict[str, str] = {}  # rules of references; "" is any value

    def members(
        self, schema: Mapping[str, Any], equals: str, comma: str, *, bare: bool, depth: int = 0
    ) -> str:
        """Returns an expression of an object's properties, without brackets."""
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            properties = {}
        needed = set(required) if isinstance(required, list) else set()
        items = []
        for key, value in properties.items():
            start = quoted(key) if bare else self._string(key)
            pair = f"{start} {quoted(equals)} ({self.value(value, depth + 1)})"
            items.append((self._rules.add("pair", pair), key in needed))
        return self._rules.add_list(items, comma)

    def value(self, schema: object, depth: int = 0) -> str:
        """Returns an expression of a value."""
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, depth)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            return " | ".join(map(self._constant, choices))
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(key), list) and parts:
                return " | ".join(self.value(part, depth + 1) for part in parts)
        kinds = schema.get("type")
        listed = kinds if isinstance(kinds, list) and kinds else [kinds]
        return " | ".join(self._of_type(kind, schema, depth) for kind in listed)

    def _referred(self, reference: str, depth: int) -> str:
        """Returns the rule of a reference, which may be recursive."""
        if reference not in self._named:
            self._named[reference] = name = self._rules.declare("value")
            target = resolved(reference, self._root)
            endless = isinstance(target, Mapping) and target.get("$ref") == reference
            self._rules.define(name, self._any() if endless else self.value(target, depth + 1))
        return self._named[reference]

    def _of_type(self, kind: object, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._text()
        if kind == "integer":
            return _INTEGER
        if kind == "number":
            return _NUMBER
        if kind == "boolean":
            return f"{self._constant(True)} | {self._constant(False)}"
        if kind == "null":
            return self._constant(None)
        if kind == "array":
            return self._array(self.value(schema.get("items"), depth + 1))
        if kind == "object":
            if not schema.get("properties"):
                return self._object(self._any())
            dialect = self._dialect
            members = self.members(
                schema, dialect.colon, dialect.comma, bare=dialect.bare_keys, depth=depth
            )
            return f'"{{" {members} "}}"'
        return self._any()

    def _array(self, item: str) -> str:
        return f'"[" (({item}) ({quoted(self._dialect.comma)} ({item}))*)? "]"'

    def _object(self, value: str) -> str:
        key = _NAME if self._dialect.bare_keys else _DOUBLE
        pair = f"{key} {quoted(self._dialect.colon)} ({value})"
        return f'"{{" ({pair} ({quoted(self._dialect.comma)} {pair})*)? "}}"'

    def _any(self) -> str:
        """Returns the rule of any value."""
        if "" not in self._named:
            self._named[""] = name = self._rules.declare("any")
            simple = [self._text(), _NUMBER, *map(self._constant, (True, False, None))]
            self._rules.define(name, " | ".join([*simple, self._array(name), self._object(name)]))
        return self._named[""]

    def _text(self) -> str:
        if self._dialect.escapes:
            return _DOUBLE
        (quote,) = self._dialect.quotes
        return f"{self._rules.mark(quote)} {self._rules.add_text(quote)}"

    def _string(self, text: str) -> str:
        if self._dialect.escapes:
            return quoted(json.dumps(text, ensure_ascii=False))
        (quote,) = self._dialect.quotes
        return self._rules.marks((quote, text, quote))

    def _constant(self, value: object) -> str:
        """Returns an expression of a value; lists and objects stand in JSON."""
        if isinstance(value, str):
            return self._string(value)
        if value is None:
            return quoted(self._dialect.none)
        if isinstance(value, bool):
            return quoted(self._dialect.true if value else self._dialect.false)
        return quoted(json.dumps(value, ensure_ascii=False))
