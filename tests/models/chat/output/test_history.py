"""Checks of tool calls in a conversation's history."""

from __future__ import annotations

from typing import Any

import pytest

from jax_q4k.models.chat.output import check_history

USER = {"role": "user", "content": "U"}


def conversation(**function: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "R"},
    ]


@pytest.mark.parametrize("arguments", ["{}", '{"a": [1, "é"]}', ' {"a": 1}\n', {"a": 1}, {}])
def test_histories_that_are_right(arguments: Any) -> None:
    messages = conversation(arguments=arguments)
    check_history(messages)
    messages[2]["content"] = [{"type": "text", "text": "R"}]
    messages[1] |= {"tool_calls": None}
    check_history(messages)


@pytest.mark.parametrize("arguments", ["", "{", "[]", "1", "null", "x", '"{}"', "[" * 10_000])
def test_arguments_that_are_not_the_text_of_an_object(arguments: str) -> None:
    problem = r"^messages\[1\].tool_calls\[0\].function.arguments is '.*expected JSON text"
    with pytest.raises(ValueError, match=problem):
        check_history(conversation(arguments=arguments))


def call(**changes: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": "{}"}} | changes


@pytest.mark.parametrize(
    "message, problem",
    [
        ("x", r"messages\[1\] is of type str, expected an object"),
        ({"tool_calls": "x"}, r"messages\[1\].tool_calls is of type str, expected a list"),
        ({"tool_calls": [3]}, r"tool_calls\[0\] is of type int, expected an object"),
        ({"tool_calls": [call(), call(id=3)]}, r"tool_calls\[1\].id is of type int"),
        ({"tool_calls": [call(type="custom")]}, r"tool_calls\[0\].type is 'custom', expected"),
        ({"tool_calls": [{"id": "a"}]}, r"tool_calls\[0\].function is missing"),
        ({"tool_calls": [call(function={})]}, r"function.name is missing, expected a string"),
        ({"tool_calls": [call(function={"name": ""})]}, r"function.name is empty"),
        ({"tool_calls": [call(function={"name": 1})]}, r"function.name is of type int"),
        ({"tool_calls": [call(function={"name": "f"})]}, r"function.arguments is missing"),
        (
            {"tool_calls": [call(function={"name": "f", "arguments": [1]})]},
            r"function.arguments is of type list, expected JSON text of an object",
        ),
        ({"role": "user", "tool_calls": [call()]}, "only messages of the assistant have calls"),
        ({"role": "tool"}, r"messages\[1\].content is missing, expected text"),
        ({"role": "tool", "content": {}}, r"messages\[1\].content is of type dict, expected text"),
        ({"role": "tool", "content": [3]}, r"content\[0\] is of type int, expected an object"),
        ({"role": "tool", "content": [{"type": "text"}]}, r"content\[0\].text is missing"),
        ({"role": "tool", "content": "", "tool_call_id": 3}, r"tool_call_id is of type int"),
    ],
)
def test_histories_that_are_wrong(message: Any, problem: str) -> None:
    if isinstance(message, dict):
        message = {"role": "assistant"} | message
    with pytest.raises(ValueError, match=problem):
        check_history([USER, message])
