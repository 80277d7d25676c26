"""Launches a kernel in the simulator: checks geometry and buffers, runs the grid in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ptx.module import MAX_CLUSTER, Buffer, Kernel
from ..ptx.oldest import MAX_SHARED_BYTES
from .address_space import SHARED_BASE
from .batch import Batch
from .errors import LaunchError, SimulationError, UnwrittenOutput
from .layout import Extent, Layout
from .machine import Machine
from .memory.buffers import Buffers, DeviceBuffer
from .memory.context import Context
from .perturbation import current
from .races.happens_before import HappensBefore
from .races.timeline import Timeline
from .steps.compile import Compiled, compile_perturbed, compile_text
from .text.program import EntryParameter
from .traffic import Traffic

BATCH_LANES = 1 << 15  # per batch; registers of a few dozen values then stay in the L2 cache
MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
STEP_LIMIT = 20_000_000  # basic blocks per batch


@dataclass(frozen=True)
class Statistics:
    lane_instructions: int  # instructions times the lanes that executed them
    batches: int


def launch(
    text: str,
    arguments: Sequence[np.ndarray | DeviceBuffer | np.generic],
    grid: tuple[int, ...],
    block: tuple[int, ...],
    dynamic_shared_bytes: int = 0,
    *,
    batch_lanes: int = BATCH_LANES,
    strict: bool = True,
    step_limit: int = STEP_LIMIT,
    traffic: Traffic | None = None,
    only: Sequence[int] | None = None,
) -> Statistics:
    """Simulates a launch of PTX text in place: stores go directly into the argument arrays.

    Args:
      text: a PTX module with one entry. Its `.const` and `.global` variables hold their initial
        values at the start of every launch.
      arguments: one per parameter: a buffer for a pointer, a NumPy scalar for anything else. A bare
        array is readable and writable; DeviceBuffer restricts that. The same object can be passed
        twice; both parameters then point to it.
      grid, block: up to three extents each, x first.
      dynamic_shared_bytes: size of the `.extern .shared` memory.
      batch_lanes: threads simulated at once, at least one thread block or cluster. Results do not
        depend on it.
      strict: raises if a thread exits before a barrier that other threads of its thread block wait
        at, although PTX does not count exited threads.
      step_limit: limit of basic blocks per batch.
      traffic: `Traffic` to which the launch's accesses are added, by PTX line; None if absent.
      only: numbers of the thread blocks to run, x fastest; the other thread blocks of their
        clusters run too. None runs the full grid.

    Raises:
      SimulationError: the subclass names the kind of error, the message its place.
    """
    freedom = current(text)
    generator = freedom.generator
    program = compile_text(text) if generator is None else compile_perturbed(text, generator)
    grid3, block3 = _extents(grid, "grid"), _extents(block, "block")
    shared_bytes = _check_geometry(program, grid3, block3, dynamic_shared_bytes)
    buffers, parameters = _place(program, arguments)
    timeline = Timeline()
    threads = block3[0] * block3[1] * block3[2]
    cluster3 = program.program.cluster
    clusters = _clusters(grid3, cluster3, only)
    total, size = clusters.shape
    at_once = max(1, min(total, batch_lanes // (-(-threads // 32) * 32 * size)))
    if generator is not None:
        clusters = clusters[generator.permutation(total)]
        at_once = max(1, at_once // int(generator.integers(1, 4)))
    lane_instructions = 0
    with np.errstate(all="ignore"):
        for first in range(0, total, at_once):
            blocks = clusters[first : first + at_once].ravel()
            layout = Layout(program.name, grid3, block3, blocks, cluster3)
            batch = Batch(
                program.program,
                program.file,
                layout,
                buffers,
                parameters,
                shared_bytes,
                Context(HappensBefore(timeline, layout), freedom, traffic),
                synchronizes=program.synchronizes,
            )
            machine = Machine(program.blocks, batch, strict, step_limit)
            machine.run()
            lane_instructions += machine.lane_instructions
    return Statistics(lane_instructions, -(-total // at_once))


def _extents(given: tuple[int, ...], what: str) -> Extent:
    x, y, z = (*given, 1, 1)[:3]
    if len(given) > 3 or min(x, y, z) < 1:
        raise LaunchError(f"{what}={given} must have one to three extents of at least 1")
    return int(x), int(y), int(z)


def _clusters(grid: Extent, cluster: Extent, only: Sequence[int] | None) -> np.ndarray:
    """Returns the thread block numbers of each cluster to run, shape (clusters, ranks)."""
    if max(cluster) == 1:
        numbers = np.arange(grid[0] * grid[1] * grid[2]) if only is None else np.array(only)
        return numbers[:, None]
    (x, y, z), (a, b, c) = grid, cluster
    apart = np.arange(x * y * z).reshape(z // c, c, y // b, b, x // a, a)
    clusters = apart.transpose(0, 2, 4, 1, 3, 5).reshape(-1, a * b * c)
    return clusters if only is None else clusters[np.isin(clusters, only).any(axis=1)]


def _check_geometry(
    program: Compiled, grid: Extent, block: Extent, dynamic_shared_bytes: int
) -> int:
    """Checks the launch geometry; returns the shared bytes per thread block."""
    parsed, name = program.program, program.name
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS or block[2] > 64:
        raise LaunchError(
            f"kernel {name}: block={block} exceeds {MAX_THREADS} threads or 64 along z"
        )
    if any(extent > most for extent, most in zip(grid, MAX_GRID, strict=True)):
        raise LaunchError(f"kernel {name}: grid={grid} exceeds {MAX_GRID}")
    cluster = parsed.cluster
    if cluster[0] * cluster[1] * cluster[2] > MAX_CLUSTER or min(cluster) < 1:
        raise LaunchError(
            f"kernel {name}: a cluster of {cluster} has more than {MAX_CLUSTER} blocks, or none"
        )
    if any(extent % of_cluster for extent, of_cluster in zip(grid, cluster, strict=True)):
        raise LaunchError(f"kernel {name}: grid={grid} is no multiple of the cluster {cluster}")
    if parsed.required_block is not None and parsed.required_block != block:
        raise LaunchError(
            f"kernel {name}: block={block}, but .reqntid says {parsed.required_block}"
        )
    if parsed.max_threads is not None and threads > parsed.max_threads:
        raise LaunchError(
            f"kernel {name}: {threads} threads, but .maxntid allows {parsed.max_threads}"
        )
    shared = parsed.static_shared_bytes
    if dynamic_shared_bytes:
        shared = parsed.dynamic_start - SHARED_BASE + dynamic_shared_bytes
    if shared > MAX_SHARED_BYTES or dynamic_shared_bytes < 0:
        raise LaunchError(f"kernel {name}: {shared} bytes of shared memory, of {MAX_SHARED_BYTES}")
    return shared


def _place(
    program: Compiled, arguments: Sequence[np.ndarray | DeviceBuffer | np.generic]
) -> tuple[Buffers, list[np.ndarray]]:
    """Places variables and buffers in memory; returns (buffers, bytes of each parameter)."""
    parameters = program.program.params
    if len(arguments) != len(parameters):
        names = tuple(p.name for p in parameters)
        raise LaunchError(
            f"kernel {program.name} has {len(names)} parameters {names}, "
            f"got {len(arguments)} arguments"
        )
    buffers = [
        DeviceBuffer(d.name, _aligned(d.initial.copy()), "in" if d.space == "const" else "inout")
        for d in program.program.data.values()
    ]
    known: dict[int, DeviceBuffer] = {}
    for parameter, argument in zip(parameters, arguments, strict=True):
        if isinstance(argument, np.generic):
            continue
        if parameter.nbytes != 8 or parameter.type[0] == "f":
            raise LaunchError(
                f"kernel {program.name}: parameter {parameter.name} is a .{parameter.type}, "
                "so it takes a NumPy scalar"
            )
        if id(argument) not in known:
            known[id(argument)] = (
                argument
                if isinstance(argument, DeviceBuffer)
                else DeviceBuffer(parameter.name, argument)
            )
            buffers.append(known[id(argument)])
    placed = Buffers(buffers, synchronizes=program.synchronizes)
    values = [
        _scalar(program, parameter, argument)
        if isinstance(argument, np.generic)
        else np.array([known[id(argument)].base], np.uint64).view(np.uint8)
        for parameter, argument in zip(parameters, arguments, strict=True)
    ]
    return placed, values


def _scalar(program: Compiled, parameter: EntryParameter, value: np.generic) -> np.ndarray:
    is_float = value.dtype.kind == "f"
    if value.nbytes != parameter.nbytes or (
        parameter.type[0] != "b" and is_float != (parameter.type[0] == "f")
    ):
        raise LaunchError(
            f"kernel {program.name}: parameter {parameter.name} is a .{parameter.type} of "
            f"{parameter.nbytes} bytes, got a {value.dtype}"
        )
    return np.frombuffer(value.tobytes(), np.uint8)


def run(kernel: Kernel, *operands: np.ndarray, **options: Any) -> tuple[np.ndarray, ...]:
    """Runs a built kernel in the simulator; returns its results in the order of its buffers.

    Takes the options of `run_counted`.
    """
    return run_counted(kernel, *operands, **options)[0]


def run_counted(
    kernel: Kernel,
    *operands: np.ndarray,
    check: bool = True,
    batch_lanes: int = BATCH_LANES,
    strict: bool = True,
    step_limit: int = STEP_LIMIT,
    traffic: Traffic | None = None,
) -> tuple[tuple[np.ndarray, ...], Statistics]:
    """Runs a built kernel in the simulator; returns (results in order, the launch's statistics).

    Args:
      operands: one array per `in` and `inout` buffer, of the buffer's shape and dtype. bf16 can be
        any 2-byte dtype and e4m3 any 1-byte one (bits). Operands are not modified; the results of
        `inout` buffers are copies.
      check: raises if result bytes are read before they are written, or are never written. Without
        it such bytes are 0xff (NaN in every float type).
      batch_lanes, strict, step_limit: see `launch`.

    Raises:
      TypeError, ValueError: an operand's dtype or shape is wrong.
      SimulationError: the subclass names the kind of error, the message its place.
    """
    if len(operands) != len(kernel.operands):
        raise TypeError(
            f"kernel {kernel.name} takes {len(kernel.operands)} operands, got {len(operands)}"
        )
    given = [
        _operand(kernel, buffer, array)
        for buffer, array in zip(kernel.operands, operands, strict=True)
    ]
    results = []
    for buffer in kernel.results:
        if buffer.role == "inout":
            results.append(given[kernel.operands.index(buffer)])
        else:
            array = _aligned(np.empty(buffer.shape, buffer.type.dtype))
            array.reshape(-1).view(np.uint8)[:] = 0xFF
            results.append(DeviceBuffer(buffer.name, array, "out", initialized=not check))
    try:
        statistics = launch(
            kernel.text,
            [*given, *results],
            kernel.grid,
            kernel.block,
            kernel.dynamic_shared_bytes,
            batch_lanes=batch_lanes,
            strict=strict,
            step_limit=step_limit,
            traffic=traffic,
        )
    except SimulationError as error:
        error.locate(kernel.lines)
        raise
    for result in results:
        if result.written is not None and not result.written.all():
            missing = result.written == 0
            raise UnwrittenOutput(
                f"kernel {kernel.name}: {int(missing.sum())} of the {result.nbytes} bytes of "
                f"{result.name} were never written, the first at offset {int(np.argmax(missing))}"
            )
    return tuple(result.array for result in results), statistics


def _operand(kernel: Kernel, buffer: Buffer, array: np.ndarray) -> DeviceBuffer:
    array = np.asarray(array)
    want = buffer.type.dtype
    held_as_bits = (
        buffer.type.name == "e4m3" or buffer.type.name == "bf16" and array.dtype != np.float16
    )
    if held_as_bits and array.dtype.itemsize == want.itemsize:
        array = array.view(want)
    if array.dtype != want:
        raise TypeError(
            f"kernel {kernel.name}: operand {buffer.name} must be {buffer.type}, got {array.dtype}"
        )
    if array.shape != buffer.shape:
        raise ValueError(
            f"kernel {kernel.name}: operand {buffer.name} must have shape {buffer.shape}, "
            f"got {array.shape}"
        )
    if buffer.role == "inout":
        return DeviceBuffer(buffer.name, _aligned(array.copy()), "inout")
    return DeviceBuffer(buffer.name, _aligned(np.ascontiguousarray(array)), "in")


def _aligned(array: np.ndarray) -> np.ndarray:
    """Returns the array, or a copy at a 16-byte aligned address."""
    if array.ctypes.data % 16 == 0 and array.flags.c_contiguous:
        return array
    room = np.empty(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
