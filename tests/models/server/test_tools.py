"""Tool calls and thoughts over HTTP: forced, parsed, streamed, in histories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from jax_q4k import models
from jax_q4k.models.sampling import Constraint
from jax_q4k.models.server import formats
from jax_q4k.models.server.constraints import Wanted

from .running import Running, serving

#: Renders tools and calls in Hermes' form, and thoughts.
TEMPLATE = """\
{% if tools %}system: {{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or "" }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome and in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server whose template has tools and thoughts."""
    model = models.load("demo")
    assert model.tokenizer is not None
    model.tokenizer = model.tokenizer.with_chat_template(TEMPLATE)
    with models.Engine(model, max_rows=4, warm_up=False) as engine, serving(engine) as server:
        yield server


Says = Callable[[str], None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Returns a function that makes all answers a given text."""

    def make(text: str) -> None:
        wanted = Wanted("test", Constraint.choice([text]))
        monkeypatch.setattr(formats.Format, "_wanted", lambda *_: wanted)

    return make


def chat(server: Running, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 1, **fields}
    found = server.client.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()


def streamed(server: Running, **fields: Any) -> dict[int, dict[str, Any]]:
    """Returns the sum of each answer's deltas, in the form of a message, with its finish reason."""
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 1, "stream": True, **fields}
    text = server.client.post("/v1/chat/completions", json=body).text
    *events, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            sum_ = found.setdefault(choice["index"], {"content": None})
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    sum_[name] = (sum_.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = sum_.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["id"] and call["function"]["name"]  # these come first
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                sum_["finish_reason"] = choice["finish_reason"]
    return found


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (CALL, None, None, ["get_weather"]),
        (f"{CALL}\n{OTHER}", None, None, ["get_weather", "get_time"]),
        (f"I look.\n{CALL}", "I look.", None, ["get_weather"]),
        (f"<think>\nRome first.\n</think>\n\n{CALL}", None, "Rome first.", ["get_weather"]),
        ("<think>\nHm.\n</think>\n\nIt rains.", "It rains.", "Hm.", []),
        ("Write <tool_call> and then JSON.", "Write <tool_call> and then JSON.", None, []),
        (CALL.replace("get_weather", "x"), CALL.replace("get_weather", "x"), None, []),
    ],
    ids=["one", "two", "text", "thought", "only thought", "prose", "unknown"],
)
def test_answers(
    thinking: Running,
    says: Says,
    text: str,
    content: str | None,
    reasoning: str | None,
    calls: list[str],
    stream: bool,
) -> None:
    says(text)
    tools = [WEATHER, TIME]
    if stream:
        message = streamed(thinking, tools=tools)[0]
        reason = message["finish_reason"]
    else:
        (choice,) = chat(thinking, tools=tools)["choices"]
        message, reason = choice["message"], choice["finish_reason"]
    assert message["content"] == content and message.get("reasoning_content") == reasoning
    assert [name for name, _ in calls_of(message)] == calls
    assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
    ids=["required", "named"],
)
def test_forced_calls(thinking: Running, choice: Any, names: set[str], stream: bool) -> None:
    """Whatever the model is, the answer is a call whose arguments fit the schema."""
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "n": 2, "temperature": 1.0}
    fields |= {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}
    if stream:
        messages = list(streamed(thinking, **fields, seed=3).values())
    else:
        choices = chat(thinking, **fields, seed=3)["choices"]
        messages = [one["message"] | {"finish_reason": one["finish_reason"]} for one in choices]
    for message in messages:
        if message["finish_reason"] == "length":
            continue
        ((name, arguments),) = calls_of(message)
        assert message["finish_reason"] == "tool_calls" and name in names
        if name == "get_weather":
            assert arguments["city"] in ("Rome", "Oslo")


