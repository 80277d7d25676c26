"""Tools of requests: OpenAI's descriptions, and which of them an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..sampling import Constraint, ConstraintError
from ..sampling.grammars import Grammars
from ..sampling.json_schemas import prepared_schema
from .errors import ApiError

#: Most tools of a request.
MOST_TOOLS = 128

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


class Tools(NamedTuple):
    """Tools of a request.

    Attributes:
      described: OpenAI's descriptions of all, which the chat template renders.
      offered: those that the answer may call.
      required: whether the answer must call one.
      parallel: whether it may call several.
    """

    described: list[dict[str, Any]]
    offered: list[dict[str, Any]]
    required: bool = False
    parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of a tool that may be called must follow its schema."""
        return any(tool["function"].get("strict") is True for tool in self.offered)


def tools_of(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools | None:
    """Returns the tools of a request, None without any; raises ApiError.

    tools: `{"type": "function", "function": {name, description, parameters}}` each. choice: "auto",
    "none", "required", or an object that names a function.
    """
    if not tools:
        if choice not in (None, "auto", "none"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools may have {MOST_TOOLS} tools at most", param="tools")
    described = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in described]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools has a name twice", param="tools")
    several = parallel is not False
    if choice in (None, "auto", "required"):
        return Tools(described, described, choice == "required", several)
    if choice == "none":
        return Tools(described, [])
    wanted = _named(choice)
    if wanted not in names:
        problem = f"tool_choice names {wanted!r:.100}, which is not one of the tools"
        raise ApiError(400, problem, param="tool_choice")
    one = [tool for tool in described if tool["function"]["name"] == wanted]
    return Tools(described, one, required=True, parallel=False)


def _named(choice: Any) -> str:
    """Returns the name in OpenAI's forms of a choice; raises ApiError."""
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    problem = "tool_choice must be auto, none, required, or name a function"
    raise ApiError(400, problem, param="tool_choice")


def _checked(tool: Any, name: str) -> dict[str, Any]:
    """Returns a tool whose fields have the right types; raises ApiError."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise ApiError(400, f"{name} must be of type function", param="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ApiError(400, f"{name}.function must be an object", param="tools")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        problem = f"{name}.function.name must have 1 to 128 letters, digits, or one of _.:/-"
        raise ApiError(400, problem, param="tools")
    if not isinstance(function.get("description", ""), str | None):
        raise ApiError(400, f"{name}.function.description must be a text", param="tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ApiError(400, f"{name}.function.parameters must be a JSON schema", param="tools")
    return {"type": "function", "function": {**function, "parameters": parameters}}


def with_safe_schemas(tools: Tools, grammars: Grammars) -> list[dict[str, Any]]:
    """Returns the offered tools with schemas that can be enforced.

    A schema that cannot becomes one with the same properties, of any values. Raises ApiError if the
    tool is strict, or a call is required.
    """
    found = []
    for tool in tools.offered:
        function = tool["function"]
        is_enforced = tools.required or function.get("strict") is True
        try:
            parameters = prepared_schema(function["parameters"])
            if not is_enforced:
                grammars.matcher(Constraint.json_schema(parameters))
        except ConstraintError as error:
            if is_enforced:
                raise ApiError(400, f"tool {function['name']}: {error}", param="tools") from None
            properties = function["parameters"].get("properties")
            names = properties if isinstance(properties, dict) else ()
            parameters = {"type": "object", "properties": {name: {} for name in names}}
        found.append({**tool, "function": {**function, "parameters": parameters}})
    return found
