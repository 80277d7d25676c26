"""The processes that render chat templates: they serve many calls and keep their results apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jax_q4k.models import chat
from jax_q4k.models.chat.process import PROCESSES

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
QUICK = chat.Limits(seconds=0.5)


def render(template: str = "{{ messages[0].content }}", **options: chat.Limits) -> str:
    return chat.render(template, MESSAGES, **options)


def process_id() -> int:
    assert render() == "hi"
    return PROCESSES.running[0]


def is_running(pid: int) -> bool:
    """Whether a process runs; False for a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(pid)


def test_many_calls_have_one_process() -> None:
    first = process_id()
    with pytest.raises(chat.ChatTemplateError):
        render("{{ nothing.at_all }}")
    assert process_id() == first


@pytest.mark.parametrize(
    ("template", "limits", "problem"),
    [
        (ENDLESS, QUICK, "took longer than 0.5 s"),
        ("{{ 'a' * 10**10 }}", chat.Limits(), "needs more than 512 MB"),
    ],
)
def test_a_process_beyond_its_limits_is_replaced(
    template: str, limits: chat.Limits, problem: str
) -> None:
    first = process_id()
    with pytest.raises(chat.ChatTemplateError, match=problem):
        render(template, limits=limits)
    assert not is_running(first)
    assert process_id() != first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_process_that_was_killed_is_replaced(number: signal.Signals) -> None:
    first = process_id()
    os.kill(first, number)
    assert ends(first, 5)
    assert process_id() != first


def test_a_process_that_is_killed_at_work() -> None:
    """Restarts a killed process once for the job; if it is killed again, an error says how."""
    first, kills = process_id(), []

    def kill() -> None:
        while len(kills) < 2:
            time.sleep(0.2)
            (working,) = {one.pid for one in PROCESSES._all} - {None, *PROCESSES.running}
            kills.append(working)
            os.kill(working, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(chat.ChatTemplateError, match="ended its process with status -9"):
        render(ENDLESS)
    thread.join()
    assert kills[0] == first != kills[1]
    assert render() == "hi"


def test_memory_that_an_earlier_job_took_is_not_a_later_ones() -> None:
    """Cached templates keep their constants; a job that lacks memory gets a new process."""
    limits = chat.Limits(megabytes=130)
    needs_most = "{{ ('a' * (100_000_000 * (messages | length))) | length }}"
    PROCESSES.close()
    assert render(needs_most, limits=limits) == "100000000"
    assert render("hi{{ 'a' * 20_000_000 if not messages }}") == "hi"
    first = process_id()
    assert render(needs_most, limits=limits) == "100000000"
    assert process_id() != first


def test_a_template_leaves_nothing_for_another() -> None:
    render("{% set x = 1 %}{% macro m() %}{% endmacro %}{% set n = namespace(y=2) %}{{ cycler }}")
    assert render("{{ x is defined }}{{ m is defined }}{{ n is defined }}") == "FalseFalseFalse"
    for change in ("{% set cycler.x = 1 %}", "{{ messages.append(1) }}"):
        with pytest.raises(chat.ChatTemplateError, match="^chat template: "):
            render(change)


def test_threads_get_their_own_answers() -> None:
    answers: dict[int, set[str]] = {i: set() for i in range(4)}

    def ask(i: int) -> None:
        for _ in range(20):
            message = {"role": "user", "content": f"{i}"}
            answers[i].add(chat.render("{{ messages[0].content }}", [message]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: {f"{i}"} for i in answers}


def test_a_slow_template_holds_up_no_other() -> None:
    first = process_id()
    limits = chat.Limits(seconds=2)
    slow = threading.Thread(
        target=lambda: pytest.raises(chat.ChatTemplateError, render, ENDLESS, limits=limits)
    )
    slow.start()
    while first in PROCESSES.running and slow.is_alive():
        time.sleep(0.01)
    assert render() == "hi" and slow.is_alive()
    slow.join()


def test_probes_share_the_time_of_the_prompt() -> None:
    """The six probes of a tool call and the prompt take a third of a second each."""
    slow = "{% for i in range(6000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    began = time.monotonic()
    with pytest.raises(chat.ChatTemplateError, match="took longer than 1 s"):
        chat.render(slow + "{{ messages }}", messages, limits=chat.Limits(seconds=1))
    assert time.monotonic() - began < 1.9


def test_a_fork_starts_its_own() -> None:
    first = process_id()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if process_id() != first and is_running(first) else 2
            PROCESSES.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process_id() == first


@pytest.mark.slow("waits for processes to end")
@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_with_the_one_that_started_it(busy: bool) -> None:
    """The parent was killed and could not tell; a running job ends at its own limit."""
    body = f"""
import sys, threading, time
from jax_q4k.models import chat
from jax_q4k.models.chat.process import PROCESSES
chat.render("x", [])
if {busy}:
    job = (lambda: chat.render({ENDLESS!r}, [], limits=chat.Limits(seconds=1.5)))
    threading.Thread(target=job, daemon=True).start()
    time.sleep(0.5)
print(next(one.pid for one in PROCESSES._all if one.pid), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    assert ends(pid, 10)


def test_nothing_is_left_to_warn_of_at_the_end() -> None:
    body = "from jax_q4k.models import chat; print(chat.render('x', []))"
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr
    assert "ResourceWarning" not in done.stderr


def test_an_answer_that_nobody_awaits_any_more_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_id()
    loads = json.loads

    def interrupted(text: str) -> None:
        monkeypatch.setattr(json, "loads", loads)
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("stale")
    assert render() == "hi"


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": float("nan")}, {"megabytes": -1}])
def test_limits_that_are_none(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        chat.Limits(**limits)  # type: ignore[arg-type]


def test_a_large_conversation_passes_through_the_pipe() -> None:
    content = "é" * 700_000
    assert chat.render("{{ messages[0].content }}", [MESSAGES[0] | {"content": content}]) == content
