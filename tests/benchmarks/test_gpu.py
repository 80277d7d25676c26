"""GPU benchmark without a GPU: it says so; arithmetic and result file on a stand-in device."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_device import StandIn

from benchmarks import gpu, gpu_kernels
from ptx_kernels.driver import DriverError, rotated
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.report import figures

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "SHAPES", ((64, 512),))
    monkeypatch.setattr(gpu_kernels, "ROWS", (1, 4))
    monkeypatch.setattr(gpu_kernels, "CONTEXTS", (64,))


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


def test_results_are_written(monkeypatch, tmp_path, capsys, small):
    monkeypatch.setattr(gpu, "Device", StandIn)
    assert (
        gpu.main(
            [
                "--skip",
                "tests",
                "models",
                "--out",
                str(tmp_path),
                "--name",
                "here",
                "--commit",
                "abc",
            ]
        )
        == 0
    )
    found = json.loads((tmp_path / "here.json").read_text())
    assert (
        found["device"]["name"] == "Stand-in"
        and found["commit"] == "abc"
        and found["versions"]["python"]
    )
    assert found["copy_bandwidth"] == 4e12
    by_name = {kernel["name"]: kernel for kernel in found["kernels"]}
    one = by_name["matvec Q4_K 64x512 m=1"]
    assert one["bytes"] == 64 * 2 * 144
    assert one["gigabytes_per_second"] == pytest.approx(64 * 2 * 144 / 2e-6 / 1e9)
    assert one["copy_fraction"] == pytest.approx(64 * 2 * 144 / 2e-6 / 4e12)
    assert by_name["matvec Q6_K 64x512 m=4"]["bytes"] == 64 * 2 * 210
    assert by_name["paged_attention bf16 32:8x128, 64 tokens"]["bytes"] == 2 * 64 * 8 * 128 * 2
    printed = capsys.readouterr().out
    assert "matvec Q4_K 64x512 m=4" in printed and "GB/s  64x512" in re.sub("  +", "  ", printed)
    strategies = [name for name in by_name if name.startswith("preset ")]
    assert strategies == [f"preset {preset} 64x512" for preset in PRESETS]
    assert by_name["preset wide 64x512"]["bytes"] == 64 * 2 * 144
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


def test_predictions_stand_beside_what_was_measured():
    kernel = KERNELS["quantize_q8_1"](rows=1, columns=4096)
    device = StandIn()
    # no model knows the device
    assert gpu_kernels.measure(device, "q", kernel, 1, 4e12).predicted is None
    device.facts = dataclasses.replace(device.facts, name="NVIDIA H200")
    assert (
        gpu_kernels.measure(device, "q", kernel, 1, 4e12).predicted
        == figures(kernel, "sm_90").seconds
    )


def test_the_whole_run_fits_its_time():
    """Kernels leave the tests their half of the time.

    The largest matrices take four seconds each, the others one.
    """
    timed = [
        *gpu_kernels.others(),
        *gpu_kernels.products(),
        *gpu_kernels.matvecs(),
        *gpu_kernels.presets(),
    ]
    large = sum("128256" in name for name, *_ in timed)
    assert 4 * large + (len(timed) - large) < 450 * 0.5


def test_running_out_of_time_leaves_the_rest_out(monkeypatch, tmp_path, capsys, small):
    monkeypatch.setattr(gpu, "Device", StandIn)
    arguments = [
        "--skip",
        "tests",
        "models",
        "--out",
        str(tmp_path),
        "--name",
        "late",
        "--seconds",
        "0",
    ]
    assert gpu.main(arguments) == 0
    assert json.loads((tmp_path / "late.json").read_text())["kernels"] == []
    assert "out of time before quantize_q8_1 1x4096" in capsys.readouterr().out


def test_failed_tests_fail_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "Device", StandIn)
    arguments = ["--skip", "kernels", "models", "--out", str(tmp_path), "--name", "tests"]
    for status, code in ((0, 0), (1, 1), (None, 1)):
        monkeypatch.setattr(
            gpu, "run_tests", lambda seconds, s=status: {"status": s, "summary": "told"}
        )
        assert gpu.main(arguments) == code
        assert json.loads((tmp_path / "tests.json").read_text())["tests"]["status"] == status


def test_an_error_of_the_driver_is_the_reason(monkeypatch, capsys):
    def fails():
        raise DriverError("cuInit failed: CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(gpu, "Device", fails)
    assert gpu.main([]) == 3
    assert (
        capsys.readouterr().err
        == "benchmarks.gpu needs a CUDA GPU: cuInit failed: CUDA_ERROR_NO_DEVICE\n"
    )


def test_inputs_rotate_past_the_cache(small):
    device = StandIn()
    name, kernel, nbytes, _ = next(iter(gpu_kernels.matvecs()))
    assert name == "matvec Q4_K 64x512 m=1"  # what most files hold comes first
    launches = rotated(device, kernel, random_operands(kernel), l2_bytes=16 * nbytes)
    assert len({tuple(addresses) for _, addresses in launches}) > 16
    few = rotated(device, kernel, random_operands(kernel), l2_bytes=1)
    assert len(few) == 16 and len({tuple(addresses) for _, addresses in few}) == 1
    assert len(random_operands(kernel)) == len(kernel.operands)


def test_an_updated_buffer_keeps_its_one_address():
    from ptx_kernels.kernels import CASES, KERNELS

    case = next(case for case in CASES if case.family == "append_kv")
    kernel = KERNELS["append_kv"](**(case.arguments | {"num_pages": 4}))
    for _, addresses in rotated(StandIn(), kernel, random_operands(kernel), l2_bytes=1 << 20):
        for operand, result in kernel.aliases.items():
            assert addresses[operand] == addresses[len(kernel.operands) + result]
