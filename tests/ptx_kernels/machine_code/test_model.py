"""The cost model on synthetic loops whose time can be computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ptx_kernels.devices import DEVICES, REFERENCE, find_device
from ptx_kernels.machine_code import model
from ptx_kernels.machine_code.sass import Loop, Outstanding, SassInstruction
from ptx_kernels.machine_code.timeline import Section

# 100 multiprocessors at 1 GHz: a clock is a nanosecond
DEVICE = dataclasses.replace(
    REFERENCE, multiprocessors=100, clock_hz=1e9, tensor_clock_hz=None, bandwidth=1e12
)


def code(**counts: int) -> tuple[SassInstruction, ...]:
    """Makes so many instructions of each opcode.

    `LDG_128` stands for `LDG.E.128`. `USE` uses the last load.
    """
    opcodes = {"LDG_128": "LDG.E.128.CONSTANT", "LDS_128": "LDS.128", "I2FP": "I2FP.F32.S32"}
    made: list[SassInstruction] = []
    for name, count in counts.items():
        for _ in range(count):
            i = len(made)
            named = f"R0, R{4 * i}" if name == "USE" else f"R{4 * i + 4}, RZ"
            made.append(SassInstruction(16 * i, "", opcodes.get(name, name), named))
    return tuple(made)


LOOP = code(LDG_128=4, USE=1, FFMA=79)


def launch(loop=LOOP, trips=10.0, once=0, **changes) -> model.Launch:
    """Four resident blocks of one warp per multiprocessor; each warp runs ten iterations.

    once: instructions after the loop.
    """
    made = model.Launch(
        blocks=400,
        warps=1,
        resident_blocks=4,
        nbytes=10**6,
        body=Section((Section((loop,), trips), code(BRA=once))),
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
    """Each multiprocessor runs 40 iterations of 84 instructions, in 21 clocks, and 42 once.

    A warp waits once per iteration, for the latency of a memory with a load of a tenth. Its first
    wait counts separately, with the latency of a memory that all warps access at once.
    """
    found = model.predict(launch(once=42, wavefronts=50, l2_bytes=5000), DEVICE)
    assert found.bounds["bandwidth"] == pytest.approx(1e-6)
    assert found.bounds["issue"] == pytest.approx((40 * 21 + 4 * 42 / 4) * 1e-9)
    assert found.unit == "issue"
    assert found.bounds["l1"] == pytest.approx(4 * 50e-9)
    assert found.bounds["l2"] == pytest.approx(400 * 5000 / DEVICE.l2_bandwidth)
    # the fourth load is used at once: its latency, and two clocks for each instruction
    way = 10 * (500 + 2 * 84) * 1e-9 + 2 * 42e-9 - 800e-9
    assert found.bounds["latency"] == pytest.approx(way, rel=0.01)
    assert found.bound == "latency" and found.first == 800e-9
    assert found.seconds == pytest.approx(1.3e-6 + 0.8e-6 + found.bounds["latency"])


def test_tensor_cores_leave_issue_slots_and_l1_idle():
    """Four resident warps work in 4 of 11 clocks; clusters of eight use 96 multiprocessors."""
    loop = (*LOOP, SassInstruction(0, "", "HMMA.16816.F32.BF16", "R0, R4, R8, R12"))
    found = model.predict(launch(loop=loop, wavefronts=50, unpacks=True), DEVICE)
    assert found.bounds["l1"] == pytest.approx(4 * 50e-9 * 11 / 4)
    assert found.bounds["issue"] == pytest.approx(10 * 85e-9 * 11 / 4)
    device = dataclasses.replace(DEVICE, groups=(16,) * 6 + (4,))
    clusters = launch(wavefronts=50, blocks=200, resident_blocks=1, cluster=8)
    assert model.predict(clusters, device).bounds["l1"] == pytest.approx(3 * 50e-9)
    assert model.predict(dataclasses.replace(clusters, cluster=1), device).bounds[
        "l1"
    ] == pytest.approx(2 * 50e-9)


def test_a_prologue_is_added_whatever_binds():
    """400 instructions that wait once, before a loop bound by memory bandwidth."""
    before = Section((code(LDG_128=1, USE=1, FFMA=398),))
    plain, after = (
        model.predict(launch(nbytes=10**8, prologue=p), DEVICE) for p in (Section(()), before)
    )
    assert plain.bound == after.bound == "bandwidth"
    assert after.prologue == pytest.approx(800e-9 + 2 * 400e-9)
    assert after.seconds == pytest.approx(plain.seconds + after.prologue)


def test_a_loop_of_the_prologue_brings_its_constants_once():
    """The second of two iterations finds them in L1."""
    turn = Section((code(LDG_128=1, USE=1),), 2)
    found = model.predict(launch(prologue=Section((turn,))), DEVICE)
    assert found.prologue == pytest.approx(800e-9 + 300e-9 + 2 * 2 * 2e-9)


def test_loads_for_the_next_turn_hide_behind_this_ones_work():
    """Takes the maximum of latency and work, not the sum, if a load is used an iteration later."""
    work = code(FFMA=598)
    late = SassInstruction(0, "", "LDG.E.128.CONSTANT", "R4000, R1")
    used = SassInstruction(0, "", "FFMA", "R0, R4000, R1")
    ahead = (used, late, *work)  # loads for the next iteration, then works
    serial = (late, used, *work)
    trips = 100
    hidden, summed = (
        model.predict(launch(loop=loop, trips=trips), DEVICE).bounds["latency"] + 0.8e-6
        for loop in (ahead, serial)
    )
    assert hidden == pytest.approx(trips * 600 * 2e-9, rel=0.01)  # 1.2 us an iteration
    assert summed == pytest.approx(trips * (600 * 2e-9 + 0.5e-6), rel=0.01)


@pytest.mark.parametrize("pending, waits", [(0, 1), (1, 1 / 2), (2, 1 / 3)])
def test_stages_of_copies_share_a_latency(pending, waits):
    """Each iteration waits for all groups but the youngest, and starts another."""
    ring = (
        SassInstruction(0, "", "DEPBAR.LE", f"SB0, {pending:#x}"),
        SassInstruction(16, "", "LDGSTS.E.BYPASS.128", "[R2], desc[UR4][R4.64]"),
        SassInstruction(32, "", "LDGDEPBAR", ""),
    )
    found = model.predict(launch(loop=ring, trips=300), DEVICE)
    # a group's latency begins after its copies, two instructions after the wait
    turn = found.bounds["latency"] / 300
    assert turn == pytest.approx(waits * 504e-9, rel=0.03)


def test_memory_answers_later_under_load():
    """Compares the same loop in launches that use little and almost all of the bandwidth."""
    slow = model.predict(launch(trips=100), DEVICE).bounds["latency"]
    full = model.predict(launch(trips=100, nbytes=9 * 10**7), DEVICE).bounds["latency"]
    assert slow == pytest.approx(100 * (500 + 168) * 1e-9 - 0.8e-6, rel=0.01)
    assert 1.2 * slow < full < 100 * (800 + 168) * 1e-9


def test_tensor_cores_lower_the_clock():
    device = dataclasses.replace(DEVICE, tensor_clock_hz=0.5e9)
    mma = (SassInstruction(0, "", "HMMA.16816.F32.BF16", "R0, R4, R8, R12"),)
    for loop, slower in ((mma, 2.0), (code(FFMA=100), 1.0)):
        found = [model.predict(launch(loop=loop), d).bounds["issue"] for d in (device, DEVICE)]
        assert found[0] == pytest.approx(slower * found[1])


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
        (dict(wavefronts=10000), "l1"),
        (dict(l2_bytes=10**6), "l2"),
    ],
)
def test_the_bound_of_a_launch(changes, bound):
    assert model.predict(launch(**changes), DEVICE).bound == bound


def test_tail_and_rounds():
    """Gives one multiprocessor five of 401 blocks, which take two rounds of four resident blocks.

    It issues for five blocks. Idle multiprocessors do not make memory faster for it, beyond its
    port.
    """
    changes = dict(wavefronts=50, l2_bytes=5000)
    even, odd = (model.predict(launch(blocks=blocks, **changes), DEVICE) for blocks in (400, 401))
    assert odd.bounds["latency"] + 0.8e-6 == pytest.approx(2 * (even.bounds["latency"] + 0.8e-6))
    for name in ("issue", "l1"):
        assert odd.bounds[name] == pytest.approx(5 / 4 * even.bounds[name])
    assert odd.bounds["bandwidth"] == even.bounds["bandwidth"]
    assert odd.bounds["l2"] == pytest.approx(401 / 400 * even.bounds["l2"])
    lone = model.predict(launch(blocks=1, l2_bytes=5000), DEVICE)
    assert lone.bounds["l2"] == pytest.approx(5000 / 64 * 1e-9)


@pytest.mark.parametrize(
    "worse",
    [
        dict(nbytes=10**9),
        dict(loop=code(LDG_128=4, USE=1, FFMA=89)),
        dict(trips=12.5),
        dict(loop=code(LDG_128=2, USE=1) + LOOP[2:]),  # two waits
        dict(once=100),
        dict(resident_blocks=3),
        dict(prologue=Section((code(BRA=9),))),
    ],
    ids=["nbytes", "instructions", "trips", "loads in flight", "once", "resident", "prologue"],
)
def test_more_work_never_takes_less_time(worse):
    before, after = model.predict(launch(), DEVICE), model.predict(launch(**worse), DEVICE)
    assert after.seconds > before.seconds
    # a less loaded memory answers sooner, by nanoseconds
    assert all(
        after.bounds[name] >= (1 - 1e-3) * seconds for name, seconds in before.bounds.items()
    )


@pytest.mark.parametrize(
    "faster", [dict(multiprocessors=200), dict(clock_hz=2e9), dict(bandwidth=2e12)]
)
def test_more_device_never_takes_more_time(faster):
    for changes in ({}, dict(nbytes=10**8), dict(loop=code(FFMA=800))):
        before = model.predict(launch(**changes), DEVICE).seconds
        assert (
            model.predict(launch(**changes), dataclasses.replace(DEVICE, **faster)).seconds
            <= before * (1 + 1e-3)  # a faster memory is less loaded
        )


def test_an_empty_launch_is_refused():
    for changes in (dict(resident_blocks=0), dict(blocks=0), dict(warps=0)):
        with pytest.raises(ValueError, match="must be positive"):
            model.predict(launch(**changes), DEVICE)


def test_llama_cpp_is_bound_by_issue_slots():
    """llama.cpp's Q4_K mat-vec for sm_90 spends 153 instructions on 16 bytes of quants.

    That exceeds the issue slots.
    """
    quant_bytes = 14336 * 4096 // 2
    found = model.predict(
        launch(
            blocks=14336,
            warps=4,
            resident_blocks=9,
            nbytes=quant_bytes * 144 // 128,
            loop=code(LDG=18, FFMA=33, IMAD=30, LOP3=40, SHF=32),
            trips=quant_bytes / 16 / 32 / 14336 / 4,
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
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIE 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200 141GB HBM3e", "H200"),  # in XLA's description of it
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10-24Q", None),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", None),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "RTX PRO 6000 Blackwell Workstation",
        ),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA B200", "B200"),
        ("H200", "H200"),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_names_of_devices(reported, name):
    assert find_device(reported) == (DEVICES[name] if name else None)


def test_each_device_is_found_by_its_name():
    assert all(find_device(name) is device for name, device in DEVICES.items())
