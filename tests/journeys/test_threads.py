"""Threads that share a model, a program cache, or a prefix."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.implementations import needs_native

from jax_q4k import models

from .calls import Call, alone, difference
from .journey import Journey

pytestmark = needs_native
THREADS = 3
#: Seconds that a thread may wait for another, and for a lock.
PATIENCE, LOCKED = 60, 0.3


def together(work: Callable[[int], Any]) -> list[Any]:
    """Runs `work` in threads that start together; returns their results."""
    begin = threading.Barrier(THREADS)

    def one(index: int) -> Any:
        begin.wait(PATIENCE)
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


@pytest.mark.slow("compiles in eight threads")
@pytest.mark.parametrize("kept", [False, True])
def test_a_shape_that_is_new_to_all(kept: bool, tmp_path: Path) -> None:
    journey, call = Journey(tmp_path), Call(model="llama-bias", sampling="drawn")
    model = journey.model(call) if kept else call.load()
    calls = [dataclasses.replace(call, seed=seed) for seed in range(THREADS)]
    for got, one in zip(together(lambda i: calls[i].run(model)), calls, strict=True):
        journey.compare(got, alone(one))


@pytest.mark.slow("compiles a program for each call of a journey")
def test_shapes_of_their_own(tmp_path: Path) -> None:
    """Runs with an empty program cache, then with a filled one."""
    journey, call = Journey(tmp_path), Call(model="llama-bias", sampling="drawn")
    calls = [dataclasses.replace(call, new_tokens=new) for new in (20, 64, 150)]
    for _ in range(2):
        model = journey.model(call)
        for got, one in zip(together(lambda i: calls[i].run(model)), calls, strict=True):  # noqa: B023
            journey.compare(got, alone(one))
        journey.restart()


@pytest.mark.slow("compiles a program for each call of a journey")
def test_prefixes_of_their_own(tmp_path: Path) -> None:
    journey, call = Journey(tmp_path), Call(model="llama-bias")
    model = journey.model(call)

    def talk(index: int) -> list[tuple[Call, Any]]:
        prefix, prompt, found = models.Prefix(), (3 + index, *range(7, 23)), []
        for _ in range(2):
            one = dataclasses.replace(call, prompts=(prompt,), new_tokens=9)
            got = one.run(model, prefix)
            found.append((one, got))
            prompt = (*prompt, *got[0].tokens, 11)
        return found

    for one, got in (pair for found in together(talk) for pair in found):
        journey.compare(got, alone(one))


class Pause:
    """Stops a thread at the first visit of the `at`-th line of a file while `meanwhile` runs."""

    def __init__(self, file: str, at: int, meanwhile: Callable[[], None]) -> None:
        self._file, self._at, self._meanwhile = file, at, meanwhile
        self._seen: set[int] = set()

    @property
    def came(self) -> bool:
        """Whether the thread reached that line."""
        return len(self._seen) > self._at

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line" and frame.f_lineno not in self._seen:
            self._seen.add(frame.f_lineno)
            if len(self._seen) == self._at + 1:
                self._meanwhile()
        return self


@pytest.mark.slow("compiles a program for each call of a journey")
def test_one_prefix_in_two_threads() -> None:
    """One thread stops at each line of the prefix's module in turn while another makes a call."""
    first = Call(model="llama-bias", prompts=(tuple(range(3, 23)),), new_tokens=9)
    model, at, file = first.load(), 0, sys.modules[models.Prefix.__module__].__file__
    assert file is not None
    start = (*first.prompts[0], *alone(first)[0].tokens)
    mine = dataclasses.replace(first, prompts=((*start, 40, 41),))
    theirs = dataclasses.replace(first, prompts=((*start[:25], 50, 51),))
    while True:
        prefix = models.Prefix()
        first.run(model, prefix)
        outputs: dict[str, Any] = {}
        others = threading.Thread(target=lambda: outputs.update(theirs=theirs.run(model, prefix)))  # noqa: B023

        def meanwhile() -> None:
            others.start()  # noqa: B023
            others.join(LOCKED)  # noqa: B023  # it may wait for what this thread holds

        pause = Pause(file, at, meanwhile)

        def paused() -> None:
            sys.settrace(pause)  # noqa: B023
            outputs["mine"] = mine.run(model, prefix)  # noqa: B023

        thread = threading.Thread(target=paused)
        thread.start()
        thread.join(PATIENCE)
        if not pause.came:
            break
        others.join(PATIENCE)
        for name, call in (("mine", mine), ("theirs", theirs)):
            problem = difference(outputs[name], alone(call))
            assert problem is None, f"stopped at line {at} of the prefix, {name}: {problem}"
        again = dataclasses.replace(mine, prompts=((*mine.prompts[0], 7),))
        assert difference(again.run(model, prefix), alone(again)) is None
        at += 1
    assert at > 5
