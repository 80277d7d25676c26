"""`python -m ptx_kernels simulate`: runs a kernel on random operands, every access checked.

Perturbed runs make random choices where the hardware's behavior is not specified.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from . import simulator
from .kernels.operands import random_operands
from .ptx import Buffer, Kernel
from .ptx.instructions import bf16_to_f32
from .simulator.errors import source_of
from .simulator.traffic import Count, total, worst


@dataclass(frozen=True)
class Result:
    """Check of one result array of a simulated kernel.

    Attributes:
      finite: fraction of finite values; 1 for integers.
      deviation: largest NMSE of a perturbed run against the plain one, 0 for equal bits; NaN if
        only one of the two has a NaN at some place.
    """

    buffer: Buffer
    finite: float
    deviation: float


@dataclass(frozen=True)
class Simulation:
    kernel: Kernel
    statistics: simulator.Statistics
    seconds: float
    seeds: int
    results: tuple[Result, ...]
    traffic: simulator.Traffic

    def __str__(self) -> str:
        k, s = self.kernel, self.statistics
        rate = s.lane_instructions / self.seconds / 1e6
        lines = [
            f"{k.name}: grid {k.grid}, {k.block[0]} threads a block",
            f"{s.lane_instructions:,} lane-instructions in {self.seconds * 1e3:.1f} ms"
            f" ({rate:.0f} million a second)",
        ]
        for result in self.results:
            shape = "x".join(map(str, result.buffer.shape))
            line = f"{result.buffer.name} {result.buffer.type} {shape}: {result.finite:.2%} finite"
            if self.seeds:
                how = (
                    "the same bits"
                    if result.deviation == 0
                    else f"NMSE {result.deviation:.1e} at most"
                )
                line += f"; {how} under {self.seeds} seeds"
            lines.append(line)
        for memory, unit, counts in (
            ("shared", "wavefronts", self.traffic.shared),
            ("global", "sectors", self.traffic.global_),
        ):
            if counts:
                lines.append(f"{memory} memory: {self._excess(counts, unit)}")
        return "\n".join(lines)

    def _excess(self, counts: dict[int, Count], unit: str) -> str:
        every = total(counts)
        text = f"{every.moved:,} {unit}, {every.excess:.2f} times the least"
        found = worst(counts)
        if found is None:
            return text
        line, count = found
        source = source_of(self.kernel.lines, line)
        return f"{text}; most beyond it at {source}: {count.moved:,}, {count.excess:.2f} times"


def _values(buffer: Buffer, array: np.ndarray) -> np.ndarray:
    return (bf16_to_f32(array) if buffer.type.name == "bf16" else array).astype(np.float64)


def deviation(buffer: Buffer, plain: np.ndarray, other: np.ndarray) -> float:
    """Returns the NMSE of result `other` against result `plain`; 0 for equal bits.

    It is NaN if only one of the two is finite at some place.
    """
    if plain.tobytes() == other.tobytes():
        return 0.0
    want, got = _values(buffer, plain), _values(buffer, other)
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("nan")
    return float(np.sum((got - want)[finite] ** 2) / np.sum(want[finite] ** 2))


def simulate(kernel: Kernel, seeds: int = 0, operands_seed: int = 0) -> Simulation:
    """Simulates the kernel on random operands, plain and then under `seeds` perturbations.

    Raises the simulator's SimulationError.
    """
    operands = random_operands(kernel, operands_seed)
    start = time.perf_counter()
    plain, statistics = simulator.run_counted(kernel, *operands)
    seconds = time.perf_counter() - start
    traffic = simulator.Traffic()
    simulator.run_counted(kernel, *operands, traffic=traffic)
    deviations = [0.0] * len(plain)
    for seed in range(seeds):
        with simulator.perturbation(seed):
            perturbed = simulator.run(kernel, *operands)
        found = zip(kernel.results, plain, perturbed, strict=True)
        deviations = [
            float(np.maximum(d, deviation(*f))) for d, f in zip(deviations, found, strict=True)
        ]
    results = tuple(
        Result(buffer, float(np.isfinite(_values(buffer, array)).mean()), deviation)
        for buffer, array, deviation in zip(kernel.results, plain, deviations, strict=True)
    )
    return Simulation(kernel, statistics, seconds, seeds, results, traffic)
