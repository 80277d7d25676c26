"""Families of chat templates: detection, and the inverse of what templates render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.paths import GOLDEN

from jax_q4k.models import chat, tokenizer
from jax_q4k.models.chat.output import NONE, detection, family_of
from jax_q4k.models.chat.process import ChatTemplateTimeoutError

from .conversations import HARD, TOOLS, joined

HERE = GOLDEN.parent / "templates"
SHARED = Path(__file__).parents[5] / "shared" / "golden" / "templates"

THINK, NO_THOUGHT = "<think>", None
#: Template -> family, and the mark that begins a thought.
TABLE: dict[str, tuple[str, str | None]] = {
    "GLM-4.6": ("glm", THINK),
    "GLM-4.7-Flash": ("glm", THINK),
    "HuggingFaceTB-SmolLM3-3B": ("none", THINK),  # this file has no tools
    "LFM2-8B-A1B": ("lfm2", NO_THOUGHT),
    "MiniMax-M2": ("minimax", THINK),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", NO_THOUGHT),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", NO_THOUGHT),
    "Qwen-Qwen3-0.6B": ("hermes", THINK),
    "Qwen3-Coder": ("qwen_xml", NO_THOUGHT),
    "Qwen3.5-4B": ("qwen_xml", THINK),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", THINK),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", THINK),
    "google-gemma-2-2b-it": ("none", NO_THOUGHT),
    "google-gemma-4-31B-it": ("gemma", "<|channel>thought"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", THINK),
    "ibm-granite-granite-4.0": ("hermes", NO_THOUGHT),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama", NO_THOUGHT),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama", NO_THOUGHT),
    "microsoft-Phi-3.5-mini-instruct": ("none", NO_THOUGHT),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "[THINK]"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_list", NO_THOUGHT),
    "openai-gpt-oss-120b": ("harmony", "<|channel|>analysis<|message|>"),
}
#: Templates that drop tool calls from the conversation.
DROP_CALLS = ("LFM2-8B-A1B", "ibm-granite-granite-3.3-2B-Instruct")

_CALLS = "{% for c in m.tool_calls or [] %}BODY{% if not loop.last %}COMMA{% endif %}{% endfor %}"
#: Small templates, in the form of published ones that are not among the files.
SMALL = {
    "command_r": (
        "Action: ```json\n[\nCALLS]```",
        '    {\n        "tool_name": "{{ c.function.name }}",\n        "parameters": '
        "{{ c.function.arguments | tojson }}\n    }",
        ",\n",
    ),
    "command_r7b": (
        "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\nCALLS\n]"
        "<|END_ACTION|>",
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}',
        ",\n",
    ),
    "lfm2": (
        "<|tool_call_start|>[CALLS]<|tool_call_end|>",
        "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
        "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        ", ",
    ),
    "granite": (
        "<|tool_call|>[CALLS]",
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
        ", ",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>CALLS<|tool_calls_section_end|>",
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>",
        "",
    ),
    "seed": (
        "CALLS",
        "<seed:tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>\n"
        "{% endfor %}</function>\n</seed:tool_call>",
        "\n",
    ),
    "phi": ("CALLS", "<|tool_call|>{{ c.function | tojson }}<|/tool_call|>", ""),
    "nemotron": ("<TOOLCALL>[CALLS]</TOOLCALL>", "{{ c.function | tojson }}", ", "),
    "apriel": ("\n<tool_calls>[CALLS]</tool_calls>", "{{ c.function | tojson }}", ", "),
    "gigachat": (
        "CALLS<|message_sep|>\n\n",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n{{ c.function | tojson }}",
        "",
    ),
}


def small(name: str) -> str:
    """Returns the template of a family, with content before the calls."""
    around, body, comma = SMALL[name]
    calls = _CALLS.replace("BODY", body).replace("COMMA", comma)
    return (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}"
        + around.replace("CALLS", calls)
        + "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def golden(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jinja"))


def variables(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.with_suffix(".json").read_text())["special_tokens"]
    return found


def check_detection(path: Path) -> None:
    found = family_of(path.read_text())
    begin = found.thought.begin if found.thought else None
    assert (found.name, begin) == TABLE[path.stem]


@pytest.mark.parametrize("path", golden(HERE), ids=lambda path: path.stem)
def test_detection(path: Path) -> None:
    check_detection(path)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
@pytest.mark.parametrize("path", golden(SHARED), ids=lambda path: path.stem)
def test_detection_of_all(path: Path) -> None:
    check_detection(path)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
def test_the_table_is_complete() -> None:
    assert {path.stem for path in golden(SHARED)} == {*TABLE}


@pytest.mark.parametrize("name", SMALL)
def test_detection_of_small_templates(name: str) -> None:
    assert family_of(small(name)).name == name


def message(*calls: tuple[str, dict[str, Any]], content: str = "") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }


def rendered(template: str, answer: dict[str, Any], variables: dict[str, Any]) -> tuple[str, str]:
    """Returns the assistant's part of a conversation, and the prompt before it, if it is one."""
    user = {"role": "user", "content": "U"}
    prompt = chat.render(template, [user], tools=TOOLS, **variables)
    text = chat.render(template, [user, answer], False, tools=TOOLS, **variables)
    plain = {"role": "assistant", "content": "Zq8x"}
    other = chat.render(template, [user, plain], False, tools=TOOLS, **variables)
    same = next(i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return (text[len(prompt) :], prompt) if text.startswith(prompt) else (text[same:], "")


CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("get_weather", {"city": "Zürich", "days": 2})],
    "hard": [("get", {"city": HARD, "days": -1, "exact": False})],
    "nested": [("get", {"city": "", "area": {"corners": [1.5, 2], "name": 'a "b" {c}'}})],
    "empty": [("now", {})],
    "two": [("get_weather", {"city": "A"}), ("now", {})],
}