def test_one_call_is_wanted(thinking: Running, says: Says) -> None:
    """The answer ends with the first."""
    says(f"{CALL}\n{OTHER}")
    fields = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
    (choice,) = chat(thinking, **fields)["choices"]
    assert [name for name, _ in calls_of(choice["message"])] == ["get_weather"]
    message = streamed(thinking, **fields)[0]
    assert [name for name, _ in calls_of(message)] == ["get_weather"]
    assert message["finish_reason"] == choice["finish_reason"] == "tool_calls"


def test_no_call_is_wanted(thinking: Running, says: Says) -> None:
    """Tools are in the prompt, but nothing is parsed."""
    says(CALL)
    (choice,) = chat(thinking, tools=[WEATHER], tool_choice="none")["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    without = chat(thinking)
    with_tools = chat(thinking, tools=[WEATHER], tool_choice="none")
    assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"] + 50


def test_thoughts_may_stay_or_be_left_out(thinking: Running, says: Says) -> None:
    says("<think>\nHm.\n</think>\n\nYes.")
    (whole,) = chat(thinking, reasoning_format="none")["choices"]
    assert whole["message"]["content"] == "<think>\nHm.\n</think>\n\nYes."
    for fields, thought in (({}, "Hm."), ({"include_reasoning": False}, None)):
        found = chat(thinking, **fields)
        message = found["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ("Yes.", thought)
        details = found["usage"]["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] < found["usage"]["completion_tokens"]
        assert streamed(thinking, **fields)[0].get("reasoning_content") == thought


def test_a_budget_of_thoughts(thinking: Running) -> None:
    """The thought ends in time, also before a form."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    fields = {"thinking_budget_tokens": 6, "logit_bias": {"0": -100}, "max_tokens": 200}
    # The prompt begins the thought.
    fields |= {"messages": [*MESSAGES, {"role": "assistant", "content": "<think>\n"}]}
    fields |= {"continue_final_message": True, "temperature": 1.0}
    found = chat(thinking, **fields, response_format=form)
    message = found["choices"][0]["message"]
    assert json.loads(message["content"]).keys() == {"a"}
    assert 6 <= found["usage"]["completion_tokens_details"]["reasoning_tokens"] < 30
    found = chat(thinking, **fields)
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] < 30
    assert found["choices"][0]["message"]["content"]


def test_openais_client_calls_tools(thinking: Running) -> None:
    """Its models take the answer, and the history with the result."""
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "demo", "max_tokens": 250, "tools": [WEATHER], "seed": 4}
        options |= {"parallel_tool_calls": False}
        first = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **options)
        message = first.choices[0].message
        assert message.tool_calls is not None
        call = message.tool_calls[0]
        assert call.type == "function" and call.function.name == "get_weather"
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        after = client.chat.completions.create(messages=[*MESSAGES, message, result], **options)
        assert after.choices[0].message.role == "assistant"
        with client.chat.completions.stream(
            messages=MESSAGES, tool_choice="required", **options
        ) as stream:
            final = stream.get_final_completion()
        again = final.choices[0].message.tool_calls
        assert again is not None and again[0].function.name == call.function.name
        assert again[0].function.arguments == call.function.arguments


def test_json_or_a_call(thinking: Running) -> None:
    """An answer with a response format is JSON, unless it calls a tool."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tools = [WEATHER, unsupported()]
    body = {"messages": MESSAGES, "max_tokens": 120, "tools": tools, "response_format": form}
    kinds = set()
    for seed in range(8):
        found = thinking.client.post("/v1/chat/completions", json={**body, "seed": seed})
        assert found.status_code == 200, found.text
        choice = found.json()["choices"][0]
        message = choice["message"]
        kinds.add("call" if message.get("tool_calls") else "content")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(message["content"]), dict)
    assert "content" in kinds


def test_only_strict_tools_must_be_enforceable(thinking: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "tools": [unsupported()], "temperature": 0}
    lax = thinking.client.post("/v1/chat/completions", json=body)
    body["tools"] = [WEATHER | {"function": {**WEATHER["function"], "strict": True}}]
    strict = thinking.client.post("/v1/chat/completions", json=body)
    for found in (lax, strict):
        assert found.status_code == 200, found.text
        assert found.json()["choices"][0]["message"]["content"] is not None


def unsupported(**fields: Any) -> dict[str, Any]:
    """Returns a tool whose schema cannot be enforced."""
    function = {"name": "f", "parameters": {"not": {}}, **fields}
    return {"type": "function", "function": function}


def history(**call: Any) -> list[dict[str, Any]]:
    return [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0] must be of type function"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "a name twice"),
        ({"tools": [WEATHER] * 129}, "tools", "128 tools"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice", "must be auto, none, required"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x', which is not one of the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [TIME], "structured_outputs": {"regex": "a+"}},
            "structured_outputs.regex",
            "cannot be combined with tools, but a JSON schema can",
        ),
        ({"tools": [unsupported()], "tool_choice": "required"}, "tool_choice", "not"),
        ({"tools": [unsupported(strict=True)]}, "tools", "not"),
        ({"messages": history(function={"name": "f", "arguments": "{"})}, "messages", "arguments"),
        ({"messages": history(function={"arguments": "{}"})}, "messages", "function.name"),
        ({"messages": history(function={"name": "f", "arguments": "[1]"})}, "messages", "object"),
        ({"messages": history(type="x")}, "messages", "expected 'function'"),
        ({"messages": [*MESSAGES, {"role": "tool"}]}, "messages", "content is missing"),
        ({"thinking_budget_tokens": -1}, "thinking_budget_tokens", "at least 0"),
    ],
)
def test_mistakes(
    thinking: Running, fields: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, **fields}
    found = thinking.client.post("/v1/chat/completions", json=body)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param and message in found.json()["error"]["message"]


