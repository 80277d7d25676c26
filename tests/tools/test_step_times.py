"""Times of whole programs, from two models."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from tools import aot, step_times
from tools.program_kernels import Asked, ProgramKernels, program_kernels
from tools.step_times import AGREE, LAUNCH, MEMORY_LATENCY, differences, step_time
from tools.thunks import Thunk

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


CUBLAS = """
ENTRY %main (x: f16[4096,4096], w: f16[14336,4096]) -> f16[4096,14336] {
  %x = f16[4096,4096]{1,0} parameter(0)
  %w = f16[14336,4096]{1,0} parameter(1)
  %y = (f16[4096,14336]{1,0}, s8[4194304]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
}
"""


@pytest.mark.parametrize(("dtype", "rate"), [("f16", 680e12), ("f32", 67e12)])
def test_products_by_cublas_take_their_multiply_adds(dtype, rate):
    """float16 products run at the device's stated rate minus idle tiles; other dtypes use FMAs."""
    text = CUBLAS.replace("f16", dtype)
    instructions = step_times.parse_hlo(text)
    (line,) = (line for line in text.splitlines() if "%y = " in line)
    seconds = step_times._cublas_seconds(instructions["y"], line, instructions)
    assert seconds == pytest.approx(2 * 4096 * 4096 * 14336 / rate, rel=0.02)
    with pytest.raises(ValueError, match="cannot read the product"):
        unread = line.replace("lhs_contracting", "contracting")
        step_times._cublas_seconds(instructions["y"], unread, instructions)


@pytest.mark.slow("compiles a model for a GPU")
def test_a_long_prompt_is_predicted_with_its_decoded_products():
    """A matrix is decoded for each product; the decoding and the product each have a time."""
    found = program_kernels(Asked("llama-3.1-8b", prompt=4096))
    of_xla = [(each, n) for each, n in found.sequence if isinstance(each, Thunk)]
    seconds = step_times.xla_launches(found)
    products = [
        (times, each)
        for (launch, times), each in zip(of_xla, seconds, strict=True)
        if launch.kind == "kCublasLtMatmul"
    ]
    count = sum(times for times, _ in products)
    assert count == 7 * 32 and sum(t * s for t, s in products) > 57e12 / 700e12
    decoded: Counter[int] = Counter()
    for kernel, times in found.kernels.items():
        decoded[kernel.grid[0]] += times * kernel.name.startswith("decode")
    assert +decoded == {4096: 3 * 32, 1024: 2 * 32, 14336: 2 * 32}


@pytest.mark.slow("compiles or simulates whole models")
def test_xla_launches_take_a_launch_and_a_wait_each():
    found = program_kernels(Asked("llama-3.1-8b"))
    seconds = step_times.xla_launches(found)
    least = (LAUNCH + MEMORY_LATENCY) * len(found.xla)
    assert len(seconds) == len(found.xla) and least < sum(seconds) < 1.05 * least
    assert step_times.xla_launches(ProgramKernels(found.asked, (), found.hlo)) == []


@pytest.fixture(scope="module")
def decode() -> step_times.StepTime:
    return step_time(Asked("llama-3.1-8b"))


@pytest.mark.slow("simulates many events")
def test_both_models_agree(decode):
    """A token of the 8B model, whose weights alone take 1.1 ms."""
    assert abs(decode.apart) <= AGREE and differences(decode) == ""
    for seconds in (decode.seconds, decode.event_seconds):
        assert 4.6e9 / 4.3e12 < seconds < 3e-3
    assert decode.tokens_per_second == pytest.approx(1 / decode.seconds)
    assert min(decode.tokens_per_second, decode.event_tokens_per_second) >= 650
    assert decode.launches == program_kernels(Asked("llama-3.1-8b")).launches


@pytest.mark.slow("compiles two whole programs for a GPU", quick=["*"])
def test_a_difference_is_explained(decode):
    """Kernels that cause the difference are listed, the largest first."""
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
