"""Writes tuning tables for the mat-vec: `python -m benchmarks.tune [--model]`.

With a GPU: times Configs at each shape and writes the fastest ones. With `--model`: chooses by the cost model, from
the machine code that ptxas makes for the device's architecture; needs no GPU. What is written to
`ptx_kernels/tuned/` comes with the package; a file elsewhere is used where `JAX_Q4K_TUNING` names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ptx_kernels import tables, tuning
from ptx_kernels.assemble import TARGETS, assemble, tool_version
from ptx_kernels.cost import INSTRUCTION_BUDGETS, Prediction, predict
from ptx_kernels.devices import DEVICES, Device
from ptx_kernels.driver import Device as Gpu
from ptx_kernels.driver import DriverError
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import FORMATS, PRESETS, MatvecConfig
from ptx_kernels.ptx import Kernel, KernelError
from ptx_kernels.report import Code, code, launch
from ptx_kernels.work import work

from .common import provenance
from .gpu_kernels import rotated

#: (n, columns) of the matrices of Llama-3.1-8B, Llama-3.2-1B and Qwen2.5-0.5B; a row serves shapes within an octave.
SHAPES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (1024, 4096)),
    *((512, 2048), (2048, 2048), (8192, 2048), (128256, 2048)),
    *((896, 896), (4864, 896)),
)
ROWS = (1, 2, 4, 8)
_CODE_ROWS = 4096  # machine code is made for so many rows; that of another number differs in constants
_EQUAL = 1.02  # predictions that differ by less than this factor are equal: the one with the most slack wins

Shape = tuple[str, int, int, int]


def candidates(m: int) -> tuple[MatvecConfig, ...]:
    """Configs worth trying for q8_1 activations: the presets', and what varies around them.

    One row of activations is limited by loads, and the model does not see lines that are read in part: eight lanes,
    which read whole ones.
    """
    named = [config for config in PRESETS.values() if config.activations == "q8_1"]
    varied = [
        MatvecConfig(
            lanes=lanes,
            rows_per_warp=rows,
            unroll=unroll,
            warps_per_row=warps,
            resident_blocks=3 if m > 2 else 6 if lanes == 8 and m == 1 else 4,
        )
        for lanes in ((8,) if m == 1 else (8, 4))
        for rows in (1, 2)
        for unroll in ((1, 2, 4) if m == 1 else (1,))
        for warps in (1, 2, 4)
    ]
    return tuple(dict.fromkeys([*named, *varied]))


def build(shape: Shape, config: MatvecConfig) -> Kernel | None:
    """The mat-vec of a shape, None where the Config does not go with it."""
    format, n, columns, m = shape
    try:
        return KERNELS["matvec"](format=format, n=n, columns=columns, m=m, config=config)
    except KernelError:
        return None


def shapes(formats: Sequence[str]) -> Iterator[Shape]:
    """(format, n, columns, m) of every row of a table, what matters most first: time to measure may be short.

    Formats skip columns that are no multiple of their blocks.
    """
    for m in ROWS:
        for n, columns in SHAPES:
            for format in formats:
                if build((format, n, columns, m), PRESETS["dp4a"]):
                    yield format, n, columns, m


def spills(format: str, columns: int, m: int, config: MatvecConfig) -> bool:
    """Whether any architecture's registers are too few."""
    kernel = build((format, _CODE_ROWS, columns, m), config)
    made = [assemble(kernel.text, arch) for arch in TARGETS] if kernel else []
    return any(assembly.spill_store_bytes or assembly.stack_bytes for assembly in made)


def within_budget(key: tuple[str, int, int], config: MatvecConfig, machine: Code) -> bool:
    """Whether the hot loop of a mat-vec (format, columns, m) takes no more instructions than it may."""
    format, columns, m = key
    kernel = build((format, _CODE_ROWS, columns, m), config)
    quant_bytes = work(kernel, machine.body, whole=not machine.looped).quant_bytes if kernel else None
    limit = INSTRUCTION_BUDGETS.get((format, m), math.inf)
    return quant_bytes is not None and machine.body.issued() <= limit * quant_bytes


