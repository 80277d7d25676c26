"""The event model, on launches whose time can be computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ptx_kernels.devices import REFERENCE
from ptx_kernels.machine_code.model import Launch
from ptx_kernels.machine_code.sass import SassInstruction
from ptx_kernels.machine_code.timeline import Section
from tools import event_model
from tools.event_model import (
    BASE,
    FAST,
    LAUNCH,
    MEMORY_LATENCY,
    SLOW,
    UNCERTAIN,
    Queue,
    seconds,
)

# a clock cycle takes a nanosecond, in which memory delivers 1000 bytes
DEVICE = dataclasses.replace(
    REFERENCE,
    multiprocessors=100,
    clock_hz=1e9 / event_model.CLOCK_RATE,
    bandwidth=1e12 / event_model.MEMORY_RATE,
)
LOAD = SassInstruction(0, "", "LDG.E.128.CONSTANT", "R4, desc[UR4][R2.64]")
USE = SassInstruction(16, "", "FFMA", "R0, R4, R1")
WORK = tuple(SassInstruction(32 + 16 * i, "", "FFMA", f"R{100 + i}, RZ") for i in range(98))


def launch(loop=(LOAD, USE, *WORK), turns=10, **changes) -> Launch:
    """One block of one warp per multiprocessor; it runs ten iterations of 100 instructions."""
    made = Launch(
        blocks=100,
        warps=1,
        resident_blocks=1,
        nbytes=10**5,
        body=Section((Section(((), Section((loop,), turns), ())), ())),
        l2_bytes=1000,
    )
    made = dataclasses.replace(made, **changes)
    return dataclasses.replace(made, memory_bytes=made.l2_bytes)  # all of it comes from memory


def test_a_queue_serves_in_order():
    queue = Queue(rate=2.0)
    assert [queue.serve(0, 4), queue.serve(1, 4), queue.serve(9, 4)] == [2, 4, 11]


def test_a_warp_waits_and_computes():
    """Each iteration has 0.5 us of latency, then two cycles per instruction after the use."""
    one = seconds(launch(), DEVICE)
    assert one == pytest.approx(LAUNCH + 10 * (MEMORY_LATENCY + 200e-9), rel=0.03)


def test_loads_ahead_of_their_use_hide_latency():
    """A load's value is used one iteration later, after 400 instructions."""
    work = tuple(dataclasses.replace(WORK[0], address=16 * i) for i in range(398))
    ahead = seconds(launch((USE, LOAD, *work)), DEVICE)
    assert ahead == pytest.approx(LAUNCH + 10 * 800e-9, rel=0.03)


@pytest.mark.parametrize("pending, share", [(1, 1 / 2), (3, 1 / 4)])
def test_stages_share_a_latency(pending, share):
    ring = (
        SassInstruction(0, "", "DEPBAR.LE", f"SB0, {pending:#x}"),
        SassInstruction(16, "", "LDGSTS.E.BYPASS.128", "[R2], desc[UR4][R4.64]"),
        SassInstruction(32, "", "LDGDEPBAR", ""),
    )
    found = seconds(launch(ring, turns=100), DEVICE) - LAUNCH
    assert found == pytest.approx(100 * share * MEMORY_LATENCY, rel=0.1)


def test_memory_serves_all_or_one():
    """All multiprocessors together take 100 MB at full rate; one is limited to 64 bytes a cycle."""
    many = dict(nbytes=10**8, l2_bytes=10**6, turns=50)
    full = seconds(launch(**many, warps=16, resident_blocks=1), DEVICE)
    assert full == pytest.approx(LAUNCH + 100e-6 + MEMORY_LATENCY, rel=0.15)
    lone = seconds(launch(blocks=1, nbytes=10**6, l2_bytes=10**6, warps=16, turns=200), DEVICE)
    assert lone >= LAUNCH + 10**6 / 64 * 1e-9


@pytest.mark.slow("simulates many events")
def test_pipes_and_wavefronts_are_shared():
    """32 warps of one multiprocessor issue four instructions a cycle; L1 serves one wavefront."""
    busy = seconds(launch(WORK, warps=32, turns=100), DEVICE) - LAUNCH
    assert busy == pytest.approx(32 * 100 * 98 / 4 * 1e-9, rel=0.05)
    served = seconds(launch(WORK, warps=32, turns=100, wavefronts=200_000), DEVICE) - LAUNCH
    assert served == pytest.approx(200e-6, rel=0.05)


@pytest.mark.slow("simulates many events", quick=["inner=1"])
@pytest.mark.parametrize("inner", [1, 5])
def test_warps_meet_behind_their_loop(inner):
    """All warps wait for the last one each time the outer loop reaches its barrier."""
    barrier = (SassInstruction(0, "", "BAR.SYNC", "0x0"),)

    def taken(behind):
        rounds = Section(((), Section(((LOAD, USE, *WORK),), inner), behind), 20)
        made = launch(warps=16, nbytes=10**7, l2_bytes=10**5, body=Section((rounds, ())))
        return seconds(made, DEVICE)

    assert taken(barrier) > 1.01 * taken(WORK[:1])


def test_blocks_follow_each_other():
    """Three blocks per multiprocessor, which holds one at a time."""
    one, three = (seconds(launch(blocks=n, nbytes=1000 * n), DEVICE) for n in (100, 300))
    assert three - LAUNCH == pytest.approx(3 * (one - LAUNCH), rel=0.02)


def test_each_assumption_lies_between_its_ends():
    """A launch is at its fastest with the better end and at its slowest with the worse one."""
    for each in UNCERTAIN:
        low, high = sorted((each.fast, each.slow))
        assert low <= getattr(BASE, each.name) <= high and low < high, each.name
    fast, base, slow = (seconds(launch(), DEVICE, each) for each in (FAST, BASE, SLOW))
    assert fast < base < slow


@pytest.mark.parametrize(
    "name, value, more",
    [
        ("launch", LAUNCH + 1e-6, 1e-6),
        ("memory_latency", MEMORY_LATENCY + 0.1e-6, 10 * 0.1e-6),
        ("clock_rate", event_model.CLOCK_RATE / 2, 10 * 200e-9),
    ],
)
def test_a_warp_alone_under_other_assumptions(name, value, more):
    """Ten turns of 100 instructions, two clocks each, that wait for memory."""
    changed = dataclasses.replace(BASE, **{name: value})
    found = seconds(launch(), DEVICE, changed) - seconds(launch(), DEVICE)
    assert found == pytest.approx(more, rel=0.03)


@pytest.mark.parametrize(
    "opcode, name, value, factor",
    [
        ("FFMA", "busy", 0.5, 1.0),
        ("HMMA.16816.F32", "busy", 0.5, 2.0),  # half of 16 / (16 + 7)
        ("IDP.4A", "dp4a_clocks", 2.0, 2.0),
    ],
)
def test_pipes_under_other_assumptions(opcode, name, value, factor):
    """16 warps of one multiprocessor keep a pipe busy; `busy` is of kernels with tensor cores."""
    work = tuple(dataclasses.replace(i, opcode=opcode) for i in WORK)
    full = launch(work, warps=16, turns=20, blocks=1, nbytes=1000, unpacks=True)
    changed = dataclasses.replace(BASE, **{name: value})
    taken = [seconds(full, DEVICE, each) - LAUNCH for each in (BASE, changed)]
    assert taken[1] / taken[0] == pytest.approx(factor, rel=0.05)
