"""The checks by name. Each runs in a process of its own, which a fault of the driver may end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax_q4k as jq
from jax_q4k.gpu_checks import devices, plugin

from .. import output
from .results import Result, failed, not_run, ok

if TYPE_CHECKING:
    from .generation import Part

NO_CLUSTERS = "write jq.implementation(clusters=False), or --no-clusters on the command line"
#: Says what a check does now, so that the report has it if the process ends or hangs.
Progress = Callable[[str], object]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      run: runs it on the first device, or without one (`simulated`).
      needs: checks after whose failure this one does not run.
      on_gpu: whether JAX uses the GPU; otherwise it uses the CPU, and the driver alone the GPU.
      without: part that this check of generation switches off. It runs only if generation fails.
      advice: what to write if generation works without that part.
    """

    run: Callable[[bool, Progress], Result]
    needs: tuple[str, ...] = ("driver",)
    on_gpu: bool = False
    without: Part | None = None
    advice: str = ""


def _jax(simulated: bool, progress: Progress) -> Result:
    if not simulated and (problem := plugin.problem(jq.environment.installed())):
        return failed(problem)
    found = output.devices()
    if not simulated and found[0].platform != "gpu":
        return failed(f"JAX uses no GPU, but {found[0].platform}")
    return ok("JAX uses " + ", ".join(f"{d.platform}: {d.device_kind} ({d.id})" for d in found))


def _driver(simulated: bool, progress: Progress) -> Result:
    device = devices.open_device(simulated=simulated)
    line, details = devices.describe(device), []
    if problem := devices.driver_problem(device):
        return failed(line, problem)
    if not devices.keeps_loops(device):
        details.append(
            "the driver is older than CUDA 12.3: the host drives loops, which cannot be in a graph"
        )
    return ok(line, *details)


def _memory(simulated: bool, progress: Progress) -> Result:
    line, problem = devices.memory(devices.open_device(simulated=simulated))
    return failed(line, problem) if problem else ok(line)


def _graphs(simulated: bool, progress: Progress) -> Result:
    if devices.wrong_in_graphs(devices.open_device(simulated=simulated)):
        return failed("a kernel has other results as a node of a CUDA graph")
    return ok("a kernel has the same results in a CUDA graph")


def _clusters(simulated: bool, progress: Progress) -> Result:
    device = devices.open_device(simulated=simulated)
    if not devices.has_clusters(device):
        return not_run(f"{device.facts.arch} has no clusters, and kernels use none")
    for graph, where in ((False, "in a stream"), (True, "in a CUDA graph")):
        progress(f"clusters {where}")
        if wrong := devices.wrong_clusters(device, graph=graph):
            sizes = ", ".join(map(str, wrong))
            return failed(f"clusters of {sizes} blocks have wrong results {where}", NO_CLUSTERS)
    progress("clusters at once")
    return ok(
        "clusters have the right results, also in a CUDA graph", devices.cluster_places(device)
    )


def _kernels(simulated: bool, progress: Progress) -> Result:
    from jax_q4k.gpu_checks import kernels

    from . import demo  # imports the decoder

    device = devices.open_device(simulated=simulated)
    found: list[Any] = []
    for steps in demo.steps(simulated):
        found += kernels.compare_kernels(steps, device, devices.target_of(device), progress)
    return summary(found)


def summary(found: list[Any]) -> Result:
    """Summarizes Comparisons; without any the check has failed."""
    texts = len({text for one in found for text in one.texts})
    wrong = [one for one in found if not one.right]
    line = (
        f"{len(found) - len(wrong)} of {len(found)} operations, with {texts} kernels of the demo "
        "model, have the results of plain JAX"
    )
    if found and not wrong:
        worst = max(found, key=lambda one: one.nmse)
        return ok(f"{line}: NMSE up to {worst.nmse:.1e} ({worst.operation})")
    details = [
        f"{one.operation} ({', '.join(one.kernels)}): "
        + (f"NMSE {one.nmse:.1e}" if one.error is None else str(one.error))
        for one in wrong
    ]
    if wrong and wrong[-1].fatal:
        details.append("later kernels did not run, because the device failed")
    return failed(line, *details)


def _generation(simulated: bool, progress: Progress, without: Part | None = None) -> Result:
    from .generation import generates

    return generates(simulated, progress, without)


def _devices(simulated: bool, progress: Progress) -> Result:
    from .several_devices import copies

    return copies(simulated, progress)


#: Parts of generation that can be switched off, and what to write if that helps.
_PARTS: dict[Part, str] = {
    "clusters": NO_CLUSTERS,
    "prefetch": "write jq.implementation(prefetch=False), or --no-prefetch on the command line",
    "decoded products": "write jq.implementation(decoded_products=False), or "
    "--no-decoded-products on the command line",
    "graph": "the loop fails only in a CUDA graph: write jq.implementation(graphs=False), or "
    "--no-graphs on the command line, and please report it",
    "kernels": "write jq.implementation('xla'), or --implementation xla on the command line",
}

CHECKS: dict[str, Check] = {
    "jax": Check(_jax, needs=(), on_gpu=True),
    "driver": Check(_driver, needs=()),
    "memory": Check(_memory),
    "graphs": Check(_graphs),
    "clusters": Check(_clusters),
    "kernels": Check(_kernels),
    "generation": Check(_generation, ("jax", "driver"), on_gpu=True),
    "devices": Check(_devices, ("jax", "driver"), on_gpu=True),
    **{
        f"no {part}": Check(
            functools.partial(_generation, without=part), on_gpu=True, without=part, advice=advice
        )
        for part, advice in _PARTS.items()
    },
}
