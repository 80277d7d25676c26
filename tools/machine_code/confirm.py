"""Compares executed machine code with the simulator, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.ptx import Kernel

from .launch import FILL, Program, run
from .machine import Shape


def simulated(
    kernel: Kernel, operands: Sequence[np.ndarray], clusters: Sequence[int] | None = None
) -> tuple[np.ndarray, ...]:
    """Runs clusters of a kernel, by default all, in the simulator; returns its results.

    Bytes that nobody writes are as `launch.run` leaves them.

    Raises:
      SimulationError: like the simulator.
    """
    given = {id(b): array for b, array in zip(kernel.operands, operands, strict=True)}
    devices: dict[int, simulator.DeviceBuffer] = {}
    for buffer in (*kernel.operands, *kernel.results):
        if id(buffer) not in given:
            array = np.full(buffer.nbytes, FILL, np.uint8).view(buffer.type.dtype)
        elif buffer.role == "in":
            array = np.ascontiguousarray(given[id(buffer)])
        else:
            array = np.array(given[id(buffer)])
        role, known = buffer.role, id(buffer) in given
        devices.setdefault(
            id(buffer), simulator.DeviceBuffer(buffer.name, array, role, initialized=known)
        )
    blocks = None if clusters is None else Shape.of(kernel).clusters()[list(clusters)].ravel()
    simulator.launch(
        kernel.text,
        [devices[id(buffer)] for buffer in (*kernel.operands, *kernel.results)],
        kernel.grid,
        kernel.block,
        kernel.dynamic_shared_bytes,
        only=None if blocks is None else blocks.tolist(),
    )
    return tuple(devices[id(buffer)].array.reshape(buffer.shape) for buffer in kernel.results)


def disagreement(
    program: Program,
    operands: Sequence[np.ndarray],
    wants: Sequence[np.ndarray] | None = None,
    **options: Any,
) -> str:
    """Returns how machine code and simulator differ, empty if all results have the same bits.

    Args:
      program: the kernel's, from `launch.load`.
      wants: results of the simulator, if they are known.
      options: those of `launch.run`.

    Raises:
      Fault, SimulationError: from either.
    """
    found = run(program, operands, **options).arrays
    if wants is None:
        wants = simulated(program.kernel, operands, options.get("clusters"))
    for buffer, got, want in zip(program.kernel.results, found, wants, strict=True):
        a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (got, want))
        if wrong := int(np.count_nonzero(a != b)):
            first = int(np.argmax(a != b))
            return f"{buffer.name}: {wrong} of {len(a)} bytes differ, the first at {first}"
    return ""
