"""Predicts the time of decode steps and prompts for an H200 by two models; nothing is measured.

python -m tools.step_times [--shapes SHAPE ...] [--out FILE]

Our kernels have the times of the cost model (`ptx_kernels.machine_code.model`) and of an event
model (`tools.event_model`) that shares no formula with it. XLA's launches have the same time in
both: a launch, a wait, and the larger of their bytes' time and, for products, that of their
multiply-adds. float32 products run at the rate of the multiprocessors' lanes. float16 products,
which are cuBLAS's, run at `dot_float_ops` of the device, 700 TFLOP/s
(`ptx_kernels.kernels.gemm.dot_seconds`), which is a prediction, too.
`tools.step_ranges` shows how uncertain these times are.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from ptx_kernels.devices import REFERENCE
from ptx_kernels.kernels.gemm import dot_seconds
from ptx_kernels.machine_code import report
from ptx_kernels.machine_code.model import LAUNCH, MEMORY_LATENCY, Launch, predict
from ptx_kernels.machine_code.report import plain_table
from ptx_kernels.machine_code.work import traffic
from ptx_kernels.ptx import Kernel

from . import aot, event_model
from .event_model import BASE, Assumptions
from .prefetched import Found, Prefetched
from .program_kernels import (
    BATCHES,
    PIECES,
    PROMPTS,
    SHAPES,
    Asked,
    ProgramKernels,
    label,
    program_kernels,
)
from .results import write_results
from .thunks import Array, Instruction, parse_hlo

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "step_times.json"
AGREE = 0.15  # maximum difference of the event model, as a fraction of the cost model's time
_FLOAT_RATE = 2 * REFERENCE.fp32_lanes * REFERENCE.multiprocessors * REFERENCE.clock_hz
_BITS = re.compile(r"(\d+)")
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_CUBLAS = "__cublas"  # prefix of its products' targets
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["([\d",]*)"\]')
_DOT = re.compile(
    r"%?[\w.-]+ = (\w+\[[\d,]*\]).* dot\(%?([\w.-]+),.*lhs_contracting_dims=\{([\d,]*)\}"
)


@dataclass(frozen=True)
class KernelTime:
    """One of our kernels in a program, with average seconds per launch by each model."""

    name: str
    grid: tuple[int, int, int]
    count: int
    bound: str
    seconds: float
    event_seconds: float


@dataclass(frozen=True)
class StepTime:
    """A program, with seconds of all its launches by each model, and of XLA's (`xla`) in both.

    `tokens_per_second` counts generated tokens (a decode step) or processed ones (a prompt).
    `before`: tokens in the cache before the prompt.
    """

    shape: str
    batch: int
    prompt: int
    before: int
    launches: int
    seconds: float
    event_seconds: float
    xla_seconds: float
    tokens_per_second: float
    event_tokens_per_second: float
    kernels: tuple[KernelTime, ...]

    @property
    def asked(self) -> Asked:
        """Program that was predicted."""
        return Asked(self.shape, self.batch, self.prompt, before=self.before)

    @property
    def apart(self) -> float:
        """Relative difference of the event model from the cost model."""
        return self.event_seconds / self.seconds - 1


def step_time(asked: Asked) -> StepTime:
    """Predicts one program: its launches in order, with the bytes that earlier ones prefetched."""
    found = program_kernels(asked)
    by_cost = Prefetched(REFERENCE.bandwidth)
    by_events = _account(BASE)
    kernels: dict[Kernel, list[tuple[int, str, float, float]]] = defaultdict(list)
    of_xla, xla = iter(xla_launches(found)), 0.0
    for launch, times in found.sequence:
        if not isinstance(launch, Kernel):
            seconds = next(of_xla)
            by_cost.pass_time(seconds)
            by_events.pass_time(seconds)
            xla += times * seconds
            continue
        _, bound, seconds = _in_turn(by_cost, launch, _by_cost)
        event_seconds = _in_turn(by_events, launch, _ByEvents(BASE))[2]
        kernels[launch].append((times, bound, seconds, event_seconds))
    rows = tuple(_kernel_time(kernel, runs) for kernel, runs in kernels.items())
    seconds = xla + sum(k.count * k.seconds for k in rows)
    event_seconds = xla + sum(k.count * k.event_seconds for k in rows)
    return StepTime(
        asked.shape,
        asked.batch,
        asked.prompt,
        asked.before,
        found.launches,
        seconds,
        event_seconds,
        xla,
        asked.tokens / seconds,
        asked.tokens / event_seconds,
        tuple(row for row in rows if row.count),
    )


def assumed_seconds(found: ProgramKernels, assumed: Assumptions) -> float:
    """Predicts a program's seconds by the event model under other assumptions."""
    account, of_xla, total = _account(assumed), iter(xla_launches(found, assumed)), 0.0
    for launch, times in found.sequence:
        if isinstance(launch, Kernel):
            seconds = _in_turn(account, launch, _ByEvents(assumed))[2]
        else:
            seconds = next(of_xla)
            account.pass_time(seconds)
        total += times * seconds
    return total


