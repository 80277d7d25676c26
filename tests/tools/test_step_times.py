"""Times of whole programs by two models."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tools import aot, step_times
from tools.program_kernels import Asked, ProgramKernels, program_kernels
from tools.step_times import AGREE, LAUNCH, MEMORY_LATENCY, differences, step_time

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

HLO = """
%computation (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,8], y: f32[8,16]) -> f32[4,16] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8,16]{1,0} parameter(1)
  ROOT %product = f32[4,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%computation
}
"""


def test_multiply_adds_and_bytes_of_what_xla_launches():
    assert step_times._multiply_adds(HLO) == {"computation": 4 * 16 * 8}
    instructions = step_times.parse_hlo(HLO)
    line = next(line for line in HLO.splitlines() if "%product" in line)
    assert step_times._bytes(instructions["product"], line, instructions) == 4 * (32 + 128 + 64)


def test_xla_launches_take_a_launch_and_a_wait_each():
    found = program_kernels(Asked("llama-3.1-8b"))
    seconds = step_times.xla_launches(found)
    least = (LAUNCH + MEMORY_LATENCY) * len(found.xla)
    assert len(seconds) == len(found.xla) and least < sum(seconds) < 1.05 * least
    assert step_times.xla_launches(ProgramKernels(found.asked, (), found.hlo)) == []


@pytest.fixture(scope="module")
def decode() -> step_times.StepTime:
    return step_time(Asked("llama-3.1-8b"))


def test_both_models_agree(decode):
    """A token of the 8B, whose weights alone take 1.1 ms."""
    assert abs(decode.apart) <= AGREE and differences(decode) == ""
    for seconds in (decode.seconds, decode.event_seconds):
        assert 4.6e9 / 4.3e12 < seconds < 3e-3
    assert decode.tokens_per_second == pytest.approx(1 / decode.seconds)
    assert min(decode.tokens_per_second, decode.event_tokens_per_second) >= 650
    assert decode.launches == program_kernels(Asked("llama-3.1-8b")).launches


def test_a_difference_is_explained(decode):
    """By the kernels that it comes from, most first."""
    slow = dataclasses.replace(decode, event_seconds=2 * decode.seconds)
    told = differences(slow)
    assert told.startswith("llama-3.1-8b, batch 1: +100%: ") and told.count(" by events") == 3


def test_says_that_it_predicts(monkeypatch, decode, capsys, tmp_path):
    monkeypatch.setattr(step_times, "step_time", lambda asked: decode)
    path = tmp_path / "times.json"
    command = ["--shapes", "llama-3.1-8b", "--batches", "1", "--prompts", "--pieces", "--out"]
    command.append(str(path))
    assert step_times.main(command) == 0
    assert "PREDICTED, H200" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert "nothing is measured" in written["predicted"] and written["commit"]
    (program,) = written["programs"]
    assert program["apart"] == decode.apart and program["kernels"][0]["seconds"] > 0
