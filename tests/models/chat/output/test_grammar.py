"""Grammars of families: llguidance accepts what the parser reads, and refuses wrong arguments."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from jax_q4k.models.chat.output import FAMILIES, NONE

from .conversations import FORMS, TOOLS, family, joined

llguidance = pytest.importorskip("llguidance")

#: Control tokens of a vocabulary of bytes; marks that are not among them are text.
CONTROLS = (
    "<|eos|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", '<|"|>', "<|tool_call>",
    "<tool_call|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|START_ACTION|>",
    "<|END_ACTION|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<arg_value>", "</arg_value>",
)  # fmt: skip
_SPLIT = re.compile("(" + "|".join(map(re.escape, CONTROLS)) + ")")


class Vocabulary:
    """A token for each byte, and the control tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in CONTROLS]
    special_token_ids = list(range(256, 256 + len(CONTROLS)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()))


def token_id(text: str) -> int | None:
    return 256 + CONTROLS.index(text) if text in CONTROLS else None


def no_token(text: str) -> None:
    """Stands for a vocabulary without control tokens."""


def accepts(grammar: str, text: str, controls: bool = True) -> bool:
    """Returns whether a grammar accepts exactly a text."""
    matcher = llguidance.LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    for part in _SPLIT.split(text) if controls else [text]:
        control = token_id(part) if controls else None
        for token in [control] if control is not None else part.encode():
            if not matcher.consume_token(token):
                return False
    return bool(matcher.is_accepting())


def written(name: str) -> str:
    """Returns the family's two calls, in the form that grammars have."""
    text = FORMS[name].two
    if name == "HARMONY":
        return FORMS[name].one.removesuffix("<|call|>")  # one call a turn
    if name.startswith("COMMAND_R"):
        text = re.sub(r"(?<=\{)\n +|\n +(?=\})", "", text)
        return re.sub(r"\n +(?=\{)", "\n", re.sub(r",\n +(?=\")", ", ", text))
    if name == "LFM2":
        return text.replace("'", '"')
    return text.replace("end｜>\n", "end｜>")


def test_every_family_is_covered() -> None:
    assert {family(name).name for name in FORMS} == {one.name for one in FAMILIES}


