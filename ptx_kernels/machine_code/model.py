"""Predicts the time of a kernel from its machine code, without a GPU.

The model, for one launch with known memory traffic, loop trips and grid:

    seconds = LAUNCH + prologue + first + max(bandwidth, issue, l1, l2, latency)

    prologue    time of one warp alone until its hot loop: norms, quantization
    first       latency of the first bytes that the loop waits for; for bytes requested in the
                prologue, the part that remains after it
    bandwidth   bytes to move / bandwidth of a copy. Bytes that arrive during the prologue do not
                count, nor do bytes that earlier launches prefetched and that have arrived by then.
                Prefetches for later launches are served first; what remains of them adds to it
    issue       clocks that the busiest unit of the busiest multiprocessor needs for all
                instructions; for packed weights on tensor cores, over the fraction of clocks in
                which resident warps can keep it busy (`devices.tensor_busy`)
    l1          clocks of its shared memory and L1, one per wavefront, over the same fraction
    l2          bytes that thread blocks read and write, each byte once per thread block, /
                bandwidth of the L2 cache, or bytes of the busiest multiprocessor / bandwidth of its
                port
    latency     rounds * time of one warp alone through its loop and the code around it
    rounds      number of times that a multiprocessor is filled with resident thread blocks

A warp alone (`timeline`) issues every other clock and waits at the first use of a loaded value. The
code between load and use hides latency, also across loop iterations, and so do stages of
asynchronous copies. It waits for CLUSTER_BARRIER at a barrier of a cluster. Other resident warps
hide remaining latency. The latency of a loop's loads is between IDLE_LATENCY and MEMORY_LATENCY,
depending on the fraction of the bandwidth that the launch uses. The simulator counts the wavefronts
and bytes of a thread block (`accesses`). An idle multiprocessor leaves its share of the memory
bandwidth to others; only the busiest one's port limits them.

The model includes no L2 hits except for activations, and no lower clocks except under tensor load.
It ranks choices and names what bounds them. A measured table (`ptx_kernels.tuning`) overrules it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import formats
from ..devices import Device, tensor_busy
from .sass import SassInstruction, load_bits
from .timeline import CLUSTER_WAIT, Section, Warp

#: Shortest and longest time of a kernel on an H200, relative to its prediction, with the Configs
#: that rules and tables choose (gpu-nvidia-h200 results in benchmarks/results).
MEASURED = 0.6, 1.9

LAUNCH = 1.3e-6  # seconds: an empty kernel in a CUDA graph; each additional one took 0.5 on an H200
MEMORY_LATENCY = 0.8e-6  # seconds: a load from HBM at full bandwidth
IDLE_LATENCY = 0.5e-6  # seconds: a load from HBM with few others in flight
_LOAD_POWER = 4  # queues grow only near the full rate
L2_LATENCY = 0.3e-6  # seconds: a load of what the launch before left in the L2 cache
PEER_LATENCY = 0.1e-6  # seconds: a load from a peer's shared memory, 180 clocks (Luo et al., 2024)
CLUSTER_BARRIER = 0.2e-6  # seconds: an H200 took 0.18, an H100 0.41 to 0.50
PORT_BYTES = 64  # per clock, from L2 to a multiprocessor
ISSUE_LANES = 128  # lane-instructions per clock and multiprocessor: 4 schedulers, one warp each

#: Maximum instructions of a mat-vec's hot loop per byte of quants and lane, for (format, rows of
#: activations). Instructions cost energy, and time if the model is wrong. An H200 keeps up with its
#: memory below about 6.
INSTRUCTION_BUDGETS: dict[tuple[str, int], float] = {
    (name, m): most
    for name in formats.names()
    for m, most in formats.get(name).tuning.instruction_budgets.items()
}
FLOAT_INSTRUCTION_BUDGET = 8.0  # for Q4_K with f32 activations, one row

_SPECIAL_LANES = 16  # results per clock: MUFU, I2F, F2I, POPC, ...
_LOAD_STORE_LANES = 32  # addresses per clock
_LOAD_STORE_BYTES = 128  # per clock, for L1 and shared memory


#: Seconds that a warp waits, by the instruction's name.
_OF_CLUSTERS = {"LD": PEER_LATENCY, CLUSTER_WAIT: CLUSTER_BARRIER}


@dataclass(frozen=True)
class Unit:
    """A kind of execution unit and the opcodes (patterns of full names) that use it."""

    name: str
    opcodes: re.Pattern[str]


# An opcode may use two units: integer multiply-adds and dp4a run on one half of the float lanes.
_UNITS = tuple(
    Unit(name, re.compile(pattern))
    for name, pattern in (
        ("float", r"F(FMA|MUL|ADD)2?|HADD2|HMUL2|HFMA2|IMAD|IDP"),
        ("multiply", r"IMAD|IDP"),
        (
            "integer",
            r"LOP3|PLOP3|SHF|I?ADD3?|IADD3|VIADD\w*|ISETP|FSETP|SEL|FSEL|FMNMX3?|[IV]?I?MNMX3?|PRMT|LEA|MOV|BMSK|SGXT"
            r"|I2FP|F2FP|IABS|ISCADD",
        ),
        ("special", r"MUFU|I2F|I2I|F2I|F2F|FRND|POPC|FLO|BREV"),
        ("load/store", r"LDG|LD|STG|ST|LDS|STS|LDSM|STSM|SHFL|ATOM[GS]?|RED|LDGSTS|LDL|STL"),
        ("tensor", r"[HI]MMA"),
    )
)


def _lanes(unit: str, device: Device) -> float:
    return {
        "float": device.fp32_lanes,
        "multiply": 64,
        "integer": device.integer_lanes,
        "special": _SPECIAL_LANES,
    }[unit]


def mma_products(opcode: str) -> int:
    """Returns the multiply-adds of one warp-wide mma, such as `HMMA.16816.F32.BF16`.

    It is 16 * 8 * 16 for this opcode, 16 * 8 * 32 for `IMMA.16832.S8.S8`.
    """
    shape = re.search(r"\.(16|8)(8)(4|8|16|32|64)\b", opcode)
    if shape is None:
        raise ValueError(f"opcode={opcode!r} must name a shape such as 16816")
    return math.prod(int(size) for size in shape.groups())


def unit_clocks(code: Sequence[SassInstruction], device: Device) -> dict[str, float]:
    """Returns the clocks that one warp running `code` occupies each unit of a multiprocessor."""
    clocks = {"issue": 32 * sum(i.name != "NOP" for i in code) / ISSUE_LANES}
    for unit in _UNITS:
        busy = [i for i in code if unit.opcodes.fullmatch(i.name)]
        if unit.name == "tensor":
            rates = (
                (i, device.mma_int8_ops if i.name == "IMMA" else device.mma_float_ops) for i in busy
            )
            clocks[unit.name] = sum(2 * mma_products(i.opcode) / rate for i, rate in rates)
        elif unit.name == "load/store":
            clocks[unit.name] = sum(
                1
                if i.name == "SHFL"
                else max(32 / _LOAD_STORE_LANES, 4 * load_bits(i.opcode) / _LOAD_STORE_BYTES)
                for i in busy
            )
        else:
            clocks[unit.name] = 32 * len(busy) / _lanes(unit.name, device)
    return clocks


@dataclass(frozen=True)
class Launch:
    """Resources that one launch needs on a device: grid, code sections, and bytes to move.

    Attributes:
      blocks, warps: thread blocks of the grid, warps of a thread block.
      resident_blocks: thread blocks that fit on a multiprocessor at once.
      cluster: thread blocks of a cluster.
      unpacks: whether it multiplies packed weights.
      nbytes: minimum bytes of memory traffic.
      body: code that every warp runs: the hot loop and the code around and after it, or a full
        kernel without a loop.
      prologue: code that every warp runs before the body.
      cold: whether all loads come from memory, not only those of constants.
      wavefronts: wavefronts of a thread block in shared memory and L1.
      l2_bytes: bytes that a thread block reads and writes, each once; `memory_bytes`: the part that
        no cache holds: weights, pages, states.
      block_bytes_in_flight: maximum distinct bytes from memory that a thread block's loads have in
        flight.
      early_bytes: bytes of a thread block from memory that the prologue requests and the body uses.
      skipped: loads of the body that a warp passes without executing, with how often that happens.
      resident_bytes, coming_bytes: the parts of `nbytes` that earlier launches prefetched: in L2 at
        the start, and in flight.
      queued_bytes: bytes that memory delivers before any that this launch requests: prefetches for
        later launches.
    """

    blocks: int
    warps: int
    resident_blocks: int
    nbytes: int
    body: Section
    prologue: Section = Section(())
    cold: bool = False
    wavefronts: float = 0.0
    l2_bytes: float = 0.0
    memory_bytes: float = 0.0
    block_bytes_in_flight: float = 0.0
    early_bytes: float = 0.0
    skipped: Section = Section(())
    resident_bytes: float = 0.0
    coming_bytes: float = 0.0
    queued_bytes: float = 0.0
    cluster: int = 1
    unpacks: bool = False

    def busiest(self, device: Device) -> int:
        """Returns the thread blocks of the busiest multiprocessor."""
        return device.busiest(self.blocks, self.cluster, self.resident_blocks)

    @property
    def code(self) -> tuple[SassInstruction, ...]:
        """All instructions of `body`."""
        return tuple(i for part, _ in self.body.straight() for i in part)

    @property
    def tensor(self) -> bool:
        """Whether the body uses tensor cores."""
        return any(i.category == "mma" for i in self.code)

    def unit_clocks(self, device: Device) -> dict[str, float]:
        """Returns the clocks that a thread block occupies each unit of its multiprocessor."""
        clocks: defaultdict[str, float] = defaultdict(float)
        for code, turns in (*self.prologue.straight(), *self.body.straight()):
            for unit, busy in unit_clocks(code, device).items():
                clocks[unit] += self.warps * turns * busy
        for code, turns in self.skipped.straight():
            clocks["load/store"] -= self.warps * turns * unit_clocks(code, device)["load/store"]
        return clocks


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a launch: `seconds` in total, and the seconds of each bound alone.

    `bound` names the largest of the bounds.

    Attributes:
      bounds: seconds of `bandwidth`, `issue`, `l1`, `l2`, `latency`.
      prologue, first: seconds before any of the bounds begins.
      unit: the unit that limits `issue`: `issue` (slots), `integer`, `tensor`, ...
      bytes_in_flight: distinct bytes per multiprocessor that the hot loop's global loads or
        asynchronous copies have in flight.
    """

    bounds: dict[str, float]
    prologue: float
    first: float
    unit: str
    bytes_in_flight: int

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def seconds(self) -> float:
        return LAUNCH + self.prologue + self.first + max(self.bounds.values())


