"""Published chat templates, rendered as transformers' `apply_chat_template` renders them.

The cases under tests/data/templates are always there: their templates call `tojson` with arguments
(GLM-4.7-Flash is under the MIT licence, Granite 3.3 under Apache 2.0), or refuse the system role
(Gemma 2). The others are read from
../shared/golden/templates.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import GOLDEN

from jax_q4k.models import chat
from jax_q4k.models.chat import worker

HERE = GOLDEN.parent / "templates"
SHARED = Path(__file__).parents[3] / "shared" / "golden" / "templates"


def case_lists(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`strftime_now` tells a given time."""

    def stop_at(time: str) -> None:
        class Stopped(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime.datetime:
                return datetime.datetime.fromisoformat(time)

        monkeypatch.setattr(worker.datetime, "datetime", Stopped)

    return stop_at


def check(path: Path, clock: Any) -> None:
    golden = json.loads(path.read_text())
    clock(golden["strftime_now"])
    template = path.with_name(golden["template"]).read_text()
    for case in golden["cases"]:
        context = {
            "documents": None,
            **golden["special_tokens"],
            **case["variables"],
            "tools": case["tools"],
            "messages": case["messages"],
            "add_generation_prompt": case["add_generation_prompt"],
        }
        try:
            got = {"text": worker.render(template, context, 10**6)}
        except Exception as error:  # of the template: named as in the golden file
            got = {"error": f"{type(error).__name__}: {error}"}
        want = {key: case[key] for key in ("text", "error") if key in case}
        assert got == want, case["case"]


@pytest.mark.parametrize("path", case_lists(HERE), ids=lambda path: path.stem)
def test_golden_templates(path: Path, clock: Any) -> None:
    check(path, clock)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden templates: {SHARED} is not there")
@pytest.mark.parametrize("path", case_lists(SHARED), ids=lambda path: path.stem)
def test_all_golden_templates(path: Path, clock: Any) -> None:
    check(path, clock)


def test_a_process_of_its_own_renders_the_same() -> None:
    """Templates of a file need no `tools` to be given."""
    path = case_lists(HERE)[0]
    golden = json.loads(path.read_text())
    template = path.with_name(golden["template"]).read_text()
    for case in golden["cases"]:
        if "text" in case and case["tools"] is None:
            variables = golden["special_tokens"] | case["variables"]
            text = chat.render(
                template, case["messages"], case["add_generation_prompt"], **variables
            )
            assert text == case["text"]


def test_a_system_message_that_is_refused_begins_the_first_of_the_user() -> None:
    """As the golden file's case whose messages were merged before."""
    path = HERE / "google-gemma-2-2b-it.json"
    golden = json.loads(path.read_text())
    template = path.with_name(golden["template"]).read_text()
    cases = {case["case"]: case for case in golden["cases"]}
    messages, want = cases["chat"]["messages"], cases["chat_merged"]["text"]
    assert messages[0]["role"] == "system"
    assert chat.render(template, messages, **golden["special_tokens"]) == want
    for others in (messages[:1], [messages[0], messages[2]]):  # there is no user's to begin
        with pytest.raises(chat.ChatTemplateError, match="System role not supported"):
            chat.render(template, others)
