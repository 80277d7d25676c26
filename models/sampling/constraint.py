"""Defines Constraint, the form that an answer must have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

#: Most bytes of a constraint's text.
MOST_BYTES = 256 << 10


class ConstraintError(ValueError):
    """A constraint is malformed or not supported, or an answer cannot satisfy it."""


@dataclasses.dataclass(frozen=True)
class Thought:
    """A thought that precedes the constrained part of an answer.

    Attributes:
      end: text behind whose first occurrence the form begins, such as "</think>".
      begin: text with which an answer may begin its thought; None means that the prompt has begun
        it already. An answer without this text has the form from its beginning.
      budget: most tokens of the thought, behind which `end` is forced; None means no limit.
    """

    end: str
    begin: str | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.end, str) or not isinstance(self.begin, str | None):
            raise TypeError("begin and end of a thought must be texts")
        if not self.end or self.begin == "":
            raise ConstraintError("begin and end of a thought must not be empty")
        if self.budget is not None and not 0 <= self.budget < 1 << 31:
            raise ConstraintError(f"budget={self.budget} must be at least 0")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Form that an answer must have; a field of `Sampling`, checked when a request is made.

    Make one with `json_schema`, `json_object`, `regex`, `choice`, `grammar` or `anything`. Tokens
    that would leave the form are excluded at each step, and the answer ends when nothing can
    follow. An answer of `max_new_tokens` tokens may be incomplete.

    Attributes:
      kind: "json_schema", "regex", "choice", "grammar" or "anything".
      source: a JSON schema, a regular expression, a JSON list of texts, or a grammar.
      thought: what may precede the form, with white space between them; None means that the whole
        answer has the form.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "anything"]
    source: str = ""
    thought: Thought | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise TypeError("the source of a constraint must be a text")
        if len(self.source.encode(errors="replace")) > MOST_BYTES:
            raise ConstraintError(f"a constraint may have {MOST_BYTES} bytes at most")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Self:
        """Returns the form of JSON that a schema describes; properties keep the schema's order.

        schema: the schema, or its JSON text. Raises TypeError if it is not JSON data.
        """
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def json_object(cls) -> Self:
        """Returns the form of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Returns the form of a regular expression, which must match the whole answer.

        pattern: in the syntax of Rust's `regex`: neither look-around nor references back.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Returns the form of one of several texts; raises ValueError if there are none."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("choice needs a list of texts")
        if not all(texts) or not texts:
            raise ConstraintError("choice needs at least one text, and none that is empty")
        return cls("choice", _json(list(texts)))

    @classmethod
    def grammar(cls, text: str) -> Self:
        """Returns the form of a context-free grammar.

        text: in llguidance's variant of Lark, with the rule `start`; or in GBNF, llama.cpp's, with
        the rule `root`.
        """
        return cls("grammar", text)

    @classmethod
    def anything(cls) -> Self:
        """Returns no form, for answers whose thought alone is limited."""
        return cls("anything")

    def following(self, thought: Thought) -> Self:
        """Returns the constraint of an answer that may begin with a thought."""
        return dataclasses.replace(self, thought=thought)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ConstraintError("a constraint is nested too deeply") from None
    except ValueError as error:
        raise ConstraintError(f"a constraint must be JSON data: {error}") from None
