"""Checks of a device by the driver alone."""

from __future__ import annotations

import pytest

from jax_q4k.gpu_checks import devices
from ptx_kernels.simulated_cuda import SimulatedDevice


def capability(major: int, minor: int) -> dict[str, int]:
    return {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}


def test_a_device_that_has_everything():
    device = devices.open_device(simulated=True)
    assert devices.describe(device) == (
        "H200 (simulated), sm_90, 132 multiprocessors, 141 GiB; driver for CUDA 13.0"
    )
    assert devices.driver_problem(device) is None
    assert devices.keeps_loops(device) and devices.has_clusters(device)
    assert not devices.wrong_in_graphs(device)
    line, problem = devices.memory(device)
    assert line.startswith("100.0 of 141.0 GiB are free") and problem is None


@pytest.mark.parametrize(
    "version, major, minor, problem",
    [
        (12000, 9, 0, None),
        (11080, 8, 6, None),
        (11080, 9, 0, "takes PTX up to 7.8: install a newer driver"),
        (13000, 7, 0, "need a GPU of compute capability 7.5 or newer"),
    ],
)
def test_old_drivers_and_devices(version, major, minor, problem):
    device = SimulatedDevice(version=version, attributes=capability(major, minor))
    got = devices.driver_problem(device)
    assert got is None if problem is None else problem in str(got)


@pytest.mark.parametrize("version, keeps", [(12020, False), (12030, True), (13000, True)])
def test_loops_in_graphs_need_a_driver(version, keeps):
    assert devices.keeps_loops(SimulatedDevice(version=version)) == keeps


def test_too_little_memory():
    line, problem = devices.memory(SimulatedDevice(free=300 << 20))
    assert line.startswith("0.3 of 141.0 GiB") and "less than 1 GiB is free" in str(problem)


class Wrong(SimulatedDevice):
    """A device whose results are wrong in graphs only."""

    def run(self, kernel, *operands, graph=False):
        results = super().run(kernel, *operands, graph=graph)
        return tuple(result + 1 for result in results) if graph else results


def test_wrong_results_in_graphs():
    assert devices.wrong_in_graphs(Wrong())
    assert not devices.wrong_clusters(Wrong(), graph=False)
    assert devices.wrong_clusters(Wrong(), graph=True) == [2, 4, 8]


def test_graphs_run_clusters():
    assert devices.wrong_clusters(SimulatedDevice(), graph=True) == []
    with_nothing = SimulatedDevice(executes=False)
    assert devices.wrong_clusters(with_nothing, graph=True) == [2, 4, 8]


def test_the_driver_says_how_many_clusters_run_at_once():
    line = "clusters at once: 66 of 2 blocks, 31 of 4 blocks, 15 of 8 blocks"
    assert devices.cluster_places(SimulatedDevice()) == line

    class Fewer(SimulatedDevice):
        def clusters_at_once(self, kernel, dynamic_shared_bytes):
            return super().clusters_at_once(kernel, dynamic_shared_bytes) - (kernel.cluster[0] == 8)

    assert devices.cluster_places(Fewer()) == line.replace(
        "15 of 8 blocks", "14 of 8 blocks (kernels are chosen for 15)"
    )


def test_only_newer_devices_have_clusters():
    assert not devices.has_clusters(SimulatedDevice(attributes=capability(8, 9)))
