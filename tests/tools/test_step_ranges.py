"""Ranges of predicted programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tools import aot, step_ranges
from tools.event_model import BASE, UNCERTAIN
from tools.program_kernels import Asked, ProgramKernels
from tools.step_times import MEMORY_LATENCY, assumed_seconds
from tools.thunks import Thunk

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

ASKED = Asked("llama-3.1-8b", batch=8)
THREE = ProgramKernels(ASKED, ((Thunk(0, "kKernel", "fusion"), 2), (Thunk(1, "kCopy", ""), 1)), "")


@pytest.fixture
def three_launches(monkeypatch):
    monkeypatch.setattr(step_ranges, "program_kernels", lambda asked: THREE)


def test_other_assumptions_about_xla_launches():
    """Three launches of no bytes."""
    for launch in (1e-6, 2e-6):
        seconds = assumed_seconds(THREE, replace(BASE, launch=launch))
        assert seconds == pytest.approx(3 * (launch + MEMORY_LATENCY))


@pytest.mark.usefixtures("three_launches")
def test_a_range_is_of_all_assumptions_together():
    found = step_ranges.step_range(ASKED)
    (launch,) = (each for each in UNCERTAIN if each.name == "launch")
    rates = [8 / (3 * (end + MEMORY_LATENCY)) for end in (launch.slow, launch.fast)]
    assert [found.slow, found.fast] == pytest.approx(rates)


@pytest.mark.usefixtures("three_launches")
def test_effects_are_of_one_assumption_each(capsys, tmp_path):
    path = tmp_path / "ranges.json"
    assert step_ranges.main(["--batches", "8", "--effects", "--out", str(path)]) == 0
    assert "PREDICTED, llama-3.1-8b, batch 8: " in capsys.readouterr().out
    alone = {each.assumption: each for each in step_ranges.effects(ASKED)}
    assert list(alone) == [each.name for each in UNCERTAIN]
    assert alone["launch"].slow < alone["launch"].fast
    assert alone["busy"].slow == alone["busy"].fast  # XLA's launches have no tensor-core kernels
    written = json.loads(path.read_text())
    assert written["programs"][0]["asked"]["batch"] == 8 and len(written["assumptions"]) == len(
        UNCERTAIN
    )


@pytest.mark.slow("compiles a program for a GPU and simulates many events", quick=[])
def test_a_token_of_llama_8b():
    """The range contains the prediction and what was measured."""
    found = step_ranges.step_range(Asked("llama-3.1-8b"))
    assert found.slow < 549 < 684 < found.fast
