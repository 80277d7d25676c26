"""Event model of a launch's time: simulates each warp and the queues that it waits in.

It shares nothing with `ptx_kernels.machine_code.model` except the input counts (`Launch`: bytes,
instructions, wavefronts, turns), and the measured fraction of clocks in which units work in kernels
with tensor cores. Blocks are assigned to multiprocessors and follow each other
there. Each warp executes its prologue, the turns of its loop, and the code after it. In a turn it
requests the turn's bytes, computes, waits for the bytes it needs, and computes on:

    memory, L2    one queue each for the device, first come, first served
    port          one per multiprocessor, from L2
    pipes, L1     one each per multiprocessor: clocks of its busiest unit; wavefronts
    barriers      a block's warps wait for each other if the loop around the turns has one

The constants below are assumptions that are not calibrated on hardware. `Assumptions` has those
that decide how long whole programs take, and `UNCERTAIN` how far each may be off. `FAST` and `SLOW`
take all of them at their better and at their worse end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ptx_kernels.devices import Device
from ptx_kernels.machine_code.model import Launch, busy, unit_clocks
from ptx_kernels.machine_code.sass import (
    SassInstruction,
    filled,
    instructions_to_use,
    registers,
)
from ptx_kernels.machine_code.timeline import CLUSTER_WAIT, Section

LAUNCH = 1.3e-6  # seconds: a node of a CUDA graph
MEMORY_RATE = 4.2 / 4.3  # fraction of a copy's bandwidth
MEMORY_LATENCY = 0.5e-6  # seconds, of idle memory
L2_LATENCY = 0.25e-6
PEER_LATENCY = 0.1e-6  # shared memory of other blocks in the cluster
CLUSTER_BARRIER = 0.25e-6
CLOCK_RATE = 1.83 / 1.98  # fraction of the boost clock
PORT_BYTES = 64  # per clock, to a multiprocessor
ALONE = 2.0  # clocks between two instructions of a warp
_MOST_BLOCKS = 4  # per multiprocessor; with more, a part represents the device
_PART = 4


@dataclass(frozen=True)
class Assumptions:
    """Properties of a GPU that decide how long programs take.

    Attributes:
      launch: seconds of a node of a CUDA graph.
      memory_rate, l2_rate: fractions of the device's `bandwidth` and `l2_bandwidth`.
      memory_latency: seconds, of idle memory.
      clock_rate: fraction of the boost clock, for kernels without tensor cores.
      dp4a_clocks: clocks of integer products, as a multiple of the cost model's.
      busy: fraction of the clocks in which pipes and L1 work in kernels with tensor cores, as a
        multiple of the cost model's (`ptx_kernels.devices.tensor_busy`).
      prefetched: fraction of prefetched bytes that are in L2 when they are read.
      dot_rate: fraction of `dot_float_ops` at which cuBLAS multiplies.
    """

    launch: float = LAUNCH
    memory_rate: float = MEMORY_RATE
    l2_rate: float = 1.0
    memory_latency: float = MEMORY_LATENCY
    clock_rate: float = CLOCK_RATE
    dp4a_clocks: float = 1.0
    busy: float = 1.0
    prefetched: float = 1.0
    dot_rate: float = 1.0


@dataclass(frozen=True)
class Uncertain:
    """Better and worse end of a field of `Assumptions`, for an H200, and what they follow from."""

    name: str
    fast: float
    slow: float
    reason: str


UNCERTAIN = (
    Uncertain(
        "launch", 0.5e-6, 2.0e-6, "empty nodes took 0.5 us; cold code, changed shared memory: more"
    ),
    Uncertain("memory_rate", 4.45 / 4.3, 4.1 / 4.3, "large mat-vecs reached 4.28 to 4.33 TB/s"),
    Uncertain("l2_rate", 1.0, 4.5 / 5.5, "lines in the farther partition may come more slowly"),
    Uncertain("memory_latency", 0.5e-6, 0.8e-6, "idle memory; memory under load"),
    Uncertain("clock_rate", 1.0, 1.7 / 1.98, "boost clock; clock under tensor load"),
    Uncertain("dp4a_clocks", 1.0, 2.0, "64 results per clock, or half of that"),
    Uncertain("busy", 1.3, 0.5, "single kernels took 0.7 to 1.2 times as long, split products 2"),
    Uncertain("prefetched", 1.0, 0.0, "two products in a row gained 0.5 us, on an H200"),
    Uncertain(
        "dot_rate", 766 / 700, 600 / 700, "cuBLAS reached 766 TFLOP/s; less when clocks drop"
    ),
)
BASE = Assumptions()
FAST = Assumptions(**{each.name: each.fast for each in UNCERTAIN})
SLOW = Assumptions(**{each.name: each.slow for each in UNCERTAIN})


@dataclass(frozen=True)
class Turn:
    """Work of a warp between two requests for bytes.

    Attributes:
      alone: clocks until its last instruction, without other warps.
      overlap: the part of these before it needs the bytes requested in this turn.
      pipes, wavefronts: clocks of the multiprocessor that it takes from other warps.
      memory_bytes, l2_bytes: bytes that it requests; the former also pass through L2.
      ahead: turns between a request and the use of its bytes: stages of copies.
      barrier: turns between barriers of the block's warps; 0: none.
    """

    alone: float
    overlap: float
    pipes: float
    wavefronts: float
    memory_bytes: float
    l2_bytes: float
    ahead: int
    barrier: int


@dataclass(frozen=True)
class Program:
    """Work of one warp, and the number of warps.

    Attributes:
      waits: seconds of its prologue's loads.
      early: whether it requests its first turn's bytes before these.
      behind: seconds at its end for a cluster's barriers, and for loads from its peers.
    """

    blocks: int
    warps: int
    resident: int
    waits: float
    early: bool
    prologue: Turn
    turn: Turn
    turns: int
    end: Turn
    behind: float


class Queue:
    """Serves requests in order at a fixed rate."""

    def __init__(self, rate: float, busy: float = 0.0) -> None:
        """Creates a queue that serves earlier requests for another `busy` seconds."""
        self._rate, self._free = rate, busy

    def serve(self, now: float, amount: float) -> float:
        """Returns the time at which a request that arrives now is served."""
        self._free = max(self._free, now) + amount / self._rate
        return self._free


@dataclass
class _Multiprocessor:
    port: Queue
    pipes: Queue
    l1: Queue


@dataclass
class _Block:
    home: _Multiprocessor
    running: int
    waiting: list[_Warp] = field(default_factory=list)  # at a barrier
    last: float = 0.0  # arrival of the last of these


@dataclass
class _Warp:
    block: _Block
    turn: int = -1  # -1: the prologue
    half: bool = False  # whether the bytes it needs have arrived
    arrivals: list[float] = field(default_factory=list)  # arrival time of each turn's bytes


def seconds(launch: Launch, device: Device, assumed: Assumptions = BASE) -> float:
    """Returns a launch's time in seconds on a device."""
    hertz = (device.tensor_clock_hz if launch.tensor else None) or (
        assumed.clock_rate * device.clock_hz
    )
    program = _program(launch, device, assumed)
    multiprocessors = device.multiprocessors
    part = 1 if program.blocks <= _MOST_BLOCKS * multiprocessors else _PART
    run = _Run(
        replace(program, blocks=math.ceil(program.blocks / part)),
        device.places(launch.cluster, launch.resident_blocks) // launch.resident_blocks // part,
        memory=Queue(assumed.memory_rate * device.bandwidth / part, _busy(launch, device, assumed)),
        l2=Queue(assumed.l2_rate * device.l2_bandwidth / part),
        hertz=hertz,
        served=hertz * min(1.0, busy(launch, device) * (assumed.busy if launch.tensor else 1.0)),
        latency=assumed.memory_latency,
    )
    return assumed.launch + run.finish()


