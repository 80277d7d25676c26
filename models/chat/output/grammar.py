"""Builds grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...support.json_forms import SPACE, STRICT

#: Returns the id of a text that is one control token, or None.
TokenId = Callable[[str], int | None]


class Rules:
    """Rules of a grammar under construction."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules: list[str] = []
        self._count = 0

    def add(self, name: str, expression: str, attributes: str = "") -> str:
        """Adds a rule; returns its name, which is made unique."""
        unique = self.declare(name)
        self.define(unique, expression, attributes)
        return unique

    def declare(self, name: str) -> str:
        """Returns the unique name of a rule that is defined later, so that it may be recursive."""
        self._count += 1
        return f"{name}_{self._count}"

    def define(self, name: str, expression: str, attributes: str = "") -> None:
        """Defines a declared rule."""
        self._rules.append(f"{name}{attributes}: {expression}")

    def add_text(
        self,
        stop: str = "",
        *,
        without: Sequence[str] = (),
        braces: bool = True,
        most_tokens: int | None = None,
    ) -> str:
        """Adds a rule of any text, which has no control tokens; returns its name.

        Args:
          stop: a mark behind the text, which the rule includes and whose first occurrence ends the
            text; "" for none.
          without: marks that the text must not contain.
          braces: whether the first character may be "{", also behind white space.
          most_tokens: tokens before `stop`, which must be a control token; None means no limit.
        """
        self._count += 1
        number, wanted = self._count, ["/(?s:.*)/"]
        if without := [mark for mark in without if mark != stop and not self.is_token(mark)]:
            any_of = " | ".join(map(quoted, without))
            self._rules.append(f"HAS_{number}: /(?s:.*)/ ({any_of}) /(?s:.*)/")
            wanted.append(f"~HAS_{number}")
        if not braces:
            self._rules.append(f"BRACE_{number}: /[ \\t\\r\\n]*\\{{(?s:.*)/")
            wanted.append(f"~BRACE_{number}")
        text = " & ".join(wanted)
        if len(wanted) > 1:
            self._rules.append(f"TEXT_{number}: {text}")
            text = f"TEXT_{number}"
        if stop and not self.is_token(stop):
            return self.add("text", text, f"[suffix={quoted(stop)}]")
        if most_tokens is not None:
            text = self.add("text", text, f"[max_tokens={most_tokens}]")
        return self.add("text", f"{text} {self.mark(stop)}" if stop else text)

    def add_json(self, schema: Mapping[str, Any]) -> str:
        """Adds a rule of JSON that satisfies a schema; returns its name."""
        options = {"x-guidance": {"whitespace_pattern": SPACE, **STRICT}}
        return self.add("json", f"%json {json.dumps({**schema, **options}, ensure_ascii=False)}")

    def is_token(self, text: str) -> bool:
        """Returns whether a text is one control token."""
        return self._token_id(text) is not None

    def mark(self, text: str) -> str:
        """Returns an expression of a mark: a control token, or literal text."""
        token = self._token_id(text)
        return quoted(text) if token is None else f"<[{token}]>"

    def marks(self, texts: tuple[str, ...]) -> str:
        """Returns an expression of marks in sequence."""
        return " ".join(map(self.mark, texts))

    def add_list(self, items: Sequence[tuple[str, bool]], comma: str) -> str:
        """Adds rules of items in sequence, separated by commas; returns an expression.

        items: expression of each item, and whether it is required.
        """
        later = {False: '""', True: '""'}  # by whether an item precedes
        for item, required in reversed(items):
            rest = later[True]
            later = {
                follows: self.add(
                    "list",
                    f"{quoted(comma) if follows else ''} {item} {rest}"
                    + ("" if required else f" | {later[follows]}"),
                )
                for follows in (False, True)
            }
        return later[False]

    def text(self, start: str) -> str:
        """Returns the grammar whose answers are an expression."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def quoted(text: str) -> str:
    """Returns an expression of literal text."""
    return json.dumps(text, ensure_ascii=False)
