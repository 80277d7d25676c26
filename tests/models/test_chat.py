"""Chat templates: what they render, and what hostile ones get."""

from __future__ import annotations

import time

import pytest
from helpers import GOLDEN

from jax_q4k.models import chat, tokenizer

VOCABULARIES = GOLDEN.parent / "tokenizers"
SMALL = chat.Limits(seconds=5, characters=10_000, megabytes=256)
CONVERSATION = [
    {"role": "user", "content": "hi {{ 7 * 7 }} é🙂"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]


def test_the_template_of_a_file() -> None:
    t = tokenizer.from_gguf(VOCABULARIES / "ggml-vocab-qwen2.gguf")
    head = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    head += "<|im_start|>user\nhi {{ 7 * 7 }} é🙂<|im_end|>\n"
    tail = "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
    text = chat.render(t, CONVERSATION, add_generation_prompt=False)
    assert text == head + tail
    assert chat.render(t, CONVERSATION) == head + tail + "<|im_start|>assistant\n"
    ids = t.encode(text, add_special=False, parse_special=True)
    assert [t.token(i) for i in ids].count("<|im_start|>") == 4
    assert t.decode(ids, skip_special=False) == text


def test_a_file_without_template() -> None:
    t = tokenizer.from_gguf(VOCABULARIES / "ggml-vocab-llama-spm.gguf")
    with pytest.raises(
        chat.ChatTemplateError,
        match="ggml-vocab-llama-spm.gguf: tokenizer.chat_template: is missing",
    ):
        chat.render(t, CONVERSATION)


def test_what_templates_may_use() -> None:
    t = tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
            "tokenizer.chat_template": (
                "{{ bos_token }}\n"
                "{% for m in messages %}\n"
                "  {% if loop.index > 2 %}{% break %}{% endif %}\n"
                "[{{ m['role'] }}] {{ m.content | trim }}\n"
                "{% endfor %}\n"
                "{% generation %}{{ {'a': 'é<'} | tojson }}{% endgeneration %}"
                "{% if thinking is defined and thinking %} {{ strftime_now('%Y') | length }}"
                "{% endif %}{{ eos_token }}"
            ),
        }
    )
    want = '<s>\n[user] hi {{ 7 * 7 }} é🙂\n[assistant] hello\n{"a": "é<"}'
    assert chat.render(t, CONVERSATION) == want + "</s>"
    assert chat.render(t, CONVERSATION, thinking=True) == want + " 4</s>"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", '{"b": "é<", "a": [1]}'),
        ("ensure_ascii=True", r'{"b": "\u00e9<", "a": [1]}'),
        ("ensure_ascii=False", '{"b": "é<", "a": [1]}'),
        ("True", r'{"b": "\u00e9<", "a": [1]}'),
        ("indent=1", '{\n "b": "é<",\n "a": [\n  1\n ]\n}'),
        ("separators=(',', ':')", '{"b":"é<","a":[1]}'),
        ("sort_keys=true", '{"a": [1], "b": "é<"}'),
        ("False, none, [',', ':'], true", '{"a":[1],"b":"é<"}'),
    ],
)
def test_tojson_takes_the_arguments_of_transformers(arguments: str, text: str) -> None:
    template = f"{{{{ {{'b': 'é<', 'a': [1]}} | tojson({arguments}) }}}}"
    assert chat.render(template, []) == text


def test_tools_and_documents_are_none_unless_given() -> None:
    template = "{{ tools is none }} {{ documents is none }}"
    assert chat.render(template, []) == "True True"
    assert chat.render(template, [], tools=[]) == "False True"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ nothing.at_all }}", "UndefinedError: 'nothing' is undefined"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError"),
        ("{{ (messages | attr('__class__')).__bases__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(1000000) }}", "Range too big"),
        ("{% for i in range(99999) %}aaaaaaaa{% endfor %}", "output exceeds 10000 characters"),
        ("{{ 'a' * 20000 }}", "output exceeds 10000 characters"),
        ("{{ 'a' * 10**10 }}", "needs more than 256 MB"),
        (
            "{% set n = namespace(s='a') %}"
            "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "256 MB",
        ),
        ("{{ '%3000000000d' % 1 }}", "needs more than 256 MB"),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "recurses too deeply"),
    ],
)
def test_hostile_templates(template: str, problem: str) -> None:
    with pytest.raises(chat.ChatTemplateError, match="^chat template: ") as error:
        chat.render(template, CONVERSATION, limits=SMALL)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{% set a = m(n - 1) %}{% endif %}"
        "{% endmacro %}{{ m(99) }}",
        "{{ 7 ** (9 ** 9) }}",
    ],
)
def test_endless_templates(template: str) -> None:
    limits = chat.Limits(seconds=0.6)
    start = time.monotonic()
    with pytest.raises(chat.ChatTemplateError, match="took longer than 0.6 s"):
        chat.render(template, CONVERSATION, limits=limits)
    assert time.monotonic() - start < 5


def test_messages_are_data() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        chat.render("x", [{"role": "user", "content": object()}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        chat.render("x", [], temperature=float("nan"))
    for wrong, found in ((None, "NoneType"), ("abc", "str"), ({"role": "user"}, "dict")):
        with pytest.raises(TypeError, match=f"messages is of type {found}, expected a list"):
            chat.render("x", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"messages\[1\] is of type str, expected a dict"):
        chat.render("x", [CONVERSATION[0], "abc"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="source is of type NoneType"):
        chat.render(None, CONVERSATION)  # type: ignore[arg-type]
