"""Writes tuning tables: `python -m tools.tune [--model]`.

With a GPU, it times Configs at each shape and writes the fastest ones. With `--model`, it chooses
by the cost model, from the machine code that ptxas generates for the device's architecture, and
needs no GPU. Tables in `ptx_kernels/tuning/tuned/` come with the package; `JAX_Q4K_TUNING` names a
file elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptx_kernels.devices import DEVICES, Device
from ptx_kernels.driver import Device as Gpu
from ptx_kernels.driver import DriverError, rotated
from ptx_kernels.kernels.matvec.rules import ROWS_TO_FILL
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.model import INSTRUCTION_BUDGETS, Prediction, predict
from ptx_kernels.machine_code.ptxas import TARGETS, ToolNotFoundError, assemble_all, tool_version
from ptx_kernels.machine_code.report import Code, codes, launch, work_of_loops
from ptx_kernels.machine_code.work import packed_weights
from ptx_kernels.ptx import Kernel
from ptx_kernels.simulate import deviation
from ptx_kernels.tuning import tables

from .results import provenance
from .spaces import FORMATS, SPACES, Shape, Space

#: Predictions that differ by less than this factor are equal; the one with the most slack wins.
_EQUAL = 1.02
#: Limit for results that differ only in the order of their sums.
MOST_NMSE = 1e-5
_AHEAD = 8  # shapes whose machine code is generated together
_BATCH = 24  # kernels per run of ptxas and nvdisasm

#: Description of the model's choice, for the table's file.
METHOD = (
    "Of each shape's candidates (tools/spaces.py) the least predicted time"
    f" (ptx_kernels/machine_code/model.py); within {_EQUAL - 1:.0%} the rule's, which knows what"
    " the model does not, or else the most slack in issue slots and latency. Passed over, and"
    " counted in `why`, are those that spill on one of the targets and those beyond"
    " model.INSTRUCTION_BUDGETS, since the model takes instructions for free where memory binds"
    " and a device does not. If none is left, the rule's. No row where the model cannot predict."
)


@dataclass(frozen=True)
class Pick:
    """Entry of a table for a shape."""

    config: Any
    seconds: float
    why: str = ""


def over_budget(kernel: Kernel, machine: Code, multiprocessors: int) -> str:
    """Returns the instruction budget that the hot loop of a mat-vec exceeds; empty: none.

    Matrices whose rows do not fill the device have no budget: latency bounds them, and most of
    their code runs once.
    """
    packed, columns = packed_weights(kernel), kernel.arguments["columns"]
    if kernel.family == "gemm" or packed is None:
        return ""
    limits = [INSTRUCTION_BUDGETS.get((f, kernel.arguments["m"])) for f in packed.formats]
    if packed.count < ROWS_TO_FILL * multiprocessors * columns or None in limits:
        return ""
    limit = max(each for each in limits if each)
    quant_bytes = next(work_of_loops(kernel, machine)).quant_bytes
    if quant_bytes is not None and machine.body.issued() <= limit * quant_bytes:
        return ""
    return f"over {limit} instructions a byte"


class Model:
    """Predicts on one device; caches machine code that several shapes share."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._codes: dict[tuple[str, Shape, Any], Code] = {}
        self._spills: dict[tuple[str, Shape, Any], bool] = {}

    def prepare(self, space: Space, shapes: Iterable[Shape]) -> None:
        """Generates the machine code of all candidates of these shapes, many at a time."""
        wanted = {
            (space.rule, space.code_shape(shape), config): None
            for shape in shapes
            for config in space.candidates(shape, self._device.multiprocessors)
        }
        built = {
            key: kernel
            for key in wanted
            if key not in self._codes and (kernel := space.build(*key[1:]))
        }
        different = list({kernel.text: kernel for kernel in built.values()}.values())
        batches = [different[i : i + _BATCH] for i in range(0, len(different), _BATCH)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(
                itertools.chain(*pool.map(lambda batch: codes(batch, self._device.arch), batches))
            )
        of_text = dict(zip((kernel.text for kernel in different), made, strict=True))
        self._codes.update((key, of_text[kernel.text]) for key, kernel in built.items())

    def predictions(self, space: Space, shape: Shape) -> dict[Any, tuple[Prediction, str]]:
        """Returns every candidate's prediction with its objection: an exceeded budget or spills."""
        self.prepare(space, [shape])
        found = {}
        for config in space.candidates(shape, self._device.multiprocessors):
            machine = self._codes.get((space.rule, space.code_shape(shape), config))
            kernel = space.build(shape, config)
            asked = launch(kernel, machine) if kernel and machine else None
            if kernel and machine and asked and asked.resident_blocks:
                against = (
                    "spilling"
                    if machine.assembly.spill_store_bytes
                    else over_budget(kernel, machine, self._device.multiprocessors)
                )
                found[config] = predict(asked, self._device), against
        return found

    def spills(self, space: Space, shape: Shape, config: Any) -> bool:
        """Returns whether the registers of any architecture are too few.

        The table also serves devices that have none of their own.
        """
        key = (space.rule, space.code_shape(shape), config)
        if key not in self._spills:
            kernel = space.build(*key[1:])
            made = assemble_all([kernel.text], TARGETS).values() if kernel else ()
            self._spills[key] = any(
                assembly.spill_store_bytes or assembly.stack_bytes for assembly in made
            )
        return self._spills[key]

    def best(self, space: Space, shape: Shape) -> Pick | None:
        """Returns the pick by `METHOD`; None if all candidates spill.

        Also returns None if the model cannot predict the rule's choice.
        """
        rule = space.of_rule(shape, self._device.multiprocessors)
        left = self.predictions(space, shape)
        predicted = dict(left)
        if rule not in predicted:
            return None
        passed_over: Counter[str] = Counter()
        while left:
            enough = _EQUAL * min(prediction.seconds for prediction, _ in left.values())
            slack = {
                c: p.bounds["issue"] + p.bounds["latency"]
                for c, (p, _) in left.items()
                if p.seconds <= enough
            }
            config = rule if rule in slack else min(slack, key=lambda c: slack[c])
            _, against = left.pop(config)
            if not against and self.spills(space, shape, config):
                against = "spilling"
            if not against:
                break
            passed_over[against] += 1
        else:
            if self.spills(space, shape, config := rule):
                return None
        prediction, _ = predicted[config]
        return Pick(config, prediction.seconds, _why(prediction, config == rule, passed_over))


def _why(prediction: Prediction, of_rule: bool, passed_over: Counter[str]) -> str:
    """Formats a reason: `latency bound, as the rule; passed over: 2 over 3.5 instructions ...`."""
    why = f"{prediction.bound} bound{', as the rule' if of_rule else ''}"
    return "; ".join(filter(None, (why, _passed_over(passed_over))))


def _passed_over(counts: Counter[str]) -> str:
    """Formats `passed over: 2 wrong, 1 spilling`; empty for no counts."""
    text = ", ".join(f"{count} {against}" for against, count in counts.items())
    return f"passed over: {text}" if text else ""


def timed(gpu: Gpu, space: Space, shape: Shape, end: float) -> Pick | None:
    """Returns the fastest candidate on a GPU; None if time runs out before all are timed.

    Candidates that do not run, or whose results differ from those of the rule's choice (the first),
    are passed over and counted in `why`.
    """
    configs = space.candidates(shape, gpu.facts.multiprocessors)
    kernels = {config: kernel for config in configs if (kernel := space.build(shape, config))}
    seconds: dict[Any, float] = {}
    against: Counter[str] = Counter()
    expected: list[np.ndarray] = []
    with gpu.scope():
        first = next(iter(kernels.values()))
        launches = rotated(gpu, first, random_operands(first), gpu.facts.l2_bytes)
        copies = [addresses for _, addresses in launches]
        for config, kernel in kernels.items():
            if time.monotonic() >= end:
                return None
            try:
                median = gpu.time([(kernel, addresses) for addresses in copies]).median
                results = _results(gpu, kernel, copies[0])
            except DriverError as error:
                print(f"{space.rule}{shape}: {config} does not run: {error}", flush=True)
                against["not running"] += 1
                continue
            expected = expected or results
            nmse = float(np.max([*map(deviation, kernel.results, expected, results)]))
            if nmse <= MOST_NMSE:
                seconds[config] = median
            else:
                print(f"{space.rule}{shape}: {config} is wrong: NMSE {nmse:.1e}", flush=True)
                against["wrong"] += 1
    if not seconds:
        return None
    best = min(seconds, key=lambda config: seconds[config])
    return Pick(best, seconds[best], _passed_over(against))


def _results(gpu: Gpu, kernel: Kernel, addresses: Sequence[int]) -> list[np.ndarray]:
    """Returns a kernel's results."""
    results_at = addresses[len(kernel.operands) :]
    pairs = zip(results_at, kernel.results, strict=True)
    return [gpu.download(address, b.shape, b.type.dtype) for address, b in pairs]


def search(
    spaces: Sequence[Space],
    names: Sequence[str],
    seconds: float,
    pick: Callable[[Space, Shape, float], Pick | None],
) -> Iterator[dict[str, Any]]:
    """Yields rows of a table: `pick(space, shape, end)` for each shape until the time is over.

    A pick of None gives no row. Each space has an equal part of the time, plus what those before it
    left.
    """
    start = time.monotonic()
    for number, space in enumerate(spaces, 1):
        end = start + seconds * number / len(spaces)
        for shape in space.shapes(names):
            found = pick(space, shape, end) if time.monotonic() < end else None
            if found is None and time.monotonic() >= end:
                print(f"out of time at {space.rule}{shape}", flush=True)
                break
            if found is None:
                print(f"{space.rule}{shape}: left to the rule", flush=True)
                continue
            row = space.row(shape, found.config, round(found.seconds, 9), found.why)
            print(
                f"{space.rule}{shape}: {found.seconds * 1e6:.2f} us: {row['config']} {found.why}",
                flush=True,
            )
            yield row


def model_table(
    device: Device, spaces: Sequence[Space], names: Sequence[str], seconds: float
) -> dict[str, Any]:
    model = Model(device)
    ready: set[tuple[str, Shape]] = set()

    def pick(space: Space, shape: Shape, _: float) -> Pick | None:
        if (space.rule, shape) not in ready:
            later = itertools.dropwhile(lambda each: each != shape, space.shapes(names))
            # enough for a batch per core
            next_ = list(itertools.islice(later, _AHEAD))
            model.prepare(space, next_)
            ready.update((space.rule, each) for each in next_)
        return model.best(space, shape)

    rows = list(search(spaces, names, seconds, pick))
    how = {"ptxas": tool_version("ptxas"), "method": METHOD}
    return {
        "device": device.name,
        "multiprocessors": device.multiprocessors,
        "source": "model",
        "how": how,
        "rows": rows,
    }


def measured_table(
    gpu: Gpu, spaces: Sequence[Space], names: Sequence[str], seconds: float
) -> dict[str, Any]:
    rows = list(
        search(spaces, names, seconds, lambda space, shape, end: timed(gpu, space, shape, end))
    )
    facts = gpu.facts
    return {
        "device": facts.name,
        "multiprocessors": facts.multiprocessors,
        "source": "measured",
        "how": {"driver": facts.driver_cuda_version},
        "rows": rows,
    }


def write_table(
    path: Path, table: dict[str, Any], searched: Sequence[str], commit: str | None = None
) -> Path:
    """Writes a table, one line per row, with provenance for each rule that was searched.

    The file's rows of other rules for the same device and source are kept. `commit`: of the code,
    if git cannot tell.
    """
    known = {"commit": commit} if commit else {}
    made = {rule: provenance() | known | table["how"] for rule in searched}
    rows = list(table["rows"])
    head = {key: table[key] for key in ("device", "multiprocessors", "source")}
    if path.exists():
        before = json.loads(path.read_text())
        if all(before.get(key) == value for key, value in head.items()):
            made = {r: p for r, p in before.get("made", {}).items() if r not in searched} | made
            rows = [row for row in before["rows"] if row["kernel"] not in searched] + rows
    text = json.dumps(head | {"made": made}, indent=1).removesuffix("}").rstrip()
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tune", description=__doc__)
    parser.add_argument(
        "--model", action="store_true", help="predict, instead of measuring on a GPU"
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="H200", help="that is predicted for (default: H200)"
    )
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=SPACES,
        default=tuple(SPACES),
        help="only these; the file's rows of others stay",
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument(
        "--seconds", type=float, help="time to search in (default: 540 to measure, else no limit)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the table's file (default: ptx_kernels/tuning/tuned/DEVICE[.model].json)",
    )
    parser.add_argument("--commit", help="recorded where git cannot tell")
    options = parser.parse_args(argv)
    spaces = [SPACES[rule] for rule in options.rules]
    seconds = options.seconds if options.seconds is not None else math.inf if options.model else 540
    if not seconds > 0:
        parser.error(f"--seconds {seconds} must be positive")
    if options.model:
        device = DEVICES[options.device]
        try:
            table = model_table(device, spaces, options.formats, seconds)
        except ToolNotFoundError as error:
            print(f"tools.tune --model needs ptxas and nvdisasm: {error}", file=sys.stderr)
            return 3
        name = f"{device.slug}.model.json"
    else:
        try:
            with Gpu() as gpu:
                table = measured_table(gpu, spaces, options.formats, seconds)
        except DriverError as error:
            print(f"tools.tune needs a CUDA GPU, or --model: {error}", file=sys.stderr)
            return 3
        name = f"{table['device'].removeprefix('NVIDIA ').replace(' ', '-').lower()}.json"
    path = write_table(options.out or tables.FOLDER / name, table, options.rules, options.commit)
    tables.load(path)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
