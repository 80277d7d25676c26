"""The cost model on synthetic loops whose time can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ptx_kernels.devices import DEVICES, REFERENCE, find_device
from ptx_kernels.machine_code import model
from ptx_kernels.machine_code.sass import Loop, Outstanding, SassInstruction

# 100 multiprocessors at 1 GHz: a clock is a nanosecond
DEVICE = dataclasses.replace(REFERENCE, multiprocessors=100, clock_hz=1e9, bandwidth=1e12)


def code(**counts: int) -> tuple[SassInstruction, ...]:
    """So many of each opcode; `LDG_128` stands for `LDG.E.128`."""
    opcodes = {"LDG_128": "LDG.E.128.CONSTANT", "LDS_128": "LDS.128", "I2FP": "I2FP.F32.S32"}
    return tuple(
        SassInstruction(16 * i, "", opcodes.get(name, name), f"R{4 * i}, R1")
        for i, name in enumerate(name for name, count in counts.items() for _ in range(count))
    )


def launch(**changes) -> model.Launch:
    """Four blocks a multiprocessor, all resident, of one warp; every warp takes ten trips."""
    made = model.Launch(
        blocks=400,
        warps=1,
        resident_blocks=4,
        nbytes=10**6,
        loop=code(FFMA=80, LDG_128=4),
        trips=4000,
        in_flight=Outstanding(4, 4, 64),
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    "mix, unit, clocks",
    [
        (dict(FFMA=64), "issue", 16),
        (dict(FFMA=64), "float", 16),
        (dict(IMAD=64), "multiply", 32),
        (dict(IMAD=32, FFMA=32), "float", 16),
        (dict(LOP3=32, SHF=16, ISETP=16), "integer", 32),
        (dict(MUFU=3), "special", 6),
        (dict(LDG_128=2, LDS_128=1, SHFL=5), "load/store", 17),
        (dict(LDS=4), "load/store", 4),
        (dict(NOP=9, BRA=4), "issue", 1),
    ],
)
def test_clocks_of_a_mix(mix, unit, clocks):
    assert model.unit_clocks(code(**mix), DEVICE)[unit] == clocks


def test_clocks_of_tensor_cores():
    int8 = SassInstruction(0, "", "IMMA.16832.S8.S8.SAT", "R0, R4, R8, R12")
    bf16 = SassInstruction(0, "", "HMMA.16816.F32.BF16", "R0, R4, R8, R12")
    device = dataclasses.replace(DEVICE, mma_int8_ops=4096, mma_float_ops=2048)
    assert model.unit_clocks((int8,), device)["tensor"] == 2 * 16 * 8 * 32 / 4096
    assert model.unit_clocks((bf16,), device)["tensor"] == 2 * 16 * 8 * 16 / 2048
    with pytest.raises(ValueError, match="must name a shape"):
        model.unit_clocks((dataclasses.replace(int8, opcode="IMMA"),), device)


def test_bounds_by_hand():
    """84 instructions take 21 clocks; 40 trips and 42 once on each multiprocessor.

    A warp waits once in each trip.
    """
    found = model.predict(launch(once=42), DEVICE)
    assert found.bandwidth == pytest.approx(1e-6)
    assert found.issue == pytest.approx((40 * 21 + 4 * 42 / 4) * 1e-9) and found.unit == "issue"
    assert found.latency == pytest.approx(10 * (800 + 2 * 84) * 1e-9 + 2 * 42e-9)
    assert found.tail == 1
    assert found.bytes_in_flight == 4 * 32 * 64
    assert found.bound == "latency"
    assert found.seconds == pytest.approx(1.3e-6 + 0.8e-6 + found.latency)


@pytest.mark.parametrize(
    "changes, bound",
    [
        (dict(nbytes=10**8), "bandwidth"),
        # one warp alone on a scheduler issues every other clock
        (
            dict(loop=code(FFMA=8000)),
            "latency",
        ),
        (dict(loop=code(FFMA=8000), warps=32), "issue"),
        (dict(loop=code(MUFU=800)), "issue"),
    ],
)
def test_what_binds(changes, bound):
    assert model.predict(launch(**changes), DEVICE).bound == bound


def test_tail_and_rounds():
    """401 blocks: one multiprocessor has five, which take two rounds where four are resident."""
    even, odd = (
        model.predict(launch(blocks=blocks, trips=10 * blocks), DEVICE) for blocks in (400, 401)
    )
    assert (even.tail, odd.tail) == (1, pytest.approx(5 / 4.01))
    assert odd.latency == pytest.approx(2 * even.latency)


@pytest.mark.parametrize(
    "worse",
    [
        dict(nbytes=10**9),
        dict(loop=code(FFMA=90, LDG_128=4)),
        dict(trips=5000),
        dict(in_flight=Outstanding(2, 2, 32)),
        dict(once=100),
        dict(resident_blocks=3),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_more_work_never_takes_less_time(worse):
    before, after = model.predict(launch(), DEVICE), model.predict(launch(**worse), DEVICE)
    assert after.seconds > before.seconds
    assert all(after.bounds[name] >= seconds for name, seconds in before.bounds.items())


@pytest.mark.parametrize(
    "faster", [dict(multiprocessors=200), dict(clock_hz=2e9), dict(bandwidth=2e12)]
)
def test_more_device_never_takes_more_time(faster):
    for changes in ({}, dict(nbytes=10**8), dict(loop=code(FFMA=800))):
        before = model.predict(launch(**changes), DEVICE).seconds
        assert (
            model.predict(launch(**changes), dataclasses.replace(DEVICE, **faster)).seconds
            <= before
        )


def test_an_empty_launch_is_refused():
    for changes in (dict(resident_blocks=0), dict(blocks=0), dict(warps=0)):
        with pytest.raises(ValueError, match="must be positive"):
            model.predict(launch(**changes), DEVICE)


def test_llama_cpp_is_bound_by_issue_slots():
    """llama.cpp's Q4_K mat-vec for sm_90 spends 153 instructions on 16 bytes of quants.

    That is more than the slots can do.
    """
    quant_bytes = 14336 * 4096 // 2
    found = model.predict(
        launch(
            blocks=14336,
            warps=4,
            resident_blocks=9,
            nbytes=quant_bytes * 144 // 128,
            loop=code(FFMA=33, IMAD=30, LOP3=40, SHF=32, LDG=18),
            trips=quant_bytes / 16 / 32,
            in_flight=Outstanding(0, 10, 40),
        ),
        REFERENCE,
    )
    assert found.bounds["issue"] > found.bounds["bandwidth"]


def test_outstanding_loads():
    loads = (
        SassInstruction(0, "", "LDG.E.128", "R4, [R2]"),
        SassInstruction(16, "", "LDG.E.64", "R8, [R2]"),
        SassInstruction(32, "", "FADD", "R0, R9, R0"),  # uses the second half of the 64-bit load
        SassInstruction(48, "", "LDG.E.U8", "R10, [R2]"),
        SassInstruction(64, "", "FADD", "R0, R7, R10"),
    )
    assert Loop(loads).outstanding() == Outstanding(wide=1, loads=2, nbytes=24)
    assert Loop(loads[2:3]).outstanding() == Outstanding(0, 0, 0)


@pytest.mark.parametrize(
    "reported, name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("H200", "H200"),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_names_of_devices(reported, name):
    assert find_device(reported) == (DEVICES[name] if name else None)