def clock(launch: Launch, device: Device) -> float:
    """Returns the clock rate in Hz, which is lower under tensor load."""
    return (device.tensor_clock_hz if launch.tensor else None) or device.clock_hz


def busy(launch: Launch, device: Device) -> float:
    """Returns the fraction of clocks in which the resident warps can keep a unit busy."""
    if not (launch.tensor and launch.unpacks):
        return 1.0
    resident = min(launch.resident_blocks, launch.busiest(device))
    return tensor_busy(resident * launch.warps)


def _latency(launch: Launch, load: SassInstruction, memory: float) -> float:
    """Returns the seconds from a load to its value, from memory or from the L2 cache.

    The L2 cache holds data of earlier launches: activations, and lengths, tables and ids, which
    every layer reads by narrow loads. Generic loads (LD) are from a cluster's peers. `load` can
    also be a cluster barrier.
    """
    if load.name in _OF_CLUSTERS:
        return _OF_CLUSTERS[load.name]
    wide = launch.cold and load_bits(load.opcode) > 32
    from_memory = wide or ".CONSTANT" in load.opcode or load.name == "LDGSTS"
    return memory if from_memory else L2_LATENCY


def way(launch: Launch, hertz: float, memory: float = MEMORY_LATENCY) -> tuple[float, float, float]:
    """Returns the seconds of one warp alone: (prologue, wait at the body's start, body).

    The wait lasts until all bytes have arrived that the prologue requested. A loop in the prologue
    loads its constants from memory once; then they are in L1. `memory`: latency after the prologue,
    while all thread blocks load at once.
    """

    def first(load: SassInstruction) -> float:
        return _latency(launch, load, MEMORY_LATENCY) * hertz

    def again(load: SassInstruction) -> float:
        return L2_LATENCY * hertz

    warp = Warp()
    for part in launch.prologue.parts:
        once = part if isinstance(part, Section) else Section((part,))
        warp.run(replace(once, turns=min(1.0, once.turns)), first)
        if once.turns > 1:
            warp.run(replace(once, turns=once.turns - 1), again)
    prologue, left = warp.now, warp.until_there()
    rest = warp.run(launch.body, lambda load: _latency(launch, load, memory) * hertz)
    return prologue / hertz, left / hertz, rest / hertz


