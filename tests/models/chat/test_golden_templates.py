"""Published chat templates, compared with transformers' `apply_chat_template`.

The cases under tests/data/templates are always available. Their templates call `tojson` with
arguments (GLM-4.7-Flash is under the MIT license, Granite 3.3 under Apache 2.0), or refuse the
system role (Gemma 2). The other cases are read from ../shared/golden/templates.

Some cases occur twice in the files: with the original messages, and with messages converted to a
format that the template accepts. `CHANGED` lists the templates for which the original messages must
render like the converted ones. For other templates they render to their own text.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from support.paths import GOLDEN

from jax_q4k.models import chat

HERE = GOLDEN.parent / "templates"
SHARED = Path(__file__).parents[4] / "shared" / "golden" / "templates"

#: Original case -> the converted case, and the templates that need the conversion.
CHANGED = {
    # These raise an error for parts, drop them, or print them as Python or JSON.
    "parts": (
        "parts_joined",
        """HuggingFaceTB-SmolLM3-3B LFM2-8B-A1B Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder
        deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1 google-gemma-2-2b-it
        ibm-granite-granite-3.3-2B-Instruct meta-llama-Llama-3.1-8B-Instruct
        meta-llama-Llama-3.2-3B-Instruct microsoft-Phi-3.5-mini-instruct
        mistralai-Mistral-Nemo-Instruct-2407 openai-gpt-oss-120b""",
    ),
    # These raise an error for arguments given as a string, or print them as a JSON string.
    "tools": (
        "tools_objects",
        """GLM-4.6 GLM-4.7-Flash MiniMax-M2 Mistral-Small-3.2-24B-Instruct-2506
        Qwen-Qwen2.5-7B-Instruct Qwen3-Coder Qwen3.5-4B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B
        deepseek-ai-DeepSeek-V3.1 google-gemma-4-31B-it meta-llama-Llama-3.1-8B-Instruct
        meta-llama-Llama-3.2-3B-Instruct mistralai-Mistral-Nemo-Instruct-2407
        openai-gpt-oss-120b""",
    ),
    "chat": ("chat_merged", "google-gemma-2-2b-it"),
}


def case_lists(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json"))


def check(path: Path) -> None:
    golden = json.loads(path.read_text())
    template = path.with_name(golden["template"]).read_text()
    cases = {case["case"]: case for case in golden["cases"]}
    for name, case in cases.items():
        changed, templates = CHANGED.get(name, ("", ""))
        want = cases[changed] if path.stem in templates.split() else case
        arguments: dict[str, Any] = {
            "add_generation_prompt": case["add_generation_prompt"],
            "tools": case["tools"],
            "now": datetime.datetime.fromisoformat(golden["strftime_now"]),
            **golden["special_tokens"],
            **case["variables"],
        }
        if "text" in want:
            assert chat.render(template, case["messages"], **arguments) == want["text"], name
        else:  # Gemma 2 has no tool calls
            with pytest.raises(chat.ChatTemplateError, match="^chat template: TemplateError: "):
                chat.render(template, case["messages"], **arguments)
    check_continuation(template, golden["special_tokens"])


def check_continuation(template: str, special_tokens: dict[str, str]) -> None:
    """A prompt that continues an answer ends behind it, with spaces that templates strip."""
    text = "The sea is"
    user = {"role": "user", "content": "Where is the sea?"}
    messages = [user, {"role": "assistant", "content": f"{text} "}]
    options: dict[str, Any] = {"now": datetime.datetime(2026, 1, 2), **special_tokens}
    whole = chat.render(template, messages, add_generation_prompt=False, **options)
    prompt = chat.render(template, messages, continue_final_message=True, **options)
    assert prompt == f"{whole[: whole.rindex(text)]}{text} "


@pytest.mark.parametrize("path", case_lists(HERE), ids=lambda path: path.stem)
def test_golden_templates(path: Path) -> None:
    check(path)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
@pytest.mark.parametrize("path", case_lists(SHARED), ids=lambda path: path.stem)
def test_all_golden_templates(path: Path) -> None:
    check(path)


def test_what_cannot_be_continued() -> None:
    user, parts = {"role": "user", "content": "U"}, [{"type": "text", "text": "The sea"}]
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    options: dict[str, Any] = {"continue_final_message": True}
    answer = {"role": "assistant", "content": parts}
    assert chat.render(template, [user, answer], **options) == "[user] U\n[assistant] The sea"
    told = "{% if add_generation_prompt %}a header follows {% endif %}" + template
    assert chat.render(told, [user, answer], **options) == "[user] U\n[assistant] The sea"
    assert chat.render(told, [user]) == "a header follows [user] U\n"
    for wrong in ([], [user], [{"role": "assistant", "content": None}]):
        with pytest.raises(ValueError, match="needs an assistant's text as the last message"):
            chat.render(template, wrong, **options)
    with pytest.raises(chat.ChatTemplateError, match="does not show the end of the last message"):
        chat.render("{{ messages[0].content }}", [user, answer], **options)


def test_a_system_message_that_no_message_of_the_user_follows_stays() -> None:
    template = (HERE / "google-gemma-2-2b-it.jinja").read_text()
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    for messages in ([system], [system, {"role": "assistant", "content": "A"}]):
        with pytest.raises(chat.ChatTemplateError, match="System role not supported"):
            chat.render(template, messages)
    parts = [{"type": "text", "text": "S"}]
    merged = chat.render(template, [{"role": "user", "content": "S\n\nU"}])
    assert chat.render(template, [system | {"content": parts}, user]) == merged
    assert chat.render(template, [system, user]) == merged