def check_inverse(template: str, variables: dict[str, Any], kind: str) -> None:
    family, calls = family_of(template), CALLS[kind]
    if family.name == "harmony":
        calls = calls[:1]  # its template renders one
    text, prompt = rendered(template, message(*calls), variables)
    parser = family.parser(TOOLS, inside=family.opens_thought(prompt))
    parts = joined([*parser.push(text), *parser.finish()])
    found = [(part[1], json.loads(part[2])) for part in parts if part[0] == "call"]
    if family.name == "lfm2" and kind == "hard":
        found[0][1]["city"] = HARD  # its template escapes nothing in strings
    assert found == calls, text
    rest = "".join(part[1] for part in parts if part[0] == "content")
    assert rest.strip() in ("", *ENDS), text


#: Marks of the end of a turn, which the parser does not read.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "</s>", "[e~[", "<|end|>", "<|message_sep|>\n\n<|end|>",
    "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜><｜Assistant｜><｜end▁of▁sentence｜>",
    "<|end_of_text|>", "<|tool_response>", "<turn|>", "<|user|>",
)  # fmt: skip
RENDERED = [p for p in golden(SHARED) if TABLE[p.stem][0] != "none" and p.stem not in DROP_CALLS]


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_rendered_calls_come_back(path: Path, kind: str) -> None:
    if kind == "two" and path.stem.startswith("meta-llama"):
        with pytest.raises(chat.ChatTemplateError, match="only supports single tool-calls"):
            check_inverse(path.read_text(), variables(path), kind)
        return
    check_inverse(path.read_text(), variables(path), kind)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
@pytest.mark.parametrize(
    "stem",
    [
        "GLM-4.6",
        "GLM-4.7-Flash",
        "MiniMax-M2",
        "Qwen-Qwen3-0.6B",
        "Qwen3.5-4B",
        "google-gemma-4-31B-it",
        "openai-gpt-oss-120b",
    ],
)
def test_rendered_thoughts_come_back(stem: str) -> None:
    path = SHARED / f"{stem}.jinja"
    template = path.read_text()
    answer = message(*CALLS["one"]) | {"reasoning_content": "a thought\n{x}"}
    text, prompt = rendered(template, answer, variables(path))
    family = family_of(template)
    parser = family.parser(TOOLS, inside=family.opens_thought(prompt))
    parts = joined([*parser.push(text), *parser.finish()])
    assert [part[:2] for part in parts[:2]] == [
        ("reasoning", "a thought\n{x}"),
        ("call", "get_weather"),
    ]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "kimi"])  # prints ids
def test_small_templates_come_back(name: str, kind: str) -> None:
    check_inverse(small(name), {}, kind)


@pytest.mark.parametrize(
    "stem, variables, opens",
    [
        ("MiniMax-M2", {}, True),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, True),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": False}, False),
        ("Qwen-Qwen3-0.6B", {}, False),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, False),
        ("google-gemma-4-31B-it", {"enable_thinking": False}, False),
        ("Qwen3.5-4B", {}, True),
        ("Qwen-Qwen2.5-7B-Instruct", {}, False),
    ],
)
@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
def test_prompts_that_begin_a_thought(stem: str, variables: dict[str, Any], opens: bool) -> None:
    template = (SHARED / f"{stem}.jinja").read_text()
    prompt = chat.render(template, [{"role": "user", "content": "<think>"}], **variables)
    assert family_of(template).opens_thought(prompt) == opens


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = small("nemotron") + "{# once #}"
    first = family_of(template)
    before = detection._family_of.cache_info().misses
    assert family_of(template) is first and detection._family_of.cache_info().misses == before


def test_templates_without_tools_or_at_all() -> None:
    assert family_of("{{ messages[0].content }}") == NONE
    assert family_of("{{ raise_exception('no') }}") == NONE
    assert family_of("{% if %}") == NONE
    file = GOLDEN.parent / "tokenizers" / "ggml-vocab-llama-spm.gguf"
    assert family_of(tokenizer.from_gguf(file)) == NONE
    qwen = tokenizer.from_gguf(file.with_name("ggml-vocab-qwen2.gguf"))
    assert family_of(qwen) == NONE
    assert family_of(qwen.with_chat_template(small("phi"))).name == "phi"


def test_a_template_that_rejects_calls_is_known_by_its_text() -> None:
    refuses = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}"
    template = refuses + "{{ m.content }}{% endfor %}{# <tool_call></tool_call> #}"
    assert family_of(template).name == "hermes"
    assert family_of(template + "{# <think></think> #}").thought is not None


def test_a_slow_template_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = small("apriel") + "{# slow #}"

    def slow(*args: Any, **options: Any) -> str:
        raise ChatTemplateTimeoutError("chat template took longer than 10 s")

    with monkeypatch.context() as patch:
        patch.setattr(detection, "render", slow)
        with pytest.raises(chat.ChatTemplateError, match="took longer"):
            family_of(template)
    assert family_of(template).name == "apriel"
