"""Simulated devices that report what other GPUs do."""

from __future__ import annotations

from typing import Any

from ptx_kernels.simulated_cuda import SimulatedDevice

#: Name as the driver reports it -> compute capability, number of multiprocessors. Kernels are
#: tuned for the first two; the others are unknown models.
CARDS = {
    "Tesla T4": (75, 40),
    "NVIDIA L4": (89, 58),
    "Quadro RTX 5000": (75, 48),
    "NVIDIA of tomorrow": (121, 48),
}
TOO_OLD = "Tesla V100-SXM2-16GB", 70, 80


def card(name: str, capability: int, multiprocessors: int, **options: Any) -> SimulatedDevice:
    """Returns a simulated device; `options` are those of SimulatedCuda."""
    attributes = {
        "COMPUTE_CAPABILITY_MAJOR": capability // 10,
        "COMPUTE_CAPABILITY_MINOR": capability % 10,
        "MULTIPROCESSOR_COUNT": multiprocessors,
    }
    device = SimulatedDevice(attributes=attributes, **options)
    device.cuda.name = name
    return device