def _rounds(launch: Launch, busiest: int, hertz: float, memory: float) -> float:
    """Returns the seconds of all rounds of thread blocks, each as long as one warp alone.

    The first round's prologue is not included.
    """
    prologue, _, rest = way(launch, hertz, memory)
    rounds = math.ceil(busiest / launch.resident_blocks)
    return rounds * rest + (rounds - 1) * prologue


def _under_load(seconds: Callable[[float], float], bandwidth: float) -> float:
    """Returns `seconds(latency)` at the memory latency that results from the load itself.

    `bandwidth`: seconds that the launch's memory traffic takes at full bandwidth.
    """
    low, high = IDLE_LATENCY, MEMORY_LATENCY
    for _ in range(6):  # to 5 ns
        memory = (low + high) / 2
        used = min(1.0, bandwidth / max(seconds(memory), 1e-12))
        asked = IDLE_LATENCY + (MEMORY_LATENCY - IDLE_LATENCY) * used**_LOAD_POWER
        low, high = (memory, high) if asked > memory else (low, memory)
    return seconds(high)


def predict(launch: Launch, device: Device) -> Prediction:
    """Predicts the time of one launch by the model in this module's docstring.

    Raises:
      ValueError: no thread block fits on a multiprocessor, or the grid is empty.
    """
    if launch.resident_blocks < 1 or launch.blocks < 1 or launch.warps < 1:
        raise ValueError(
            f"blocks={launch.blocks}, warps={launch.warps} and"
            f" resident_blocks={launch.resident_blocks} must be positive"
        )
    hertz = clock(launch, device)
    busiest = launch.busiest(device)
    worked = hertz * busy(launch, device)
    units = launch.unit_clocks(device)
    unit = max(units, key=lambda name: units[name])
    prologue, left, _ = way(launch, hertz)
    loads = [
        _latency(launch, i, MEMORY_LATENCY)
        for i in launch.code
        if i.name in ("LDG", "LD", "LDGSTS")
    ]
    first = max(loads, default=0.0)
    if launch.early_bytes:
        first = max(0.0, left)
    lead = LAUNCH + prologue + first
    there = launch.resident_bytes + min(launch.coming_bytes, lead * device.bandwidth)
    bandwidth = max(0.0, launch.nbytes - there) / device.bandwidth
    bandwidth += max(0.0, launch.queued_bytes / device.bandwidth - lead)
    part = min(1.0, there / launch.nbytes) if launch.nbytes else 0.0

    def rounds(memory: float) -> float:
        return _rounds(launch, busiest, hertz, part * L2_LATENCY + (1 - part) * memory)

    latency = _under_load(rounds, bandwidth)
    if launch.early_bytes:
        blocks = min(launch.blocks, launch.resident_blocks * device.multiprocessors)
        early = (1 - part) * blocks * launch.early_bytes / device.bandwidth
        bandwidth -= min(early, max(0.0, -left))
    return Prediction(
        bounds={
            "bandwidth": bandwidth,
            "issue": busiest * units[unit] / worked,
            "l1": busiest * launch.wavefronts / worked,
            "l2": max(
                launch.blocks * launch.l2_bytes / device.l2_bandwidth,
                busiest * launch.l2_bytes / (PORT_BYTES * hertz),
            ),
            "latency": max(0.0, latency - first),
        },
        prologue=prologue,
        first=first,
        unit=unit,
        bytes_in_flight=round(min(busiest, launch.resident_blocks) * launch.block_bytes_in_flight),
    )