def _account(assumed: Assumptions) -> Prefetched:
    return Prefetched(assumed.memory_rate * REFERENCE.bandwidth, assumed.prefetched)


def _kernel_time(kernel: Kernel, runs: list[tuple[int, str, float, float]]) -> KernelTime:
    """Averages a kernel's launches, which differ in prefetched bytes."""
    count = sum(times for times, *_ in runs)
    seconds = sum(times * each for times, _, each, _ in runs) / max(count, 1)
    event_seconds = sum(times * each for times, _, _, each in runs) / max(count, 1)
    return KernelTime(label(kernel), kernel.grid, count, runs[-1][1], seconds, event_seconds)


_Predicted = tuple[float, str, float]  # bytes that the launch moves, its bound, seconds


#: Model of a launch: returns its bound and its seconds.
_Model = Callable[[Launch], tuple[str, float]]


def _in_turn(account: Prefetched, kernel: Kernel, model: _Model) -> _Predicted:
    """Predicts a launch by a model, and updates the prefetch account."""
    predicted = _predicted(kernel, account.begin(kernel), model)
    nbytes, _, seconds = predicted
    account.pass_time(seconds, nbytes)
    account.end(kernel)
    return predicted


def _by_cost(asked: Launch) -> tuple[str, float]:
    predicted = predict(asked, REFERENCE)
    return predicted.bound, predicted.seconds


@dataclass(frozen=True)
class _ByEvents:
    assumed: Assumptions

    def __call__(self, asked: Launch) -> tuple[str, float]:
        return "", event_model.seconds(asked, REFERENCE, self.assumed)


@functools.lru_cache(maxsize=8192)
def _predicted(kernel: Kernel, found: Found, model: _Model) -> _Predicted:
    """Predicts a launch by a model; if its trips are unknown, by a wait and its bytes."""
    asked = _launch(kernel)
    if asked is None:
        nbytes = traffic(kernel)
        return nbytes, "bandwidth", LAUNCH + MEMORY_LATENCY + nbytes / REFERENCE.bandwidth
    return asked.nbytes - found.resident, *model(found.by(asked))


@functools.lru_cache(maxsize=1024)
def _launch(kernel: Kernel) -> Launch | None:
    return report.launch(kernel, report.code(kernel, REFERENCE.arch))


def xla_launches(found: ProgramKernels, assumed: Assumptions = BASE) -> list[float]:
    """Returns the seconds of each of XLA's launches, in order.

    They follow from bytes of operands and results, and multiply-adds of products.
    """
    instructions, products = parse_hlo(found.hlo), _multiply_adds(found.hlo)
    lines = {
        name: line
        for line in found.hlo.splitlines()
        if (name := line.strip().removeprefix("ROOT ").lstrip("%").partition(" = ")[0])
    }
    seconds = []
    for launch in (each for each, _ in found.sequence if not isinstance(each, Kernel)):
        busy = 0.0
        if launch.instruction is not None:
            line = lines.get(launch.instruction.name, "")
            nbytes = _bytes(launch.instruction, line, instructions)
            called = _CALLS.search(line)
            adds = products[called[1]] if called else 0
            busy = max(nbytes / REFERENCE.bandwidth, 2 * adds / _FLOAT_RATE)
            if (launch.instruction.target or "").startswith(_CUBLAS):
                product = _cublas_seconds(launch.instruction, line, instructions)
                busy = max(busy, product / assumed.dot_rate)
        seconds.append(assumed.launch + MEMORY_LATENCY + busy)
    return seconds


def _cublas_seconds(
    instruction: Instruction, line: str, instructions: dict[str, Instruction]
) -> float:
    """Returns the seconds of a cuBLAS product of 16-bit or float32 matrices.

    Raises:
      ValueError: the line does not name the contracted axes.
    """
    operands = _operands(instruction, line)
    contracted = _CONTRACTED.search(line)
    if contracted is None:
        raise ValueError(f"cannot read the product {line.strip()[:200]!r}")
    left = instructions[operands[0]].results[0]
    summed = math.prod(left.dims[int(axis.strip('"'))] for axis in contracted[1].split(","))
    *batch, m, n = instruction.results[0].dims
    if left.dtype in ("f16", "bf16"):
        return math.prod(batch) * dot_seconds(REFERENCE, n, summed, m)
    return 2 * instruction.results[0].elements * summed / _FLOAT_RATE


