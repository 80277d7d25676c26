"""Answers of every family, written by hand, and what a parser must make of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jax_q4k.models.chat.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Family,
    Reasoning,
    families,
)
from jax_q4k.models.chat.output.families import THOUGHTS, with_thought

#: ("content", text), ("reasoning", text) or ("call", name, text of the arguments).
Part = tuple[str, ...]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "area": {
            "type": "object",
            "properties": {
                "corners": {"type": "array", "items": {"type": "number"}},
                "name": {"type": "string"},
            },
        },
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "D", "parameters": schema}}
    for name, schema in (
        ("get_weather", WEATHER),
        ("get", WEATHER),  # the start of another name
        ("now", {"type": "object", "properties": {}}),
    )
]

THINKING = {
    name: with_thought(getattr(families, name), thought)
    for name, thought in {
        "HERMES": THOUGHTS[0],
        "QWEN_XML": THOUGHTS[0],
        "GLM": THOUGHTS[0],
        "DEEPSEEK_V3": THOUGHTS[0],
        "DEEPSEEK_V31": THOUGHTS[0],
        "MINIMAX": THOUGHTS[0],
        "KIMI": THOUGHTS[0],
        "GRANITE": THOUGHTS[0],
        "NEMOTRON": THOUGHTS[0],
        "MISTRAL": THOUGHTS[1],
        "GEMMA": THOUGHTS[2],
        "COMMAND_R7B": THOUGHTS[3],
        "SEED": THOUGHTS[4],
    }.items()
}


def family(name: str) -> Family:
    """Returns a family by the name of its constant, with thoughts if it may have them."""
    found: Family = THINKING.get(name) or getattr(families, name)
    return found


@dataclass(frozen=True)
class Form:
    """Forms of one family, from which cases are made.

    Attributes:
      one: a call of get_weather with the city Zürich and 2 days.
      two: that call, and one of `now` without arguments, as an answer writes both.
      start: `one` up to inside the name; cut: `one` up to inside the value Zürich.
      opener: what begins a call.
      nested: a call with a string, a nested object and a boolean; its values are NESTED.
      thought: a thought "hm, {x}" before the answer; "" if the family has none.
    """

    one: str
    two: str
    start: str
    cut: str
    opener: str
    nested: str
    thought: str = ""
    arguments: str = '{"city": "Zürich", "days": 2}'
    cut_arguments: str = '{"city": "Zür'
    extra: dict[str, tuple[str, list[Part]]] = field(default_factory=dict)


#: A string with all that may be mistaken for an end, as each form writes it.
HARD = 'He said "{x}",\n\t\\o/ 🙂 <b>&amp;</b> [1]'
HARD_JSON = r'"He said \"{x}\",\n\t\\o/ 🙂 <b>&amp;</b> [1]"'
NESTED = {"city": HARD, "area": {"corners": [1, -2.5e3], "name": "a, b"}, "exact": True}
NESTED_JSON = (
    f'{{"city": {HARD_JSON}, "area": {{"corners": [1, -2.5e3], "name": "a, b"}}, "exact": true}}'
)
AREA = '{"corners": [1, -2.5e3], "name": "a, b"}'
ARGUMENTS = '{"city": "Zürich", "days": 2}'


def json_form(before: str, after: str, end: str, between: str, **options: Any) -> Form:
    """Returns the form of a call with JSON arguments.

    before: text before the name; after: between the name and the arguments. between: text between
    two calls, from the end of the first arguments to the second name.
    """
    opener = options.pop("opener", before)

    def call(arguments: str, name: str = "get_weather") -> str:
        return f"{before}{name}{after}{arguments}{end}"

    return Form(
        one=call(ARGUMENTS),
        two=f"{before}get_weather{after}{ARGUMENTS}{between}now{after}{{}}{end}",
        start=f"{before}get_wea",
        cut=call(ARGUMENTS).partition("ich")[0],
        opener=opener,
        nested=call(NESTED_JSON),
        **options,
    )


def tagged_form(
    *, name: tuple[str, str], key: str, value: str, end: str, around: tuple[str, str], between: str
) -> Any:
    """Returns a maker of the form of a call with tags for each parameter."""

    def body(tool: str, **values: str) -> str:
        parameters = "".join(f"{key.format(k)}{value.format(v)}" for k, v in values.items())
        return f"{name[0]}{tool}{name[1]}{parameters}{end}"

    def make(**options: Any) -> Form:
        one = body("get_weather", city="Zürich", days="2")
        return Form(
            one=around[0] + one + around[1],
            two=around[0] + one + between + body("now") + around[1],
            start=f"{around[0]}{name[0]}get_wea",
            cut=(around[0] + one).partition("ich")[0],
            opener=around[0],
            nested=around[0] + body("get_weather", city=HARD, area=AREA, exact="True") + around[1],
            **options,
        )

    return make


functions = tagged_form(
    name=("<function=", ">\n"),
    key="<parameter={}>\n",
    value="{}\n</parameter>\n",
    end="</function>",
    around=("<tool_call>\n", "\n</tool_call>"),
    between="\n</tool_call>\n<tool_call>\n",
)
seed = tagged_form(
    name=("<function=", ">\n"),
    key="<parameter={}>",
    value="{}</parameter>\n",
    end="</function>",
    around=("<seed:tool_call>\n", "\n</seed:tool_call>"),
    between="\n</seed:tool_call>\n<seed:tool_call>\n",
)
invoke = tagged_form(
    name=('<invoke name="', '">\n'),
    key='<parameter name="{}">',
    value="{}</parameter>\n",
    end="</invoke>",
    around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    between="\n",
)
pairs = tagged_form(
    name=("", "\n"),
    key="<arg_key>{}</arg_key>\n",
    value="<arg_value>{}</arg_value>\n",
    end="</tool_call>",
    around=("<tool_call>", ""),
    between="\n<tool_call>",
)


def listed(before: str, after: str, name: str = "name", arguments: str = "arguments") -> Form:
    """Returns the form of a JSON list of calls."""
    middle = f'", "{arguments}": '
    return json_form(
        f'{before}[{{"{name}": "', middle, f"}}]{after}", f'}}, {{"{name}": "', opener=before
    )


FORMS: dict[str, Form] = {
    "HERMES": json_form(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        opener="<tool_call>",
        thought="<think>\nhm, {x}\n</think>\n\n",
    ),
    "QWEN_XML": functions(thought="<think>\nhm, {x}\n</think>\n\n"),
    "SEED": seed(thought="<seed:think>hm, {x}</seed:think>"),
    "GLM": pairs(thought="\n<think>hm, {x}</think>\n"),
    "MINIMAX": invoke(thought="<think>\nhm, {x}\n</think>\n"),
    "LLAMA": json_form(
        '{"name": "', '", "parameters": ', "}", '}; {"name": "', opener="<|python_tag|>"
    ),
    "MISTRAL": json_form(
        "[TOOL_CALLS]",
        "[ARGS]",
        "",
        "[TOOL_CALLS]",
        thought="[THINK]hm, {x}[/THINK]",
    ),
    "MISTRAL_LIST": listed("[TOOL_CALLS]", ""),
    "GEMMA": Form(
        one='<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>',
        two='<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        start="<|tool_call>call:get_wea",
        cut='<|tool_call>call:get_weather{city:<|"|>Zür',
        opener="<|tool_call>",
        nested=f'<|tool_call>call:get_weather{{city:<|"|>{HARD}<|"|>,'
        'area:{corners:[1,-2.5e3],name:<|"|>a, b<|"|>},exact:true}<tool_call|>',
        thought="<|channel>thought\nhm, {x}\n<channel|>",
    ),
    "LFM2": Form(
        one='<|tool_call_start|>[get_weather(city="Zürich", days=2)]<|tool_call_end|>',
        two="<|tool_call_start|>[get_weather(city='Zürich', days=2), now()]<|tool_call_end|>",
        start="<|tool_call_start|>[get_wea",
        cut='<|tool_call_start|>[get_weather(city="Zür',
        opener="<|tool_call_start|>",
        nested='<|tool_call_start|>[get_weather(city=\'He said "{x}",\\n\\t\\\\o/ \\U0001f642 '
        "<b>&amp;</b> [1]', area={'corners': [1, -2.5e3], 'name': \"a, b\"}, exact=True)]"
        "<|tool_call_end|>",
    ),
    "HARMONY": Form(
        one="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        two="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
        start="<|channel|>commentary to=functions.get_wea",
        cut="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Zür',
        opener="<|channel|>",
        nested="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{NESTED_JSON}<|call|>",
        thought="<|channel|>analysis<|message|>hm, {x}<|end|><|start|>assistant",
    ),
    "DEEPSEEK_V3": json_form(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        opener="<｜tool▁calls▁begin｜>",
        thought="<think>\nhm, {x}\n</think>\n\n",
    ),
    "DEEPSEEK_V31": json_form(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        opener="<｜tool▁calls▁begin｜>",
        thought="<think>hm, {x}</think>",
    ),
    "KIMI": json_form(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_end|><|tool_call_begin|>functions.",
        opener="<|tool_calls_section_begin|>",
        thought="<think>hm, {x}</think>",
    ),
    "COMMAND_R": json_form(
        'Action: ```json\n[\n    {\n        "tool_name": "',
        '",\n        "parameters": ',
        "\n    }\n]```",
        '\n    },\n    {\n        "tool_name": "',
        opener="Action:",
    ),
    "COMMAND_R7B": json_form(
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "',
        '", "parameters": ',
        "}\n]<|END_ACTION|>",
        '},\n    {"tool_call_id": "1", "tool_name": "',
        opener="<|START_ACTION|>",
        thought="<|START_THINKING|>hm, {x}<|END_THINKING|>",
    ),
    "GRANITE": json_form(
        '<|tool_call|>[{"name": "',
        '", "arguments": ',
        "}]",
        '}, {"name": "',
        opener="<|tool_call|>",
        thought="<think>hm, {x}</think>",
    ),
    "PHI": json_form(
        '<|tool_call|>{"name": "',
        '", "arguments": ',
        "}<|/tool_call|>",
        '}<|/tool_call|><|tool_call|>{"name": "',
        opener="<|tool_call|>",
    ),
    "NEMOTRON": json_form(
        '<TOOLCALL>[{"name": "',
        '", "arguments": ',
        "}]</TOOLCALL>",
        '}, {"name": "',
        opener="<TOOLCALL>",
        thought="<think>\nhm, {x}\n</think>\n",
    ),
    "APRIEL": listed("<tool_calls>", "</tool_calls>"),
    "GIGACHAT": json_form(
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "',
        '", "arguments": ',
        "}",
        '}<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "',
        opener="<|message_sep|>",
    ),
}


@dataclass(frozen=True)
class Case:
    """An answer, and the parts that a parser must find in it."""

    family: str
    name: str
    text: str
    parts: list[Part]
    tools: bool = True
    inside: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"

    def events(self, pieces: list[str]) -> list[Event]:
        """Returns the events of the answer in pieces."""
        offered = TOOLS if self.tools else None
        parser = family(self.family).parser(offered, inside=self.inside)
        return [*(e for piece in pieces for e in parser.push(piece)), *parser.finish()]


def cases_of(name: str, form: Form) -> list[Case]:
    """Returns the cases of a family."""
    weather, now = ("call", "get_weather", ARGUMENTS), ("call", "now", "{}")
    unknown = form.one.replace("get_weather", "get_wheel")
    found = [
        Case(name, "one", form.one, [weather]),
        Case(name, "two", form.two, [weather, now]),
        Case(name, "empty", form.one, [("content", form.one)], tools=False),
        Case(name, "unknown", unknown, [("content", unknown)]),
        Case(name, "cut_name", form.start, [("content", form.start)]),
        Case(name, "cut_value", form.cut, [("call", "get_weather", form.cut_arguments)]),
        Case(name, "hard", form.nested, [("call", "get_weather", NESTED_JSON)]),
        Case(name, "content", " Hello, é🙂\n\nworld \n", [("content", " Hello, é🙂\n\nworld \n")]),
    ]
    quoted = f"Write {form.opener} or `{form.opener}x` and {form.opener[:-1]}."
    found.append(Case(name, "quoted", quoted, [("content", quoted)]))
    if name not in ("LLAMA", "HARMONY"):  # their calls begin an answer
        parts: list[Part] = [("content", "Let me see."), weather]
        found.append(Case(name, "text_before", f"Let me see.\n\n{form.one}", parts))
        later = [weather, ("content", "So. ")]
        found.append(Case(name, "text_after", f"{form.one}\nSo. ", later))
        again = f"{quoted}\n{form.one}"
        found.append(Case(name, "quoted_before", again, [("content", quoted), weather]))
    if form.thought:
        thought: Part = ("reasoning", "hm, {x}")
        text = form.thought + ("" if name != "HARMONY" else "<|channel|>final<|message|>")
        found += [
            Case(name, "thought", f"{text}Hi", [thought, ("content", "Hi")]),
            Case(name, "thought_call", form.thought + form.one, [thought, weather]),
        ]
        begin, end = family(name).thought.begin, family(name).thought.end  # type: ignore[union-attr]
        rest = form.thought.partition(begin)[2] + form.one
        found.append(Case(name, "inside", rest, [thought, weather], inside=True))
        quoting = f"a {form.one} b"
        found.append(
            Case(
                name,
                "call_in_thought",
                f"{begin}{quoting if name != 'HARMONY' else 'a'}{end}",
                [("reasoning", quoting if name != "HARMONY" else "a")],
            )
        )
    return found


EXTRA = [
    Case(
        "HERMES",
        "arguments_first",
        '<tool_call>{"arguments": {"city": "A"}, "name": "get_weather"}</tool_call>',
        [("call", "get_weather", '{"city": "A"}')],
    ),
    Case(
        "HERMES",
        "arguments_in_a_string",
        r'<tool_call>{"name": "get", "arguments": "{\"city\": \"A\"}"}</tool_call>',
        [("call", "get", '{"city": "A"}')],
    ),
    Case("HERMES", "no_arguments", '<tool_call>{"name": "now"}', [("call", "now", "{}")]),
    Case(
        "HERMES",
        "null_arguments",
        '<tool_call>{"name": "now", "arguments": null, "id": 3}</tool_call>',
        [("call", "now", "{}")],
    ),
    Case(
        "HERMES",
        "list_of_arguments",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        [("content", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>')],
    ),
    Case(
        "HERMES",
        "later_keys",
        '<tool_call>{"name": "now", "arguments": {}, "id": {"a": [1]}}</tool_call>!',
        [("call", "now", "{}"), ("content", "!")],
    ),
    Case(
        "HERMES",
        "not_json",
        '<tool_call>{"name": "get", "arguments": {"city": tru}}</tool_call> A',
        [("call", "get", '{"city": '), ("content", "tru}}</tool_call> A")],
    ),
    Case(
        "HERMES",
        "json_with_faults",
        '<tool_call>{"name": "get", "arguments": {"city": "a\nb\\d"}}</tool_call>',
        [("call", "get", r'{"city": "a\nb\\d"}')],
    ),
    Case(
        "HERMES",
        "second_is_unknown",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "x"}',
        [("call", "now", "{}"), ("content", '<tool_call>{"name": "x"}')],
    ),
    Case(
        "HERMES",
        "cut_end",
        '<tool_call>{"name": "now", "arguments": {}}\n</tool_c',
        [("call", "now", "{}")],
    ),
    Case("LLAMA", "json", '{"a": 1, "name": "now"}', [("content", '{"a": 1, "name": "now"}')]),
    Case(
        "LLAMA",
        "python_tag",
        'Hm <|python_tag|>{"type": "function", "name": "get", "parameters": {"city": "A"}}',
        [("content", "Hm"), ("call", "get", '{"city": "A"}')],
    ),
    Case(
        "LLAMA",
        "json_in_text",
        'Hm {"name": "get", "parameters": {}}',
        [("content", 'Hm {"name": "get", "parameters": {}}')],
    ),
    Case(
        "MISTRAL",
        "call_id",
        '[TOOL_CALLS]get[CALL_ID]aB3-_9[ARGS]{"city": "A"}',
        [("call", "get", '{"city": "A"}')],
    ),
    Case(
        "MISTRAL",
        "list",
        '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "A"}, "id": "abc"}]',
        [("call", "get", '{"city": "A"}')],
    ),
    Case(
        "MISTRAL_LIST",
        "named",
        '[TOOL_CALLS]get[ARGS]{"city": "A"}',
        [("call", "get", '{"city": "A"}')],
    ),
    Case(
        "GRANITE",
        "frame",
        "<think>a</think><response>b <response> c</response>\n",
        [("reasoning", "a"), ("content", "b <response> c")],
    ),
    Case(
        "COMMAND_R7B",
        "frame",
        "<|START_RESPONSE|>Hi<|END_RESPONSE|>",
        [("content", "Hi")],
    ),
    Case(
        "GLM",
        "on_one_line",
        "<tool_call>get<arg_key>city</arg_key><arg_value>A</arg_value></tool_call>",
        [("call", "get", '{"city": "A"}')],
    ),
    Case(
        "QWEN_XML",
        "other_values",
        "<tool_call><function=get><parameter=days>\nsoon\n</parameter><parameter=unknown>\n"
        "[1]\n</parameter><parameter=unit>F</parameter></function></tool_call>",
        [("call", "get", '{"days": "soon", "unknown": [1], "unit": "F"}')],
    ),
    Case(
        "QWEN_XML",
        "first_mark_is_missing",
        "Hm\n<function=get>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>\n"
        "<function=now></function></tool_call> <function=then>",
        [("content", "Hm"), ("call", "get", '{"city": "A"}'), ("call", "now", "{}")]
        + [("content", "<function=then>")],
    ),
    Case(
        "QWEN_XML",
        "cut_number",
        "<tool_call>\n<function=get>\n<parameter=days>\n12",
        [("call", "get", '{"days": 12')],
    ),
    Case(
        "QWEN_XML",
        "text_between",
        "<tool_call>\n<function=get>\nHm</function>",
        [("call", "get", "{}"), ("content", "Hm</function>")],
    ),
    Case(
        "LFM2",
        "quotes_without_escapes",
        "<|tool_call_start|>[get(city='it's \"A\"', area={\"name\": None, 'b': (1,)})]",
        [("call", "get", r'{"city": "it' + "'" + r's \"A\"", "area": {"name": null, "b": [1]}}')],
    ),
    Case(
        "LFM2",
        "json",
        '<|tool_call_start|>[{"name": "get", "arguments": {"city": "A"}}]<|tool_call_end|>',
        [("call", "get", '{"city": "A"}')],
    ),
    Case(
        "HARMONY",
        "final",
        "<|channel|>final<|message|>Hi <b><|return|>",
        [("content", "Hi <b>")],
    ),
    Case(
        "HARMONY",
        "preamble",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get <|constrain|>json<|message|>{"city": "A"}',
        [("content", "I look."), ("call", "get", '{"city": "A"}')],
    ),
    Case(
        "HARMONY",
        "role_first",
        ' to=functions.get<|channel|>commentary json<|message|>{"city": "A"}<|call|>',
        [("call", "get", '{"city": "A"}')],
    ),
    Case(
        "HARMONY",
        "missing_end",
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        [("reasoning", "a"), ("content", "b")],
    ),
    Case("NONE", "anything", "<think>a</think> {}", [("content", "<think>a</think> {}")]),
]

CASES = [case for name, form in FORMS.items() for case in cases_of(name, form)] + EXTRA


def joined(events: list[Event]) -> list[Part]:
    """Returns the parts of an answer, and checks the order of events."""
    parts: list[Part] = []
    calls: dict[int, list[str]] = {}
    open_call: int | None = None
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                kind = "content" if isinstance(event, Content) else "reasoning"
                assert text and open_call is None
                before = parts.pop()[1] if parts and parts[-1][0] == kind else ""
                parts.append((kind, before + text))
            case CallBegin(index, id_, name):
                assert index == len(calls) and open_call is None
                assert len(id_) == 29 and id_.startswith("call_")
                open_call, calls[index] = index, []
                parts.append(("call", name, str(index)))
            case CallArguments(index, text):
                assert text and index == open_call
                calls[index].append(text)
            case CallEnd(index):
                assert index == open_call
                open_call = None
    assert open_call is None
    return [
        (part[0], part[1], "".join(calls[int(part[2])])) if part[0] == "call" else part
        for part in parts
    ]
