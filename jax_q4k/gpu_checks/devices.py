"""Checks of a CUDA device by the driver alone: versions, memory, graphs, clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..environment import ptx_problem

if TYPE_CHECKING:
    from ptx_kernels.devices import Target
    from ptx_kernels.driver import Device, DeviceFacts

#: Smallest CUDA version whose driver runs loops inside a graph.
LOOPS_IN_GRAPHS = 12, 3
LEAST_FREE = 1 << 30  # bytes, for a context, compiled code and the demo model

_CLUSTERS = 2, 4, 8  # blocks
_BLOCKS, _TURNS = 16, 3
_WHOLE = 120 << 10  # bytes of shared memory that leave no room for a second thread block


def open_device(*, simulated: bool) -> Device:
    """Opens the first CUDA device, or a simulated H200; raises DriverError.

    The process of a check ends with it, so nobody closes it.
    """
    from ptx_kernels.driver import Device
    from ptx_kernels.simulated_cuda import SimulatedDevice

    return SimulatedDevice() if simulated else Device()


def target_of(device: Device) -> Target:
    """Returns the device as kernels are chosen for it."""
    from ptx_kernels import tuning

    return tuning.target(device.facts.name, device.facts.multiprocessors, _capability(device.facts))


def _capability(facts: DeviceFacts) -> int:
    return int(facts.arch.removeprefix("sm_"))


def _cuda(facts: DeviceFacts) -> tuple[int, int]:
    major, minor = facts.driver_cuda_version.split(".")
    return int(major), int(minor)


def describe(device: Device) -> str:
    """Returns the device's name, architecture and size, and its driver's version."""
    facts = device.facts
    return (
        f"{facts.name}, {facts.arch}, {facts.multiprocessors} multiprocessors, "
        f"{facts.memory_bytes / 2**30:.0f} GiB; driver for CUDA {facts.driver_cuda_version}"
    )


def driver_problem(device: Device) -> str | None:
    """Returns why the driver or the device cannot run the kernels; None if it can."""
    from ptx_kernels.driver import Installed

    from ..ops import gpu

    facts = device.facts
    return gpu.problem(target_of(device)) or ptx_problem(
        Installed(_cuda(facts), (_capability(facts),))
    )


def keeps_loops(device: Device) -> bool:
    """Returns whether the driver runs loops inside a CUDA graph; otherwise the host drives them."""
    return _cuda(device.facts) >= LOOPS_IN_GRAPHS


def memory(device: Device) -> tuple[str, str | None]:
    """Returns the free memory as a line, and why it is too little, if so."""
    free, total = device.free_memory(), device.facts.memory_bytes
    line = (
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free; JAX takes 75 % of the memory when"
        " it starts, unless XLA_PYTHON_CLIENT_PREALLOCATE=false or XLA_PYTHON_CLIENT_MEM_FRACTION"
        " says otherwise"
    )
    if free >= LEAST_FREE:
        return line, None
    return line, "less than 1 GiB is free: other processes hold the device's memory"


def has_clusters(device: Device) -> bool:
    return _capability(device.facts) >= 90


def wrong_in_graphs(device: Device) -> bool:
    """Returns whether a kernel gives other results as a node of a CUDA graph.

    Raises DriverError if it does not load, launch or end.
    """
    from ptx_kernels import tuning
    from ptx_kernels.kernels import KERNELS
    from ptx_kernels.kernels.operands import random_operands

    with tuning.on_device(target_of(device)):
        kernel = KERNELS["quantize_q8_1"](rows=2, columns=64)
    operands = random_operands(kernel)
    results = device.run(kernel, *operands), device.run(kernel, *operands, graph=True)
    return not all(map(np.array_equal, *results))


def wrong_clusters(device: Device, *, graph: bool) -> Sequence[int]:
    """Returns the sizes of clusters whose blocks read wrong numbers from one another.

    graph: whether to launch them as nodes of a CUDA graph. Raises DriverError if a kernel does not
    load, launch or end.
    """
    from ptx_kernels.probes import cluster_ring, ring_result

    wrong = []
    for cluster in _CLUSTERS:
        shape = dict(blocks=_BLOCKS, cluster=cluster, turns=_TURNS)
        (got,) = device.run(cluster_ring(**shape), graph=graph)
        if not np.array_equal(got, ring_result(**shape)):
            wrong.append(cluster)
    return wrong


def cluster_places(device: Device) -> str:
    """Returns how many clusters the driver runs at once, one thread block per multiprocessor.

    Where kernels are chosen for another number, the line has it, too.
    """
    from ptx_kernels.probes import cluster_ring

    facts, found = target_of(device).facts, []
    for cluster in _CLUSTERS:
        kernel = cluster_ring(blocks=_BLOCKS, cluster=cluster, turns=_TURNS)
        places = device.clusters_at_once(kernel, _WHOLE)
        expected = facts.places(cluster) // cluster if facts else places
        assumed = "" if places == expected else f" (kernels are chosen for {expected})"
        found.append(f"{places} of {cluster} blocks{assumed}")
    return "clusters at once: " + ", ".join(found)
