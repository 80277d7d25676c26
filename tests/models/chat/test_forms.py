"""Message formats: messages are converted to a format that the template accepts."""

from __future__ import annotations

from typing import Any

import pytest

from jax_q4k.models import chat

TEXTS = "{% for m in messages %}[{{ m.role }}:{{ m.content + '' }}]{% endfor %}"
TYPED = (
    "{% for m in messages %}[{{ m.role }}:"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}]"
    "{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ (c.function or c).arguments FORM }}{% endfor %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, **changes: Any) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {}} | changes]}
    message["tool_calls"][0]["function"] = {"name": "f", "arguments": arguments}
    return [message]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_contents_are_texts_or_parts_as_the_template_needs(role: str) -> None:
    before = [{"role": "user", "content": "u"}] if role in ("assistant", "tool") else []
    for template in (TEXTS, TYPED):
        texts = [
            chat.render(template, [*before, {"role": role, "content": content}])
            for content in ("a\nb", parts("a", "b"))
        ]
        joined = "a\nb" if template == TEXTS else "ab"
        assert texts[0].endswith(f"[{role}:a\nb]") and texts[1].endswith(f"[{role}:{joined}]")


def test_a_part_that_is_no_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    messages = [{"role": "user", "content": [*parts("a"), image]}]
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\] is of type 'image_url'"):
        chat.render(TEXTS, messages)
    assert chat.render(TYPED, messages) == "[user:a]"


@pytest.mark.parametrize(
    ("form", "given", "text"),
    [
        ("| tojson", '{"a": 1}', '{"a": 1}'),
        (".items() | list", '{"a": 1}', "[('a', 1)]"),
        ("+ ''", {"a": "é"}, '{"a": "é"}'),
        ("| string", {"a": 1}, '{"a": 1}'),
        ("| string", '{"a": 1}', '{"a": 1}'),
        ("| tojson", "{no JSON", '"{no JSON"'),
        ("| tojson", "[1]", '"[1]"'),
    ],
)
def test_arguments_are_objects_or_texts_as_the_template_needs(
    form: str, given: Any, text: str
) -> None:
    assert chat.render(CALLS.replace("FORM", form), call(given)) == text


def test_arguments_without_a_function_around_them() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"arguments": '{"a": 1}'}]}
    assert chat.render(CALLS.replace("FORM", "| tojson"), [message]) == '{"a": 1}'


@pytest.mark.parametrize(("template", "text"), [(TEXTS, "[assistant:]"), ("{{ messages }}", None)])
def test_a_tool_call_without_content(template: str, text: str | None) -> None:
    messages = [call("{}")[0] | {"content": None}]
    rendered = chat.render(template, messages)
    assert rendered == text if text else "'content': ''" in rendered
    takes_none = "{% for m in messages %}{{ m.content or 'none' }}{% endfor %}"
    assert chat.render(takes_none, messages) == "none"


#: Small templates that read a thought: with calls alone, or in each answer.
WITH_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.FIELD %}"
    "{{ raise_exception('both') }}{% endif %}({{ m.FIELD }}){% endif %}{{ m.content }}{% endfor %}"
)
WITH_TEXTS = "{% for m in messages %}({{ m.FIELD }}){{ m.content }}{% endfor %}"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("template", [WITH_CALLS, WITH_TEXTS], ids=["calls", "texts"])
def test_a_thought_is_in_the_field_that_the_template_reads(template: str, field: str) -> None:
    template = template.replace("FIELD", field)
    (answer,) = call("{}", id="a")
    assert chat.render(template, [answer | {"reasoning_content": "hm"}]) == "(hm)"
    assert chat.render(template, [answer | {field: "hm"}]) == "(hm)"


def test_a_thought_that_a_template_refuses_or_does_not_read() -> None:
    template = WITH_CALLS.replace("FIELD", "thinking")
    (answer,) = call("{}", id="a")
    answer |= {"content": "text", "reasoning_content": "hm"}
    assert chat.render(template, [answer]) == "()text"
    said = {"role": "assistant", "content": "text", "reasoning_content": "hm"}
    assert chat.render(TEXTS, [said]) == "[assistant:text]"


def test_developers_are_the_system_where_a_template_does_not_know_them() -> None:
    messages = [{"role": "developer", "content": "D"}]
    assert chat.render(TEXTS, messages) == "[system:D]"
    assert chat.render(TEXTS + "{# developer #}", messages) == "[developer:D]"


def test_messages_that_are_given_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": parts("a")}, *call('{"a": 1}')]
    before = repr(messages)
    chat.render(TEXTS, messages)
    assert repr(messages) == before


def test_forms_that_depend_on_a_variable() -> None:
    """The probe result for one value does not apply to another value or type."""
    template = "{% if typed %}" + TYPED + "{% else %}" + TEXTS + "{% endif %}"
    messages = [{"role": "user", "content": parts("a", "b")}]
    for typed, text in ((False, "a\nb"), (True, "ab"), (0, "a\nb"), (1, "ab"), (False, "a\nb")):
        assert chat.render(template, messages, typed=typed) == f"[user:{text}]"