class _Run:
    """One launch.

    hertz: clock of the multiprocessors; served: clocks per second in which pipes and L1 work.
    latency: seconds, of idle memory.
    """

    def __init__(
        self,
        program: Program,
        multiprocessors: int,
        *,
        memory: Queue,
        l2: Queue,
        hertz: float,
        served: float,
        latency: float,
    ) -> None:
        self._program, self._memory, self._l2, self._hertz = program, memory, l2, hertz
        self._latency = latency
        self._left = program.blocks
        self._events: list[tuple[float, int, _Warp]] = []
        self._count = 0
        homes = [
            _Multiprocessor(Queue(PORT_BYTES * hertz), Queue(served), Queue(served))
            for _ in range(min(multiprocessors, program.blocks))
        ]
        for _ in range(program.resident):
            for home in homes:
                self._begin(home, 0.0)

    def finish(self) -> float:
        """Returns the time at which the last warp is done."""
        now = 0.0
        while self._events:
            now, _, warp = heapq.heappop(self._events)
            self._go_on(warp, now)
        return now

    def _begin(self, home: _Multiprocessor, now: float) -> None:
        if not self._left:
            return
        self._left -= 1
        block = _Block(home, self._program.warps)
        for _ in range(self._program.warps):
            warp = _Warp(block)
            if self._program.early:
                warp.arrivals.append(self._ask(warp, self._program.turn, now))
            # the prologue's own waits come first
            asked = self._ask(warp, self._program.prologue, now)
            self._at(max(asked, now + self._program.waits), warp)

    def _at(self, time: float, warp: _Warp) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, warp))

    def _ask(self, warp: _Warp, turn: Turn, now: float) -> float:
        """Returns the time at which a turn's bytes have arrived."""
        arrival = now
        if turn.memory_bytes:
            arrival = self._memory.serve(now, turn.memory_bytes) + self._latency
        if passing := turn.l2_bytes + turn.memory_bytes:
            through = max(self._l2.serve(now, passing), warp.block.home.port.serve(now, passing))
            arrival = max(arrival, through + L2_LATENCY)
        return arrival

    def _compute(self, warp: _Warp, turn: Turn, share: float, now: float) -> float:
        """Returns the time at which `share` of a turn's instructions have executed."""
        home = warp.block.home
        return max(
            now + share * turn.alone / self._hertz,
            home.pipes.serve(now, share * turn.pipes),
            home.l1.serve(now, share * turn.wavefronts),
        )

    def _go_on(self, warp: _Warp, now: float) -> None:
        program = self._program
        if warp.turn < 0:  # the prologue's bytes have arrived
            warp.turn = 0
            for _ in range(program.turn.ahead):
                warp.arrivals.append(self._ask(warp, program.turn, now))
            self._at(self._compute(warp, program.prologue, 1.0, now), warp)
        elif warp.turn < program.turns:
            self._in_turn(warp, program.turn, now)
        elif warp.turn == program.turns:
            warp.turn += 1
            self._at(self._compute(warp, program.end, 1.0, now) + program.behind, warp)
        else:
            warp.block.running -= 1
            if not warp.block.running:
                self._begin(warp.block.home, now)

    def _in_turn(self, warp: _Warp, turn: Turn, now: float) -> None:
        """Executes half a turn: up to the wait, or after it; copies start where the wait ends."""
        share = turn.overlap / turn.alone if turn.alone else 0.0
        asks = warp.turn + turn.ahead < self._program.turns and warp.half == bool(turn.ahead)
        if asks and len(warp.arrivals) <= warp.turn + turn.ahead:
            warp.arrivals.append(self._ask(warp, turn, now))
        if not warp.half:
            warp.half = True
            done = self._compute(warp, turn, share, now)
            self._at(max(done, warp.arrivals[warp.turn]), warp)
            return
        warp.half = False
        warp.turn += 1
        done = self._compute(warp, turn, 1.0 - share, now)
        if turn.barrier and warp.turn % turn.barrier == 0:
            self._meet(warp, done)
        else:
            self._at(done, warp)

    def _meet(self, warp: _Warp, done: float) -> None:
        """Waits at a barrier, which all of a block's warps leave when the last one arrives."""
        block = warp.block
        block.waiting.append(warp)
        block.last = max(block.last, done)
        if len(block.waiting) == self._program.warps:
            for each in block.waiting:
                self._at(block.last, each)
            block.waiting = []


