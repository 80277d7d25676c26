"""Time of a kernel predicted from its machine code, without a GPU.

The model, for one launch whose memory traffic, loop trips and grid are known:

    seconds = LAUNCH + prologue + first + max(bandwidth, issue, l1, l2, latency)

    prologue    one warp's way to its hot loop, by itself: norms, quantization
    first       the latency of the first bytes that it waits for there; of bytes that it asks for in
                the prologue, what of it is left then
    bandwidth   bytes that must move / what a copy reaches; not those of them that the prologue asks
                for and has time left to bring, nor those that launches before have asked for and
                that have come by then; where these asked for others', which come first, what of
                these is left then
    issue       clocks that the busiest kind of unit of the busiest multiprocessor needs for all
                instructions
    l1          clocks that its shared memory and L1 need, a wavefront each
    l2          bytes that blocks read and write, each block's once, / what the L2 cache reaches, or
                those of the busiest multiprocessor / what its port takes
    latency     rounds * one warp's way through its loop and what is around it, by itself
    rounds      how often a multiprocessor fills up with resident blocks until the grid is done

A warp by itself (`timeline`) issues every other clock and waits where it uses what it loads: what
lies between hides latency, also in the next turn of a loop, and so do stages of asynchronous
copies. At a cluster's barrier it waits for CLUSTER_BARRIER. Only other resident warps hide the
rest. A loop's loads take from IDLE_LATENCY to
MEMORY_LATENCY, by the share of the bandwidth that the launch then uses. Wavefronts and bytes of a
block are the simulator's counts (`accesses`). A multiprocessor with nothing to do leaves its share
of the memory to others: only the port of the busiest one limits them.

The model knows no hits in L2 beyond activations and no clocks that drop but under tensor load. It
ranks choices and names what binds them; a measured table (`ptx_kernels.tuning`) overrules it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import formats
from ..devices import Device
from .sass import SassInstruction, load_bits
from .timeline import CLUSTER_WAIT, Section, Warp

LAUNCH = 1.3e-6  # seconds: an empty kernel inside a CUDA graph; an H200 took 0.5 for a further one
MEMORY_LATENCY = 0.8e-6  # seconds: a load from HBM while as many as it serves are under way
IDLE_LATENCY = 0.5e-6  # seconds: a load from HBM while few others are
_LOAD_POWER = 4  # queues grow near the full rate only
L2_LATENCY = 0.3e-6  # seconds: a load of what the launch before has left in the L2 cache
PEER_LATENCY = 0.1e-6  # seconds: a load from a peer's shared memory, 180 clocks (Luo et al., 2024)
CLUSTER_BARRIER = 0.2e-6  # seconds: an H200 took 0.18, an H100 0.41 to 0.50
PORT_BYTES = 64  # per clock, from L2 into a multiprocessor
ISSUE_LANES = 128  # lane-instructions per clock and multiprocessor: four schedulers, a warp each

#: Most instructions of the hot loop per byte of quants and lane that a mat-vec of (format, rows of
#: activations) may take: instructions cost energy, and clocks where the model errs. An H200 keeps
#: up with its memory below about 6.
INSTRUCTION_BUDGETS: dict[tuple[str, int], float] = {
    (name, m): most
    for name in formats.names()
    for m, most in formats.get(name).tuning.instruction_budgets.items()
}
FLOAT_INSTRUCTION_BUDGET = 8.0  # of Q4_K with f32 activations, one row of them

_SPECIAL_LANES = 16  # results per clock: MUFU, I2F, F2I, POPC, ...
_LOAD_STORE_LANES = 32  # addresses per clock
_LOAD_STORE_BYTES = 128  # per clock, of L1 and shared memory


#: Seconds that a warp waits for, by the instruction's name.
_OF_CLUSTERS = {"LD": PEER_LATENCY, CLUSTER_WAIT: CLUSTER_BARRIER}


@dataclass(frozen=True)
class Unit:
    """A kind of execution unit and the opcodes (patterns of whole names) that keep it busy."""

    name: str
    opcodes: re.Pattern[str]


# An opcode may keep two units busy: integer multiply-adds and dp4a run on one half of the float
# lanes.
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
    """Multiply-adds of one warp's `HMMA.16816.F32.BF16` or `IMMA.16832.S8.S8`."""
    shape = re.search(r"\.(16|8)(8)(4|8|16|32|64)\b", opcode)
    if shape is None:
        raise ValueError(f"opcode={opcode!r} must name a shape such as 16816")
    return math.prod(int(size) for size in shape.groups())


