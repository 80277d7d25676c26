"""Each error names the kernel, the PTX line, the Python line that wrote it, block and thread."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Builder, Pointer, f32, kernel
from ptx_kernels.ptx.values import guard

WRONG: list[
    tuple[type[simulator.SimulationError], str, Callable[[Builder, Pointer, Pointer], None]]
] = []


def wrong(error: type[simulator.SimulationError], thread: str):
    """Registers a body that must fail in its last line, first in `thread`.

    It runs in two blocks of two warps with x (128,) and y (128,).
    """
    return lambda body: WRONG.append((error, thread, body)) or body


@wrong(simulator.OutOfBounds, "block (1, 0, 0), thread (60, 0, 0)")
def out_of_bounds(k: Builder, x: Pointer, y: Pointer) -> None:
    x.load(k.block_id() * 64 + k.thread_id + 4)


@wrong(simulator.Misaligned, "block (0, 0, 0), thread (1, 0, 0)")
def misaligned(k: Builder, x: Pointer, y: Pointer) -> None:
    x.load(k.lane_id, vector=4)


@wrong(simulator.UninitializedRead, "block (0, 0, 0), thread (0, 0, 0)")
def output_read(k: Builder, x: Pointer, y: Pointer) -> None:
    y.load(0)


@wrong(simulator.UninitializedRead, "block (0, 0, 0), thread (32, 0, 0)")
def shared_read(k: Builder, x: Pointer, y: Pointer) -> None:
    tile = k.shared("tile", f32, (64,))
    tile.store(k.thread_id, x.load(0), where=k.warp_id == 0)
    k.barrier()
    tile.load(k.thread_id)


@wrong(simulator.UninitializedRead, "block (0, 0, 0), thread (0, 0, 0)")
def register_read(k: Builder, x: Pointer, y: Pointer) -> None:
    never = k.register(f32)
    y.store(0, never)


@wrong(simulator.SharedRace, "block (0, 0, 0), thread (0, 0, 0)")
def race_of_warps(k: Builder, x: Pointer, y: Pointer) -> None:
    tile = k.shared("tile", f32, (64,))
    tile.store(k.thread_id, x.load(0))
    tile.load(k.thread_id ^ 32)


@wrong(simulator.SharedRace, "block (0, 0, 0), thread (0, 0, 0)")
def race_of_lanes(k: Builder, x: Pointer, y: Pointer) -> None:
    tile = k.shared("tile", f32, (64,))
    tile.store(k.thread_id, x.load(0))
    tile.load(k.thread_id ^ 1)


@wrong(simulator.GlobalRace, "block (0, 0, 0), thread (0, 0, 0)")
def race_of_blocks(k: Builder, x: Pointer, y: Pointer) -> None:
    y.store(k.thread_id, x.load(k.thread_id))


@wrong(simulator.BarrierDivergence, "block (0, 0, 0), thread (0, 0, 0)")
def barrier_in_part_of_a_warp(k: Builder, x: Pointer, y: Pointer) -> None:
    with k.when(k.lane_id < 5):
        k.barrier()


@wrong(simulator.EarlyExit, "block (0, 0, 0), thread (0, 0, 0)")
def barrier_in_part_of_a_block(k: Builder, x: Pointer, y: Pointer) -> None:
    with k.when(k.warp_id == 0):
        k.barrier()


@wrong(simulator.Deadlock, "block (0, 0, 0), thread (0, 0, 0)")
def barriers_that_differ(k: Builder, x: Pointer, y: Pointer) -> None:
    with k.when(k.warp_id == 1):
        k.write("bar.sync 1;")
    with k.when(k.warp_id == 0):
        k.barrier()


@wrong(simulator.ShuffleError, "block (0, 0, 0), thread (0, 0, 0)")
def shuffle_in_part_of_a_warp(k: Builder, x: Pointer, y: Pointer) -> None:
    with k.when(k.lane_id < 16):
        k.shuffle_xor(k.lane_id, 1)


@wrong(simulator.ShuffleError, "block (0, 0, 0), thread (4, 0, 0)")
def shuffle_from_an_exited_lane(k: Builder, x: Pointer, y: Pointer) -> None:
    k.write(f"{guard(k.lane_id >= 5)}ret;")
    k.shuffle_xor(k.lane_id, 1)


@wrong(simulator.ReadOnlyWrite, "block (0, 0, 0), thread (0, 0, 0)")
def store_to_an_operand(k: Builder, x: Pointer, y: Pointer) -> None:
    x.store(0, x.load(1))


def last_line(function: Callable) -> int:
    source, first = inspect.getsourcelines(function)
    return first + len(source) - 1


@pytest.mark.parametrize(
    ("error", "thread", "body"), WRONG, ids=[body.__name__ for _, _, body in WRONG]
)
def test_errors_are_located(
    error: type[simulator.SimulationError], thread: str, body: Callable
) -> None:
    @kernel
    def broken(k: Builder) -> None:
        x, y = k.input("x", f32, (128,)), k.output("y", f32, (128,))
        k.launch((2,), 64)
        body(k, x, y)

    fault, call = (last_line(function) for function in (body, inspect.unwrap(broken)))
    built = broken()
    with pytest.raises(error) as caught:
        simulator.run(built, np.zeros(128, np.float32))
    match = re.fullmatch(
        r"kernel broken: .+\n  line (\d+): (.+;)\n  (.+)\n  written by (.+)", str(caught.value)
    )
    assert match is not None, str(caught.value)
    assert built.text.split("\n")[int(match[1]) - 1].strip() == match[2]
    assert (match[3], match[4]) == (
        thread,
        f"test_locations.py:{fault}, called at test_locations.py:{call}",
    )
