"""Time of a kernel predicted from its machine code, without a GPU.

The model, for one launch whose memory traffic, loop trips and grid are known:

    seconds = LAUNCH + MEMORY_LATENCY + max(bandwidth * tail, issue * tail, latency)

    bandwidth   bytes that must move / what a copy reaches
    issue       clocks that the busiest kind of unit needs for all instructions
                / (multiprocessors * clock)
    latency     rounds * trips per warp
                * (loads / loads in flight * MEMORY_LATENCY + instructions * CLOCKS_ALONE)
    tail        blocks of the busiest multiprocessor / blocks of the average one
    rounds      how often a multiprocessor fills up with resident blocks until the grid is done

`latency` is Little's law seen from one warp: it waits for its loads, then computes, and only the
other resident warps hide that. The model knows no caches, bank conflicts or clocks that drop under
load: it ranks choices and names what binds them; a measured table (`ptx_kernels.tuning`) overrules
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .. import formats
from ..devices import Device
from .sass import Outstanding, SassInstruction, load_bits

LAUNCH = 1.3e-6  # seconds: an empty kernel inside a CUDA graph, measured on an H200
MEMORY_LATENCY = 0.8e-6  # seconds: a load from HBM while many others are under way
#: Clocks per instruction of a warp by itself: results after 4 to 5 clocks, about two chains.
CLOCKS_ALONE = 2.0
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
      loop: the hot loop's instructions, or all of a kernel without a loop.
      trips: through `loop`, of all warps together.
      in_flight: most global loads of `loop` outstanding at once per lane.
      once: instructions that every warp executes once, around the loop.
    """

    blocks: int
    warps: int
    resident_blocks: int
    nbytes: int
    loop: tuple[SassInstruction, ...]
    trips: float
    in_flight: Outstanding
    once: int = 0


@dataclass(frozen=True)
class Prediction:
    """Seconds of each bound by itself; `seconds` is the launch's time, `bound` names the largest.

    Attributes:
      tail: blocks of the busiest multiprocessor over the average.
      unit: the kind of unit that `issue` is of: `issue` (slots), `integer`, `load/store`, ...
      bytes_in_flight: per multiprocessor, by the hot loop's global loads.
    """

    bandwidth: float
    issue: float
    latency: float
    tail: float
    unit: str
    bytes_in_flight: int

    @property
    def bounds(self) -> dict[str, float]:
        return {
            "bandwidth": self.bandwidth * self.tail,
            "issue": self.issue * self.tail,
            "latency": self.latency,
        }

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def seconds(self) -> float:
        return LAUNCH + MEMORY_LATENCY + max(self.bounds.values())


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
    all_warps = launch.blocks * launch.warps
    busiest = math.ceil(launch.blocks / device.multiprocessors)
    clocks = unit_clocks(launch.loop, device)
    unit = max(clocks, key=lambda name: clocks[name])
    around = 32 * launch.once * all_warps / ISSUE_LANES
    issue = (launch.trips * clocks[unit] + around) / (device.multiprocessors * device.clock_hz)

    loads = sum(i.name in ("LDG", "LD") for i in launch.loop)
    waits = loads / max(launch.in_flight.loads, 1)
    alone = CLOCKS_ALONE / device.clock_hz
    trip = waits * MEMORY_LATENCY + len(launch.loop) * alone
    rounds = math.ceil(busiest / launch.resident_blocks)
    resident = min(busiest, launch.resident_blocks) * launch.warps
    return Prediction(
        bandwidth=launch.nbytes / device.bandwidth,
        issue=issue,
        latency=rounds * (launch.trips / all_warps * trip + launch.once * alone),
        tail=busiest * device.multiprocessors / launch.blocks,
        unit=unit,
        bytes_in_flight=resident * 32 * launch.in_flight.nbytes,
    )