def _program(launch: Launch, device: Device, assumed: Assumptions) -> Program:
    """Converts a launch's counts to the work of one warp."""
    loop, outer = _loop(launch.body)
    turns = max(1, round(loop.turns * outer.turns))
    inner, outside, once = _flat(loop), _flat(outer, but=loop), _flat(launch.body, but=outer)
    per_turn = outer.turns / turns  # of the code around the loop, in each turn
    code = [(inner, loop.turns * outer.turns / turns), (outside, per_turn)]
    warps = launch.blocks * launch.warps
    ahead_of_time = min(1.0, (launch.resident_bytes + launch.coming_bytes) / max(launch.nbytes, 1))
    from_memory = _memory_bytes(launch) / warps
    other = max(0.0, launch.l2_bytes / launch.warps - from_memory)
    found, from_memory = ahead_of_time * from_memory, (1 - ahead_of_time) * from_memory
    staged = bool(launch.prologue.parts and any(_waits(_flat(launch.prologue), assumed)))
    ahead, copies = _ahead((*outside, *inner))
    issued = sum(turns * n for n, turns in _counted(launch))
    a_wavefront = launch.wavefronts / launch.warps / max(issued, 1)  # for each instruction

    def made(parts: list[tuple[tuple[SassInstruction, ...], float]], **what: float) -> Turn:
        count = sum(times * len(each) for each, times in parts)
        units: dict[str, float] = {}
        for each, times in parts:
            for unit, clocks in unit_clocks(each, device).items():
                slower = assumed.dp4a_clocks if unit == "multiply" else 1.0
                units[unit] = units.get(unit, 0.0) + times * slower * clocks
        return Turn(
            alone=ALONE * count,
            overlap=ALONE * what.get("overlap", 0.0),
            pipes=max(units.values(), default=0.0),
            wavefronts=a_wavefront * count,
            memory_bytes=what.get("memory", 0.0),
            l2_bytes=what.get("l2", 0.0),
            ahead=ahead,
            barrier=round(what.get("barrier", 0.0)),
        )

    prologue = [(part, times) for part, times in launch.prologue.straight()]
    l2_turns = (found if staged else found + other) / turns
    overlap = 0.0 if copies else _overlap(inner, launch.cold)
    barrier = round(1 / per_turn) if any(i.name == "BAR" for i in outside) else 0
    return Program(
        launch.blocks,
        launch.warps,
        launch.resident_blocks,
        sum(_waits(_flat(launch.prologue), assumed)),
        launch.early_bytes > 0,
        made(prologue, l2=other if staged else 0.0),
        made(code, memory=from_memory / turns, l2=l2_turns, overlap=overlap, barrier=barrier),
        turns,
        made([(once, 1.0)]),
        CLUSTER_BARRIER * sum(i.name == CLUSTER_WAIT for i in once)
        + sum(_waits(tuple(i for i in once if not i.name.startswith("LDG")), assumed)),
    )