def test_a_template_without_tools(server: Running) -> None:
    body = {"messages": MESSAGES, "tools": [TIME]}
    found = server.client.post("/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api(thinking: Running, says: Says, stream: bool) -> None:
    """Items of an answer: a thought, a text, calls; sent back with the results of the calls."""
    says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{OTHER}")
    tools: Any = [
        {"type": "function", **WEATHER["function"]},
        {"type": "function", "name": "get_time"},
    ]
    options: Any = {"model": "demo", "tools": tools, "max_output_tokens": 200}
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        if stream:
            with client.responses.stream(input="Rome?", **options) as events:
                names = [event.type for event in events]
                found: Any = events.get_final_response()
            assert names.count("response.output_item.added") == 4
            assert names.count("response.function_call_arguments.done") == 2
            assert "response.reasoning_text.delta" in names
        else:
            found = client.responses.create(input="Rome?", **options)
        kinds = [item.type for item in found.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert found.output_text == "I look." and found.output[0].content[0].text == "Hm."
        call = found.output[2]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
        assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
        says("It rains.")
        items: list[Any] = [{"role": "user", "content": "Rome?"}]
        items += [item.model_dump(exclude_none=True) for item in found.output]
        for item in found.output[2:]:
            result = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            items.append(result)
        assert client.responses.create(input=items, **options).output_text == "It rains."


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_api(thinking: Running, says: Says, stream: bool) -> None:
    """Blocks of an answer: a thought, a text, calls; sent back with the results of the calls."""
    says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    function = WEATHER["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    options: Any = {"model": "demo", "max_tokens": 200, "tools": [tool]}
    asked: Any = [{"role": "user", "content": "Rome?"}]
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(messages=asked, **options) as events:
                found = events.get_final_message()
        else:
            found = client.messages.create(messages=asked, **options)
        thought, text, call = found.content
        assert thought.type == "thinking" and thought.thinking == "Hm."
        assert text.type == "text" and text.text == "I look."
        assert call.type == "tool_use" and (call.name, call.input) == (
            "get_weather",
            {"city": "Rome"},
        )
        assert found.stop_reason == "tool_use"
        says("It rains.")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        said = [block.model_dump() for block in found.content]
        later: Any = [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        after = client.messages.create(messages=[*asked, *later], **options)
        assert after.content[0].type == "text" and after.content[0].text == "It rains."
        assert after.stop_reason == "end_turn"