class Model:
    """Predicts; keeps the machine code that shapes with other numbers of rows share."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._codes: dict[tuple[str, int, int], dict[MatvecConfig, Code]] = {}

    def _code(self, format: str, columns: int, m: int) -> dict[MatvecConfig, Code]:
        key = (format, columns, m)
        if key not in self._codes:
            built = {config: build((format, _CODE_ROWS, columns, m), config) for config in self.candidates(*key)}
            made = {config: code(kernel, self._device.arch) for config, kernel in built.items() if kernel}
            kept = {config: c for config, c in made.items() if not c.assembly.spill_store_bytes}
            self._codes[key] = {config: c for config, c in kept.items() if within_budget(key, config, c)} or kept
        return self._codes[key]

    @staticmethod
    def candidates(format: str, columns: int, m: int) -> tuple[MatvecConfig, ...]:
        """Those of every format, and what the rule would choose."""
        rules = [tuning.matvec.rule(format, n, columns, m) for n in (_CODE_ROWS, 512)]
        return tuple(dict.fromkeys([*rules, *candidates(m)]))

    def predictions(self, shape: Shape) -> dict[MatvecConfig, Prediction]:
        """Of every candidate that does not spill."""
        found = {}
        for config, machine in self._code(shape[0], *shape[2:]).items():
            kernel = build(shape, config)
            asked = launch(kernel, machine) if kernel else None
            if asked and asked.resident_blocks:
                found[config] = predict(asked, self._device)
        return found

    def best(self, shape: Shape) -> tuple[MatvecConfig, Prediction]:
        """The fastest that spills on no architecture: the table also serves devices that have none.

        Of equally fast ones that whose issue and latency bounds leave the most room.
        """
        found = self.predictions(shape)
        while found:
            enough = _EQUAL * min(prediction.seconds for prediction in found.values())
            fast = {c: p.bounds["issue"] + p.bounds["latency"] for c, p in found.items() if p.seconds <= enough}
            config = min(fast, key=lambda c: fast[c])
            prediction = found.pop(config)
            if not spills(shape[0], *shape[2:], config):
                return config, prediction
        raise ValueError(f"no candidate goes with {shape} without spilling")


def row(shape: Shape, seconds: float, why: str, config: MatvecConfig) -> dict[str, Any]:
    """A table's row; the fields that differ from MatvecConfig's defaults."""
    format, n, columns, m = shape
    default = MatvecConfig()
    fields = {k: v for k, v in dataclasses.asdict(config).items() if v != getattr(default, k)}
    found = dict(kernel="matvec", format=format, n=n, columns=columns, m=m, config=fields, seconds=seconds)
    return found | ({"why": why} if why else {})


def model_table(device: Device, formats: Sequence[str]) -> dict[str, Any]:
    model = Model(device)
    rows = []
    for shape in shapes(formats):
        config, found = model.best(shape)
        rows.append(row(shape, round(found.seconds, 9), f"{found.bound} bound", config))
        print(f"{shape}: {found.seconds * 1e6:.2f} us, {found.bound} bound: {rows[-1]['config']}", flush=True)
    return {"device": device.name, "source": "model", "ptxas": tool_version("ptxas"), "rows": rows}


def measured_table(gpu: Gpu, formats: Sequence[str], seconds: float) -> dict[str, Any]:
    """Times the candidates at each shape until the time is over; shapes that were not finished are left out."""
    end, rows = time.monotonic() + seconds, []
    for shape in shapes(formats):
        built = {config: build(shape, config) for config in Model.candidates(shape[0], *shape[2:])}
        kernels = {config: kernel for config, kernel in built.items() if kernel}
        timed = {}
        with gpu.scope():
            places = [addresses for _, addresses in rotated(gpu, next(iter(kernels.values())), gpu.facts.l2_bytes)]
            for config, kernel in kernels.items():
                if time.monotonic() < end:
                    timed[config] = gpu.time([(kernel, addresses) for addresses in places]).median
        if len(timed) < len(kernels):
            print(f"out of time at {shape}")
            break
        best = min(timed, key=lambda config: timed[config])
        rows.append(row(shape, timed[best], "", best))
        print(f"{shape}: {timed[best] * 1e6:.2f} us: {rows[-1]['config']}", flush=True)
    facts = gpu.facts
    return {"device": facts.name, "source": "measured", "driver": facts.driver_cuda_version, "rows": rows}


def write_table(path: Path, table: dict[str, Any]) -> Path:
    """Writes `provenance()` and the table, a line for each row."""
    rows = ",\n  ".join(json.dumps(row) for row in table["rows"])
    head = json.dumps(provenance() | {key: value for key, value in table.items() if key != "rows"}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head.removesuffix("}").rstrip()},\n "rows": [\n  {rows}\n ]\n}}\n')
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--model", action="store_true", help="predict, instead of measuring on a GPU")
    parser.add_argument("--device", choices=DEVICES, default="H200", help="that is predicted for (default: H200)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seconds", type=float, default=540, help="time to measure in (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the table's file (default: ptx_kernels/tuned/DEVICE[.model].json)")
    options = parser.parse_args(argv)
    if options.model:
        device = DEVICES[options.device]
        table, name = model_table(device, options.formats), f"{device.slug}.model.json"
    else:
        try:
            with Gpu() as gpu:
                table = measured_table(gpu, options.formats, options.seconds)
        except DriverError as error:
            print(f"benchmarks.tune needs a CUDA GPU, or --model: {error}", file=sys.stderr)
            return 3
        name = f"{table['device'].removeprefix('NVIDIA ').replace(' ', '-').lower()}.json"
    path = write_table(options.out or tables.FOLDER / name, table)
    tables.load(path)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