def _busy(launch: Launch, device: Device, assumed: Assumptions) -> float:
    """Returns the seconds from the launch on for which memory delivers earlier prefetches."""
    asked = launch.coming_bytes + launch.queued_bytes
    return max(0.0, asked / (assumed.memory_rate * device.bandwidth) - assumed.launch)


def _loop(body: Section) -> tuple[Section, Section]:
    """Returns the innermost loop of a body and the section around it, or the body twice."""
    outer = next((p for p in body.parts if isinstance(p, Section)), body)
    return next((p for p in outer.parts if isinstance(p, Section)), outer), outer


def _flat(section: Section, but: Section | None = None) -> tuple[SassInstruction, ...]:
    """Returns a section's instructions without those of a nested one and without NOPs."""
    if section is but:
        return ()
    found: list[SassInstruction] = []
    for part in section.parts:
        found += _flat(part, but) if isinstance(part, Section) else part
    return tuple(i for i in found if i.name != "NOP")


def _counted(launch: Launch) -> Iterable[tuple[int, float]]:
    """Yields the length and repetitions of a warp's straight code."""
    for section in (launch.prologue, launch.body):
        for part, times in section.straight():
            yield len(part), times


def _memory_bytes(launch: Launch) -> float:
    """Returns the bytes of all blocks through memory; shared bytes count once."""
    return min(launch.nbytes, launch.blocks * launch.memory_bytes)


def _waits(code: tuple[SassInstruction, ...], assumed: Assumptions) -> list[float]:
    """Returns the seconds of each wait for a load, in order.

    A use ends all waits started before.
    """
    waits, under_way = [], dict[int, float]()
    for i in code:
        if hit := registers(i.operands) & under_way.keys():
            waits.append(max(under_way[r] for r in hit))
            under_way.clear()
        if i.category.startswith("load global"):
            latency = assumed.memory_latency if ".CONSTANT" in i.opcode else L2_LATENCY
            latency = PEER_LATENCY if i.name == "LD" else latency
            under_way.update((r, latency) for r in filled(i))
    return waits


def _ahead(code: tuple[SassInstruction, ...]) -> tuple[int, bool]:
    """Returns the turns by which asynchronous copies are in advance, and whether there are any."""
    if not any(i.name == "LDGSTS" for i in code):
        return 0, False
    pending = [int(i.operands.split(",")[-1], 0) for i in code if i.opcode == "DEPBAR.LE"]
    return max(pending, default=0) + 1, True


def _overlap(code: tuple[SassInstruction, ...], cold: bool) -> float:
    """Returns the fewest instructions from a load from memory to its first use in the loop."""
    distance = instructions_to_use(code, lambda load: cold or ".CONSTANT" in load.opcode)
    return 0.0 if distance in (None, len(code)) else float(distance or 0)
