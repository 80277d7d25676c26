"""Structured output: constraints of answers, under the names of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ..sampling import Constraint, ConstraintError
from .errors import ApiError
from .service import Service

#: JSON Schema: an object or a boolean, or its text.
Schema = dict[str, Any] | bool | str


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Form of an answer.

    Attributes:
      type: "text", "json_object" or "json_schema".
      json_schema: object whose `schema` is the schema, as in OpenAI's Chat Completions.
      schema: the schema, as in OpenAI's Responses, Anthropic's Messages and llama-server.
    """

    type: str
    json_schema: dict[str, Any] | None = None
    schema: Schema | None = None
    # Names and descriptions, which are for people, and whether the form is demanded: it always is.
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """Form of an answer, as in vLLM; one of the fields.

    Attributes:
      grammar: in Lark or GBNF.
    """

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Wanted(NamedTuple):
    """A constraint, and the parameter that asks for it."""

    name: str
    constraint: Constraint


def only(wanted: list[Wanted]) -> Wanted | None:
    """Returns the constraint of a request; raises ApiError if there are several."""
    if len(wanted) > 1:
        names = " and ".join(one.name for one in wanted)
        raise ApiError(400, f"{names} exclude each other", param=wanted[1].name)
    return wanted[0] if wanted else None


def of_format(name: str, form: ResponseFormat | None) -> list[Wanted]:
    """Returns the constraint of a response format, if it has one; raises ApiError."""
    if form is None or form.type == "text":
        return []
    if form.type not in ("json_object", "json_schema"):
        problem = f"{name}.type must be text, json_object or json_schema"
        raise ApiError(400, problem, param=name)
    schema = form.schema if form.json_schema is None else form.json_schema.get("schema")
    if form.type == "json_schema" and schema is None:
        raise ApiError(400, f"{name} needs a schema", param=name)
    return _made(name, Constraint.json_schema, {"type": "object"} if schema is None else schema)


def of_fields(name: str, fields: StructuredOutputs | None) -> list[Wanted]:
    """Returns the constraints of vLLM's parameter; raises ApiError."""
    if fields is None:
        return []
    found: list[Wanted] = []
    for field, make in _MAKERS.items():
        if (value := getattr(fields, field)) is not None:
            found += _made(f"{name}.{field}", make, value)
    if fields.json_object:
        found.append(Wanted(f"{name}.json_object", Constraint.json_object()))
    return found


def of_names(values: dict[str, Any], kinds: dict[str, str]) -> list[Wanted]:
    """Returns the constraints of parameters of other servers; raises ApiError.

    kinds: name of a parameter -> the field of `StructuredOutputs` that is the same.
    """
    found: list[Wanted] = []
    for name, field in kinds.items():
        if values[name] not in (None, ""):
            found += _made(name, _MAKERS[field], values[name])
    return found


async def compile(service: Service, wanted: Wanted | None) -> Constraint | None:
    """Compiles a constraint in a thread, so that `submit` finds it; raises ApiError."""
    grammars = service.ready().model.grammars
    if wanted is None:
        return None
    if grammars is None:
        raise ApiError(400, f"{wanted.name} needs a tokenizer", param=wanted.name)
    try:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(service.compiling, grammars.matcher, wanted.constraint)
    except ConstraintError as error:
        raise ApiError(400, f"{wanted.name}: {error}", param=_first(wanted.name)) from None
    except ImportError as error:
        raise ApiError(400, f"{wanted.name}: {error}", code="unsupported_parameter") from None
    return wanted.constraint


_MAKERS: dict[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


def _made(name: str, make: Callable[[Any], Constraint], value: Any) -> list[Wanted]:
    try:
        return [Wanted(name, make(value))]
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"{name}: {error}", param=_first(name)) from None


def _first(name: str) -> str:
    """Returns the parameter that a name like `structured_outputs.regex` is part of."""
    return name.partition(".")[0]