def _operands(instruction: Instruction, line: str) -> list[str]:
    """Returns the names of the operands in an instruction's line."""
    _, _, rest = line.partition(f" {instruction.opcode}(")
    return re.findall(r"%?([\w.-]+)", rest.partition(")")[0])


def _bytes(instruction: Instruction, line: str, instructions: dict[str, Instruction]) -> int:
    """Returns the bytes of an instruction's results and of the operands that its line names."""
    arrays = list(instruction.results)
    for name in _operands(instruction, line):
        if name in instructions:
            arrays += instructions[name].results
    return sum(map(_nbytes, arrays))


def _nbytes(array: Array) -> int:
    bits = _BITS.search(array.dtype)
    return array.elements * max(1, int(bits[1]) // 8 if bits else 1)  # pred has no number


def _multiply_adds(hlo: str) -> defaultdict[str, int]:
    """Counts the multiply-adds of the products in each computation."""
    found: defaultdict[str, int] = defaultdict(int)
    instructions, computation = parse_hlo(hlo), ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split()[0]
        elif dot := _DOT.search(line):
            (made,) = instructions[
                line.strip().removeprefix("ROOT ").lstrip("%").split()[0]
            ].results
            left = instructions[dot[2]].results[0]
            summed = 1
            for axis in dot[3].split(","):
                summed *= left.dims[int(axis)] if axis else 1
            found[computation] += made.elements * summed
    return found


def table(times: Iterable[StepTime]) -> str:
    """Formats both models in adjacent columns."""
    header = ("PREDICTED, H200", "launches", "us", "us, events", "apart", "XLA's us", "tok/s")
    rows = [
        (
            str(t.asked),
            str(t.launches),
            f"{t.seconds * 1e6:.0f}",
            f"{t.event_seconds * 1e6:.0f}",
            f"{t.apart:+.0%}",
            f"{t.xla_seconds * 1e6:.0f}",
            f"{t.tokens_per_second:.0f}",
            f"{t.event_tokens_per_second:.0f}",
        )
        for t in times
    ]
    return plain_table((*header, "tok/s, events"), rows)


def differences(time: StepTime) -> str:
    """Formats the kernels with most of a difference beyond AGREE; empty if both models agree."""
    if abs(time.apart) <= AGREE:
        return ""
    worst = sorted(time.kernels, key=lambda k: -k.count * abs(k.event_seconds - k.seconds))[:3]
    told = "; ".join(
        f"{k.count} {k.name} {k.grid}: {k.seconds * 1e6:.1f} us ({k.bound} bound),"
        f" {k.event_seconds * 1e6:.1f} by events"
        for k in worst
    )
    return f"{time.asked}: {time.apart:+.0%}: {told}"


def results(times: Iterable[StepTime]) -> dict[str, Any]:
    """Returns the contents of the results file: every program, with each of our kernels."""
    return {
        "predicted": "by two models, for an H200; nothing is measured",
        "device": REFERENCE.name,
        "programs": [asdict(t) | {"apart": t.apart} for t in times],
    }


def _piece(text: str) -> tuple[int, int]:
    """Parses `256:4096` to (256, 4096)."""
    prompt, before = text.split(":")
    return int(prompt), int(before)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.step_times", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS)
    parser.add_argument(
        "--pieces",
        nargs="*",
        type=_piece,
        default=PIECES,
        metavar="TOKENS:BEFORE",
        help="prompts that continue what a cache holds",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results' file")
    options = parser.parse_args(argv)
    if reason := aot.unavailable():
        print(reason, file=sys.stderr)
        return 3
    times = []
    for shape in options.shapes:
        asked = [Asked(shape, batch=batch) for batch in options.batches]
        asked += [Asked(shape, prompt=prompt) for prompt in options.prompts]
        asked += [Asked(shape, prompt=prompt, before=held) for prompt, held in options.pieces]
        for each in asked:
            times.append(step_time(each))
            print(differences(times[-1]) or f"{each}: {times[-1].apart:+.0%}", flush=True)
            write_results(options.out, results(times))
    print(table(times))
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    # nothing runs on a GPU; without its libraries, looking for one warns
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