@pytest.mark.parametrize("controls", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_grammars(name: str, controls: bool) -> None:
    ids = token_id if controls else no_token
    parallel = family(name).grammar(TOOLS, parallel=True, token_id=ids)
    two = written(name)
    assert accepts(parallel, two, controls), f"{two}\n{parallel}"
    parser = family(name).parser(TOOLS)
    parts = joined([*parser.push(two), *parser.finish()])
    assert {part[0] for part in parts} == {"call"} and len(parts) == 2 - (name == "HARMONY")
    wrong = re.sub(r"(?<=\D)2(?=\D)", "soon", two, count=1)
    assert wrong != two and not accepts(parallel, wrong, controls)
    other = two.replace("get_weather", "get_wheel")
    assert not accepts(parallel, other, controls)
    assert not accepts(parallel, "Hello", controls)
    if name != "HARMONY":
        one = family(name).grammar(TOOLS, parallel=False, token_id=ids)
        assert not accepts(one, two, controls)


@pytest.mark.parametrize("name", FORMS)
def test_a_required_parameter_must_come(name: str) -> None:
    """An answer without arguments is one of `now`, and none of get_weather."""
    grammar = family(name).grammar(TOOLS, parallel=True, token_id=token_id)
    two = written(name)
    if name == "HARMONY":
        two = two.replace("get_weather", "now")
        two = two.partition('{"city"')[0] + "{}"
        assert accepts(grammar, two)
        assert not accepts(grammar, two.replace("now", "get"))
    else:
        at = two.rindex("now")
        assert not accepts(grammar, f"{two[:at]}get{two[at + 3 :]}")


def test_values_of_tagged_calls() -> None:
    grammar = family("QWEN_XML").grammar(TOOLS, parallel=False, token_id=no_token)

    def call(**values: str) -> str:
        tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=get>\n{tags}</function>\n</tool_call>"

    for right in ({"city": "a\n<b>"}, {"city": ""}, {"city": "A", "unit": "F", "exact": "true"}):
        assert accepts(grammar, call(**right))
    for wrong in ({"city": "A", "unit": "K"}, {"unit": "C"}, {"city": "A", "area": '{"name": 1}'}):
        assert not accepts(grammar, call(**wrong))
    area = '{"corners": [1, 2.5], "name": "x"}'
    assert accepts(grammar, call(city="A", area=area))


def test_values_of_literal_calls() -> None:
    grammar = family("LFM2").grammar(TOOLS, parallel=False, token_id=token_id)

    def call(text: str) -> str:
        return f"<|tool_call_start|>[get({text})]<|tool_call_end|>"

    for right in (
        r'city="a \"b\" \\ \n", days=-3',
        'city="", unit="C", exact=False',
        'city="A", area={"corners": [1, 2.5], "name": "x"}',
        'city="A", area={}',
    ):
        assert accepts(grammar, call(right)), right
        parser = family("LFM2").parser(TOOLS)
        (part,) = joined([*parser.push(call(right)), *parser.finish()])
        assert part[0] == "call"
    for wrong in (
        "days=1",
        'city="A", unit="K"',
        'city="A", area={"name": 1}',
        'city="A",',
        "city=A",
    ):
        assert not accepts(grammar, call(wrong)), wrong


def test_schemas_with_references_and_any_values() -> None:
    schema = {
        "type": "object",
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        "properties": {
            "at": {"$ref": "#/$defs/p"},
            "tree": {"type": "array", "items": {"$ref": "#/properties/tree"}},
            "any": {},
            "one": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "map": {"type": "object"},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answers = {
        "QWEN_XML": "<tool_call>\n<function=f>\n<parameter=at>\n{V}\n</parameter>\n</function>"
        "\n</tool_call>",
        "LFM2": "<|tool_call_start|>[f(at={V}, any=[1, {\"a\": None}], one=None, map={\"k\": [1]})]"
        "<|tool_call_end|>",
        "HERMES": '<tool_call>\n{"name": "f", "arguments": {"at": {V}}}\n</tool_call>',
        "GEMMA": "<|tool_call>call:f{at:{V},map:{k:<|\"|>a<|\"|>}}<tool_call|>",
    }  # fmt: skip
    for name, answer in answers.items():
        grammar = family(name).grammar(tools, parallel=False, token_id=token_id)
        right, wrong = ('{"x": 1}', '{"x": "a"}') if name != "GEMMA" else ("{x:1}", "{x:a}")
        assert accepts(grammar, answer.replace("{V}", right)), grammar
        assert not accepts(grammar, answer.replace("{V}", wrong))


def test_what_has_no_grammar() -> None:
    with pytest.raises(ValueError, match="family 'none', 3 tools: there is no call to write"):
        NONE.grammar(TOOLS, parallel=True, token_id=no_token)
    with pytest.raises(ValueError, match="family 'hermes', 0 tools"):
        family("HERMES").grammar([], parallel=True, token_id=no_token)


@pytest.mark.parametrize("controls", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_calls_or_text(name: str, controls: bool) -> None:
    """Any text, or calls whose arguments are right; what the parser takes for a call is one."""
    ids = token_id if controls else no_token
    grammar = family(name).grammar(TOOLS, parallel=True, token_id=ids, content="text")
    two, prose = written(name), 'Hello.\n It is "{1}" <b>'
    wrong = re.sub(r"(?<=\D)2(?=\D)", "soon", two, count=1)
    answers = {two: True, wrong: False}
    if name == "HARMONY":
        final = "<|channel|>final<|message|>"
        preamble = f"<|channel|>commentary<|message|>{prose}<|end|><|start|>assistant"
        answers |= {final + prose: True, prose: False, preamble + two: True, final: True}
        answers |= {preamble + wrong: False, f"<|start|>assistant{final}{prose}": True}
    else:
        answers |= {prose: True, "": True, prose + wrong: name == "LLAMA"}
        answers |= {} if name == "LLAMA" else {prose + two: True}
    for answer, right in answers.items():
        assert accepts(grammar, answer, controls) is right, f"{answer}\n{grammar}"


@pytest.mark.parametrize("name", FORMS)
def test_calls_or_json(name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = family(name).grammar(TOOLS, parallel=True, token_id=token_id, content=schema)
    header = "<|channel|>final<|message|>" if name == "HARMONY" else ""
    two = written(name)
    assert accepts(grammar, two) and accepts(grammar, header + '{"n": 3}')
    assert not accepts(grammar, header + '{"n": "a"}') and not accepts(grammar, "Hello")
    alone = family(name).grammar([], parallel=True, token_id=token_id, content=schema)
    assert accepts(alone, header + '{"n": 3}') and not accepts(alone, two)


def test_thoughts_of_messages() -> None:
    """They are part of the grammar, with a limit."""
    thought = "<|channel|>analysis<|message|>abc<|end|>"
    ids = {**{text: token_id(text) for text in CONTROLS}, "<|end|>": 256}
    for budget, right in ((None, True), (3, True), (2, False)):
        grammar = family("HARMONY").grammar(
            TOOLS, parallel=True, token_id=ids.get, content="text", budget=budget
        )
        matcher = llguidance.LLMatcher(tokenizer(), grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, ids))})", f"{thought}<|start|>assistant"):
            tokens += [ids[part]] if ids.get(part) else part.encode()
        tokens += [ids["<|channel|>"], *b"final", ids["<|message|>"], *b"Hello"]
        assert (matcher.consume_tokens(tokens) and matcher.is_accepting()) is right


def test_text_in_a_frame() -> None:
    grammar = family("COMMAND_R7B").grammar(TOOLS, parallel=True, token_id=token_id, content="text")
    framed = "<|START_RESPONSE|>Hello<|END_RESPONSE|>"
    assert accepts(grammar, framed) and accepts(grammar, framed + written("COMMAND_R7B"))
