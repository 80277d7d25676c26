"""The GPU benchmark without a GPU: its error message, a dry run, and parts that fail or hang."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from support.paths import ROOT

from benchmarks import gpu, gpu_kernels, gpu_questions
from benchmarks.common import RESULTS
from benchmarks.gpu_predictions import Predictions
from benchmarks.gpu_questions import QUESTIONS, Answer, Question
from benchmarks.gpu_sizes import FULL, SMALL
from ptx_kernels.driver import DriverError, rotated
from ptx_kernels.kernels import CASES, KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.report import figures
from ptx_kernels.simulated_cuda import COPY_RATE, SimulatedCuda, SimulatedDevice

DRY = ["--dry-run", "--skip", "tests", "questions", "models"]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Returns a function that does a dry run with options.

    It returns (exit status, results, printed text).
    """
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS"):  # a run sets both
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else "false")

    def run(*options: str):
        code = gpu.main([*options, "--out", str(tmp_path), "--name", "here"])
        return code, json.loads((tmp_path / "here.json").read_text()), capsys.readouterr().out

    return run


def test_without_a_gpu_it_says_so_and_exits_with_3():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 3
    assert done.stderr.startswith("benchmarks.gpu needs a CUDA GPU: ")
    assert done.stdout == ""


@pytest.mark.slow("runs every part of a benchmark")
def test_a_dry_run_goes_to_the_end(tmp_path):
    """A dry run has every part.

    The parts are collected tests, questions, kernels, a model, tables, chart and file.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--concurrent"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("DRY RUN: nothing is measured") and lines[-1] == lines[0]

    (file,) = tmp_path.glob("jax-q4k-dry-run-*/dry-run.json")  # and not in benchmarks/results
    assert f"written: {file}" in lines
    found = json.loads(file.read_text())
    assert found["dry_run"] is True and found["note"] == lines[0] and found["errors"] == {}
    assert found["device"]["name"] == SimulatedCuda.name
    assert found["tests"]["status"] == 0
    assert re.match(r"\d{3,} tests collected", found["tests"]["summary"])
    assert [q["name"] for q in found["questions"]] == [q.name for q in QUESTIONS]
    for question in found["questions"]:
        assert question["answer"] not in ("failed", "out of time"), question
        assert question["measured"] or question["kernels"]
        assert f"  {question['asks']} {question['answer']}" in lines
    kernels = [name for name, *_ in gpu_kernels.all_timed(SMALL)]
    assert [kernel["name"] for kernel in found["kernels"]] == kernels
    assert found["models"][0]["tokens"] == 8 and found["models_skipped"]
    switches = [one["name"].removeprefix("small, on the CPU, ") for one in found["switches"]]
    assert switches == [
        *("graphs=False", "clusters=False", "prefetch=False"),
        *("decoded_products=True", "decoded_products=False"),
    ]
    assert "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT" in found["xla_flags"]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_writes_no_results_of_the_repository(capsys):
    for folder in (RESULTS, RESULTS / "deeper"):
        with pytest.raises(SystemExit) as ended:
            gpu.main([*DRY, "--out", str(folder)])
        assert ended.value.code == 2
        assert "--dry-run measures nothing" in capsys.readouterr().err


@pytest.mark.slow("measures")
def test_results_of_kernels(run):
    code, found, printed = run(*DRY, "--commit", "abc")
    assert code == 0
    assert found["commit"] == "abc" and found["versions"]["python"]
    assert found["copy_bandwidth"] == pytest.approx(COPY_RATE)
    by_name = {kernel["name"]: kernel for kernel in found["kernels"]}
    one = by_name["matvec Q4_K 64x512 m=1"]
    assert one["bytes"] == 64 * 2 * 144
    assert one["gigabytes_per_second"] == pytest.approx(64 * 2 * 144 / 2e-6 / 1e9)
    assert one["copy_fraction"] == pytest.approx(64 * 2 * 144 / 2e-6 / COPY_RATE)
    assert by_name["matvec Q6_K 64x512 m=4"]["bytes"] == 64 * 2 * 210
    assert by_name["paged_attention bf16 32:8x128, 64 tokens"]["bytes"] == 2 * 64 * 8 * 128 * 2
    assert "matvec Q4_K 64x512 m=4" in printed and "GB/s  64x512" in re.sub("  +", "  ", printed)
    strategies = [name for name in by_name if name.startswith("preset ")]
    assert strategies == [f"preset {preset} 64x512" for preset in PRESETS]
    assert by_name["preset wide 64x512"]["bytes"] == 64 * 2 * 144


def test_predictions_stand_beside_what_was_measured():
    timed = ("q", KERNELS["quantize_q8_1"](rows=1, columns=4096), 1, "")
    predictions = Predictions("NVIDIA H200")
    assert predictions.of(timed[1]) is None
    assert predictions.prepare([timed[1]], lambda: False).startswith("out of time: 1 kernels")
    assert predictions.prepare([timed[1], timed[1]], lambda: True) == ""
    with SimulatedDevice() as device:
        row = gpu_kernels.measure(device, timed, COPY_RATE, predictions.of(timed[1]))
    expected = figures(timed[1], "sm_90")
    assert (row.predicted, row.bound) == (expected.seconds, expected.bound)
    unknown = Predictions("Some GPU")
    assert "does not know" in unknown.prepare([timed[1]], lambda: True)
    assert unknown.of(timed[1]) is None


def test_the_whole_run_fits_its_time():
    """The products of most files are timed, however long tests and questions take.

    The largest matrices take four seconds each, the others one second.
    """
    left = 500 * (1 - gpu._TESTS_SHARE) - gpu._QUESTIONS_SECONDS - gpu._MODELS_SECONDS
    rare = {"formats": ("Q4_K", "Q6_K")}
    timed = [
        *gpu_kernels.others(FULL),
        *gpu_kernels.products(FULL),
        *gpu_kernels.matvecs(dataclasses.replace(FULL, **rare)),
    ]
    large = sum("128256" in name for name, *_ in timed)
    assert 4 * large + (len(timed) - large) < left
    assert 500 + gpu._OVERTIME < 9 * 60


def test_running_out_of_time_leaves_the_rest_out(run):
    code, found, printed = run("--dry-run", "--skip", "tests", "models", "--seconds", "0")
    assert code == 0 and found["kernels"] == []
    assert {question["answer"] for question in found["questions"]} == {"out of time"}
    assert "out of time before quantize_q8_1 1x512" in printed
    assert found["kernels_left_out_from"] == "quantize_q8_1 1x512"


def test_failed_tests_fail_the_run(monkeypatch, run):
    for status, code in ((0, 0), (1, 1), (None, 1)):
        monkeypatch.setattr(
            gpu, "run_tests", lambda *_, s=status, **__: {"status": s, "summary": "told"}
        )
        got, found, _ = run("--dry-run", "--skip", "questions", "kernels", "models")
        assert got == code and found["tests"]["status"] == status


def test_a_question_that_fails_takes_nothing_with_it(monkeypatch, run):
    def fails(bench):
        raise DriverError("cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    asked = (
        Question("one", "what?", fails),
        Question("two", "and?", lambda bench: Answer("yes", {"seconds": 1.0})),
    )
    monkeypatch.setattr(gpu_questions, "QUESTIONS", asked)
    code, found, printed = run("--dry-run", "--skip", "tests", "kernels", "models")
    assert code == 1
    assert [q["answer"] for q in found["questions"]] == ["failed", "yes"]
    assert found["questions"][1]["measured"] == {"seconds": 1.0}
    assert list(found["errors"]) == ["question 'one'"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["errors"]["question 'one'"]
    assert "question 'one' FAILED: DriverError: cuGraphLaunch" in printed


def test_a_kernel_that_fails_takes_no_other_with_it(monkeypatch, run):
    timed = list(gpu_kernels.matvecs(SMALL))[:3]
    broken = dataclasses.replace(timed[1][1], text=timed[1][1].text.replace("dp4a", "dp5a"))
    timed[1] = ("broken", broken, *timed[1][2:])
    monkeypatch.setattr(gpu_kernels, "all_timed", lambda sizes: iter(timed))
    code, found, _ = run(*DRY)
    assert code == 1 and [k["name"] for k in found["kernels"]] == [timed[0][0], timed[2][0]]
    assert {*found["errors"]} == {"predictions", "broken"}  # ptxas and the simulator refuse it


@pytest.mark.slow("measures")
def test_measurements_stay_if_a_later_part_fails(monkeypatch, run):
    def fails(run):
        assert json.loads(run.path.read_text())["kernels"]  # was written before
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu, "time_models", fails)
    code, found, _ = run("--dry-run", "--skip", "tests", "questions")
    assert (
        code == 1 and found["kernels"] and found["errors"] == {"models": "RuntimeError: no memory"}
    )


def test_a_run_that_hangs_is_ended():
    hangs = "import time; from benchmarks import gpu\nwith gpu.ended_after(0.1): time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", hangs], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1 and "Timeout" in done.stderr


def test_an_error_of_the_driver_is_the_reason(monkeypatch, capsys):
    def fails():
        raise DriverError("cuInit failed: CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(gpu, "Device", fails)
    assert gpu.main([]) == 3
    assert (
        capsys.readouterr().err
        == "benchmarks.gpu needs a CUDA GPU: cuInit failed: CUDA_ERROR_NO_DEVICE\n"
    )


def test_inputs_rotate_past_the_cache():
    name, kernel, nbytes, _ = next(iter(gpu_kernels.matvecs(SMALL)))
    assert name == "matvec Q4_K 64x512 m=1"  # the shape that most files contain comes first
    with SimulatedDevice() as device:
        launches = rotated(device, kernel, random_operands(kernel), l2_bytes=16 * nbytes)
        assert len({tuple(addresses) for _, addresses in launches}) > 16
        few = rotated(device, kernel, random_operands(kernel), l2_bytes=1)
    assert len(few) == 16 and len({tuple(addresses) for _, addresses in few}) == 1
    assert len(random_operands(kernel)) == len(kernel.operands)


def test_an_updated_buffer_keeps_its_one_address():
    case = next(case for case in CASES if case.family == "append_kv")
    kernel = KERNELS["append_kv"](**(case.arguments | {"num_pages": 4}))
    with SimulatedDevice() as device:
        launches = rotated(device, kernel, random_operands(kernel), l2_bytes=1 << 20)
    for _, addresses in launches:
        for operand, result in kernel.aliases.items():
            assert addresses[operand] == addresses[len(kernel.operands) + result]
