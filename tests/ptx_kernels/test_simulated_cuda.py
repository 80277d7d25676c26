"""The simulated CUDA driver: `Device` returns the simulator's results and invented times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.driver import DriverError, rotated
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.simulated_cuda import COPY_RATE, KERNEL_SECONDS, SimulatedDevice

ADD = KERNELS["append_kv"](
    tokens=3, num_pages=4, num_kv_heads=2, page_size=4, head_dim=32, dtype="f32"
)
QUANTIZE = KERNELS["quantize_q8_1"](rows=2, columns=64)


@pytest.fixture
def gpu():
    with SimulatedDevice() as device:
        yield device


MATVEC = KERNELS["matvec"](
    format="Q4_K", n=8, columns=256, m=1, config=PRESETS["quarter_warp_dp4a"]
)


@pytest.mark.parametrize("kernel", [ADD, QUANTIZE, MATVEC], ids=lambda kernel: kernel.family)
def test_results_are_the_simulators(gpu, kernel):
    operands = random_operands(kernel)
    for got, want in zip(gpu.run(kernel, *operands), simulator.run(kernel, *operands), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_graph_runs_its_kernels_and_takes_an_invented_time(gpu):
    operands = random_operands(QUANTIZE)
    launches = rotated(gpu, QUANTIZE, operands, gpu.facts.l2_bytes)
    assert gpu.time(launches).median == pytest.approx(KERNEL_SECONDS)
    first = launches[0][1][len(operands) :]
    for address, buffer, want in zip(
        first, QUANTIZE.results, simulator.run(QUANTIZE, *operands), strict=True
    ):
        np.testing.assert_array_equal(gpu.download(address, buffer.shape, buffer.type.dtype), want)
    assert gpu.copy_bandwidth(1 << 16) == pytest.approx(COPY_RATE)


def test_a_wrong_kernel_is_an_error_when_it_is_timed(gpu):
    text = QUANTIZE.text.replace("st.global", "st.global.nothing", 1)
    broken = dataclasses.replace(QUANTIZE, text=text)
    with pytest.raises(simulator.SimulationError, match="st.global.nothing"):
        gpu.time([(broken, gpu.place(broken, random_operands(broken)))])


def test_without_execution_results_stay_poison():
    with SimulatedDevice(executes=False) as gpu:
        values, _ = gpu.run(QUANTIZE, *random_operands(QUANTIZE))
    assert (values == -1).all()


def test_bad_modules_do_not_load(gpu):
    with pytest.raises(DriverError, match="cuModuleLoadDataEx failed: CUDA_ERROR_INVALID_PTX"):
        gpu.time_load(".version 8.0")