def unit_clocks(code: Sequence[SassInstruction], device: Device) -> dict[str, float]:
    """Clocks that each kind of unit of a multiprocessor is busy when one warp runs `code` once."""
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
    """One launch's demands on a device.

    Attributes:
      blocks, warps: blocks of the grid, warps of a block.
      resident_blocks: blocks that fit on a multiprocessor at once.
      nbytes: bytes that must pass through memory at least.
      body: what every warp runs: the hot loop and what is around and behind it, or all of a kernel
        without a loop.
      prologue: what every warp runs before that.
      cold: whether all that it loads comes from memory, and not only its constants.
      wavefronts: of shared memory and L1, of a block.
      l2_bytes: that a block reads and writes, each once; `memory_bytes`: of these, what no cache
        holds: weights, pages, states.
      block_bytes_in_flight: different bytes from memory that a block's loads have outstanding at
        once, at most.
      early_bytes: of a block, from memory, that the prologue asks for and the body uses.
      skipped: loads of the body, as often as a warp passes them without executing them.
      resident_bytes, coming_bytes: of `nbytes`, those that launches before have asked for: in L2
        when it begins, and on their way.
      queued_bytes: that memory brings before any that this launch asks for: of later launches.
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

    @property
    def code(self) -> tuple[SassInstruction, ...]:
        """All instructions of `body`."""
        return tuple(i for part, _ in self.body.straight() for i in part)

    def unit_clocks(self, device: Device) -> dict[str, float]:
        """Clocks that a block keeps each kind of unit of its multiprocessor busy."""
        clocks: defaultdict[str, float] = defaultdict(float)
        for code, turns in (*self.prologue.straight(), *self.body.straight()):
            for unit, busy in unit_clocks(code, device).items():
                clocks[unit] += self.warps * turns * busy
        for code, turns in self.skipped.straight():
            clocks["load/store"] -= self.warps * turns * unit_clocks(code, device)["load/store"]
        return clocks


@dataclass(frozen=True)
class Prediction:
    """Seconds of each bound by itself; `seconds` is the launch's time, `bound` names the largest.

    Attributes:
      bounds: `bandwidth`, `issue`, `l1`, `l2`, `latency`.
      prologue, first: before any of them begins.
      unit: the kind of unit that `issue` is of: `issue` (slots), `integer`, `tensor`, ...
      bytes_in_flight: different bytes per multiprocessor, by the hot loop's global loads or
        asynchronous copies.
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
    """Clocks a second: fewer under tensor load."""
    tensor = any(i.category == "mma" for i in launch.code)
    return (device.tensor_clock_hz if tensor else None) or device.clock_hz


def _latency(launch: Launch, load: SassInstruction, memory: float) -> float:
    """Seconds until a load's value is there: from memory, or what launches before have left in L2.

    These are activations, and lengths, tables and ids, which every layer reads: narrow loads. Loads
    without a memory's name are of peers of a cluster, whose barrier has a latency as well.
    """
    if load.name in _OF_CLUSTERS:
        return _OF_CLUSTERS[load.name]
    wide = launch.cold and load_bits(load.opcode) > 32
    from_memory = wide or ".CONSTANT" in load.opcode or load.name == "LDGSTS"
    return memory if from_memory else L2_LATENCY


def way(launch: Launch, hertz: float, memory: float = MEMORY_LATENCY) -> tuple[float, float, float]:
    """Seconds of one warp by itself to its loop, and through it and what is around.

    Between the two, the time from there until all is there that it asked for on its way.

    A loop of the prologue brings its constants from memory once: then L1 has them. `memory`: the
    latency behind the prologue, in which all blocks ask at once.
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
    """Seconds of all rounds of blocks, one warp by itself in each, without the first prologue."""
    prologue, _, rest = way(launch, hertz, memory)
    rounds = math.ceil(busiest / launch.resident_blocks)
    return rounds * rest + (rounds - 1) * prologue


def _under_load(seconds: Callable[[float], float], bandwidth: float) -> float:
    """`seconds` of the latency that memory has when it is used for `bandwidth` of them."""
    low, high = IDLE_LATENCY, MEMORY_LATENCY
    for _ in range(6):  # to 5 ns
        memory = (low + high) / 2
        used = min(1.0, bandwidth / max(seconds(memory), 1e-12))
        asked = IDLE_LATENCY + (MEMORY_LATENCY - IDLE_LATENCY) * used**_LOAD_POWER
        low, high = (memory, high) if asked > memory else (low, memory)
    return seconds(high)


def predict(launch: Launch, device: Device) -> Prediction:
    """Predicts one launch by the model above.

    Raises:
      ValueError: no block fits on a multiprocessor, or the grid is empty.
    """
    if launch.resident_blocks < 1 or launch.blocks < 1 or launch.warps < 1:
        raise ValueError(
            f"blocks={launch.blocks}, warps={launch.warps} and"
            f" resident_blocks={launch.resident_blocks} must be positive"
        )
    hertz = clock(launch, device)
    busiest = math.ceil(launch.blocks / device.multiprocessors)
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
            "issue": busiest * units[unit] / hertz,
            "l1": busiest * launch.wavefronts / hertz,
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
