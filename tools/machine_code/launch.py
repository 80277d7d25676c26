"""Launches a kernel: assembles it, places its buffers and constants, and runs its blocks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.machine_code.sass import listing
from ptx_kernels.ptx import Kernel

from . import cubin as cubins
from .code import Code, parse
from .machine import Machine, Shape
from .memory import FILL, LOCAL_BYTES, GlobalMemory
from .runner import Runner

WARPS = 512  # that run together: fewer take longer per warp, more do not fit into caches


@dataclass(frozen=True)
class Layout:
    """Facts of a target that a launch needs.

    Attributes:
      stack: byte offset in constant bank 0 of the initial stack pointer.
      reserved: bytes at the beginning of shared memory that belong to the system.
    """

    stack: int
    reserved: int


LAYOUTS = {
    "sm_75": Layout(stack=0x28, reserved=0),
    "sm_80": Layout(stack=0x28, reserved=0),
    "sm_89": Layout(stack=0x28, reserved=0),
    "sm_90": Layout(stack=0x28, reserved=1024),
    "sm_100": Layout(stack=0x37C, reserved=1024),
    "sm_120": Layout(stack=0x37C, reserved=1024),
}


class _Constants:
    """Constant banks 0 (stack, parameters) and 4 (addresses of global variables)."""

    def __init__(
        self, parameters: dict[int, int], addresses: dict[int, int], names: dict[str, int]
    ):
        self._banks = {0: bytearray(0x1000), 4: bytearray(0x1000)}
        self._names = names
        for bank, values in ((0, parameters), (4, addresses)):
            for offset, value in values.items():
                struct.pack_into("<Q", self._banks[bank], offset, value)

    def word(self, bank: int, offset: int) -> int:
        return int(struct.unpack_from("<I", self._banks[bank], offset)[0])

    def address(self, variable: str) -> int:
        return self._names[variable]


@dataclass(frozen=True)
class Program:
    """A kernel's machine code for a target."""

    kernel: Kernel
    target: str
    code: Code
    cubin: cubins.Cubin
    shared_bytes: int


def load(kernel: Kernel, target: str = "sm_90") -> Program:
    """Assembles and disassembles a kernel.

    Raises: see `ptx_kernels.machine_code.ptxas.assemble`.
    """
    assembly = assemble(kernel.text, target)
    cubin = assembly.cubin
    shared = assembly.shared_bytes + kernel.dynamic_shared_bytes
    return Program(
        kernel, target, parse(listing(cubin), kernel.name), cubins.read(cubin, kernel.name), shared
    )


@dataclass(frozen=True)
class Run:
    """Results of a launch.

    Attributes:
      arrays: one per result buffer of the kernel.
      executed: opcodes that were executed.
    """

    arrays: tuple[np.ndarray, ...]
    executed: frozenset[str]


def run(
    program: Program,
    operands: Sequence[np.ndarray],
    *,
    late: bool = True,
    seed: int | None = None,
    clusters: Sequence[int] | None = None,
) -> Run:
    """Runs a kernel's machine code on NumPy.

    Args:
      operands: one array per operand of the kernel.
      late: asynchronous copies write when a thread waits for them; otherwise at once.
      seed: makes the order of warps and blocks random; None for the lowest address first.
      clusters: numbers of the clusters that run, by default all; without clusters, of the blocks.

    Raises:
      Fault: the code did what hardware forbids or leaves undefined.
    """
    kernel = program.kernel
    shape = Shape.of(kernel)
    buffers = list({id(b): b for b in (*kernel.operands, *kernel.results)}.values())
    variables = list(program.cubin.variables)
    sections = {v.section: data for v, data in _sections(program.cubin)}
    memory = GlobalMemory([b.nbytes for b in buffers] + [len(data) for data in sections.values()])
    number = {id(buffer): k for k, buffer in enumerate(buffers)}
    for buffer, array in zip(kernel.operands, operands, strict=True):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory.bytes_of(number[id(buffer)], buffer.nbytes)[:] = raw
    starts = {}
    for k, (section, data) in enumerate(sections.items(), len(buffers)):
        memory.bytes_of(k, len(data))[:] = np.frombuffer(data, np.uint8)
        starts[section] = memory.address(k)
    names = {
        name: starts[program.cubin.variables[name].section] + program.cubin.variables[name].offset
        for name in variables
    }
    layout = LAYOUTS[program.target]
    parameters = {
        program.cubin.parameters + 8 * k: memory.address(number[id(buffer)])
        for k, buffer in enumerate((*kernel.operands, *kernel.results))
    }
    constants = _Constants(
        {layout.stack: LOCAL_BYTES} | parameters,
        {at: names[name] + more for at, (name, more) in program.cubin.addresses.items()},
        names,
    )
    chosen = shape.clusters()
    chosen = chosen if clusters is None else chosen[list(clusters)]
    rng = None if seed is None else np.random.default_rng(seed)
    if rng is not None:
        chosen = rng.permutation(chosen)
    executed: set[str] = set()
    size = max(1, WARPS // (-(-shape.threads // 32) * shape.cluster_size))
    runner: Runner | None = None
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        if runner is None or len(part) != size:
            machine = Machine(
                program.code,
                shape,
                constants,
                memory,
                clusters=len(part),
                reserved=layout.reserved,
                shared_bytes=program.shared_bytes,
                late=late,
            )
            runner = Runner(machine, rng)
        runner.run(part)
        executed |= runner.executed
    arrays = tuple(
        memory.bytes_of(number[id(b)], b.nbytes).view(b.type.dtype).reshape(b.shape).copy()
        for b in kernel.results
    )
    return Run(arrays, frozenset(executed))


def _sections(cubin: cubins.Cubin) -> list[tuple[cubins.Variable, bytes]]:
    return [(variable, cubin.data[variable.section]) for variable in cubin.variables.values()]


__all__ = ["FILL", "LAYOUTS", "Program", "Run", "load", "run"]
