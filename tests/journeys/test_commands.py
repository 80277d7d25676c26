"""The command line and Python share the command line's program cache."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from support.implementations import needs_native

from jax_q4k import models
from jax_q4k.models import cli

from .calls import Call, alone
from .commands import arguments, results
from .damage import programs
from .journey import Journey

pytestmark = needs_native

Command = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where commands in this process cache programs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jax-q4k" / "programs"


@contextlib.contextmanager
def without_the_tests_cache() -> Iterator[None]:
    """Unsets JAX's cache folder; while it is set, commands do not use their own cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        reset_cache()


@pytest.fixture
def command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Returns a function that runs a command line; `lines` is its standard input.

    The command must succeed. The function returns its output.
    """

    def run(*given: str, lines: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        capsys.readouterr()
        with without_the_tests_cache():
            code = cli.main(given)
        out, notes = capsys.readouterr()
        assert code == 0, notes
        return out

    return run


def demo(text: str, **fields: object) -> Call:
    """A call with the command line's defaults: int8 activations, and generation ends at EOS."""
    tokenizer = models.load("demo").tokenizer
    assert tokenizer is not None
    given = {"activations": None, "ignore_end": False, "prompts": (tuple(tokenizer.encode(text)),)}
    return Call(model="demo", **given | fields)  # type: ignore[arg-type]


def check(journey: Journey, command: Command, call: Call) -> None:
    journey.say(f"generate {call}")
    journey.compare(results(command(*arguments(call))), alone(call))


@pytest.mark.slow("starts the command several times", quick=["*"])
def test_one_command_after_another(folder: Path, command: Command) -> None:
    """Number of new tokens grows, exceeds the context with a shift, and shrinks again."""
    journey, call = Journey(folder), demo("The sea", sampling="drawn", seed=2)
    for new in (64, 300, 20):
        check(journey, command, dataclasses.replace(call, new_tokens=new))
    call = Call(model="short", activations=None)
    for new in (20, 150):
        check(journey, command, dataclasses.replace(call, new_tokens=new))


@pytest.mark.slow("starts the command several times")
def test_streams_as_text(folder: Path, command: Command) -> None:
    """Output of a command without --json."""
    given = ("generate", "--demo", "-p", "My dear", "--temperature", "0.8", "--seed", "3", "-n")
    want = command(*given, "90", "--no-cache")
    assert not folder.exists()
    assert want.startswith(command(*given, "20").removesuffix("\n"))
    assert command(*given, "90") == want


@pytest.mark.slow("starts the command several times")
def test_a_chat_after_a_command(folder: Path, command: Command) -> None:
    chat = ("chat", "--demo", "--seed", "1", "-n", "40")
    lines = "Hello\nWho are you?\n"
    want = command(*chat, "--no-cache", lines=lines)
    journey, prompt = Journey(folder), "User: Hello, how are you? Assistant:"
    check(journey, command, demo(prompt, sampling="drawn", new_tokens=20))
    assert command(*chat, lines=lines) == want
    check(journey, command, demo(prompt, sampling="drawn", new_tokens=90))


@pytest.mark.slow("starts the command several times")
def test_python_after_the_command_line(folder: Path, command: Command) -> None:
    """Python reuses the command's programs; different calls before and after stay correct."""
    journey, call = Journey(folder), Call(activations=None, sampling="drawn")
    longer = dataclasses.replace(call, new_tokens=200)
    check(journey, command, call)
    left = programs(folder)
    assert left
    journey.take(call)
    assert programs(folder) == left
    journey.take(longer)
    check(journey, command, longer)
    check(journey, command, call)


@pytest.mark.slow("starts the command several times")
def test_kinds_of_commands(folder: Path, command: Command) -> None:
    """Runs options in sequence that must be part of a program's key."""
    journey, call = Journey(folder), Call(activations=None)
    prompt = (1, 5, 9, 1, 5, 9, 1, 5)
    for fields in (
        {"lora": ("adapter", 1.0)},
        {"prompts": (prompt,), "draft": "lookup"},
        {"prompts": (prompt, (4,)), "sampling": "logprobs", "even": True},
        {"prompts": (prompt, (4,)), "sampling": "logprobs", "even": True, "new_tokens": 90},
    ):
        check(journey, command, dataclasses.replace(call, **fields))
