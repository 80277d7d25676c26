"""Tells which GPU a program is lowered for, and whether the PTX kernels run on it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from ptx_kernels.devices import LEAST, REFERENCE, Target, target

from ..errors import GpuUnavailableWarning
from ..selection import Asked


def device(devices: Sequence[Any] | None = None, asked: Asked | None = None) -> Target:
    """Returns the GPU that kernels are chosen for, with what it reports of itself.

    Inside `tuning.on_device`, returns that device. Without a GPU, returns the device that kernels
    are tuned for.

    Args:
      devices: those that a program is lowered for; None means the process's. Among several, the
        first of the oldest architecture counts: all run its kernels.
      asked: its switches become those of the device.
    """
    found = _device(devices)
    if asked is None:
        return found
    return found.switched(clusters=asked.clusters, decoded_products=asked.decoded_products)


def _device(devices: Sequence[Any] | None) -> Target:
    from ptx_kernels import tuning  # it imports all kernels

    if (asked := tuning.device_of_context()) is not None:
        return asked
    if devices is None and jax.default_backend() == "gpu":
        devices = jax.devices()[:1]
    gpus = [_target(gpu) for gpu in devices or () if gpu.platform == "gpu"]
    return min(gpus, key=lambda gpu: gpu.sm or LEAST, default=target(REFERENCE.name))


def _target(gpu: jax.Device) -> Target:
    capability = str(getattr(gpu, "compute_capability", "")).replace(".", "")
    return target(
        gpu.device_kind,
        getattr(gpu, "core_count", None),
        int(capability) if capability.isdecimal() else None,
    )


def problem(gpu: Target) -> str | None:
    """Returns why the PTX kernels cannot run on a GPU; None if they can."""
    if gpu.sm is None or gpu.sm >= LEAST:
        return None
    least, found = (f"{sm // 10}.{sm % 10}" for sm in (LEAST, gpu.sm))
    return (
        f"the PTX kernels need a GPU of compute capability {least} or newer, and {gpu.name} has "
        f"{found}"
    )


@functools.cache
def warn_of(reason: str) -> None:
    """Warns once per process that plain JAX replaces the PTX kernels, for `reason`."""
    message = f"plain JAX, which is slow, replaces the GPU kernels: {reason}"
    warnings.warn(message, GpuUnavailableWarning, stacklevel=2)
