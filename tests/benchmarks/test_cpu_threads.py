"""The simulation of more threads splits tasks like the C++ code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import cpu_threads
from jax_q4k.native import build

SOURCES = Path(build.__file__).with_name("src")


@pytest.mark.parametrize(
    ("file", "constant", "value"),
    [
        ("threads.h", "kWorthWaking", cpu_threads.WORTH_WAKING),
        ("threads.h", "kWorthTaking", cpu_threads.WORTH_TAKING),
        ("kernels.h", "kTile", cpu_threads.TILE),
        ("attention_handlers.cpp", "kSharing", cpu_threads.SHARING),
    ],
)
def test_its_constants_are_those_of_the_kernels(file, constant, value):
    match = re.search(rf"{constant} = (\d+)(?: << (\d+))?;", (SOURCES / file).read_text())
    assert match is not None and int(match[1]) << int(match[2] or 0) == value


def test_one_thread_is_as_fast_as_was_measured_and_eight_no_faster_than_eight_times():
    for rows, rate in ((cpu_threads.PROMPT, 280.0), (1, 46.0)):
        found = cpu_threads.simulated(rows, rate)
        assert found[1] == pytest.approx(rate)
        assert all(found[a] < found[b] for a, b in zip((1, 2, 4), (2, 4, 8), strict=True))
        assert found[8] <= 8 * rate


def test_tasks_that_do_not_divide_leave_threads_waiting():
    assert cpu_threads.seconds([(9, 1e9)], 1e9, 8) == pytest.approx(2, rel=1e-3)
    assert cpu_threads.seconds([(9, 1.0)], 1e9, 8) < 1e-4  # too little work to wake a thread for
