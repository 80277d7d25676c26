"""Checks and times everything on a GPU in one command: `python -m benchmarks.gpu`.

Device facts, then the GPU tests, the kernels by themselves, and the decode loop of two golden
models and of a random model of Llama-3.1-8B's shape. Needs JAX with CUDA and cuda-python; pytest
for the tests. Prints tables and writes one JSON file with device, driver, versions, commit and
date. Exits with 3 where there is no usable GPU, with 1 where a test failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptx_kernels import tuning
from ptx_kernels.driver import Device, DriverError
from tools.results import write_results

from . import gpu_kernels
from .common import RESULTS

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 3
_GOLDEN = ("llama-gqa", "qwen3-qknorm")
_MODELS_SECONDS = 120  # kept back for the models while kernels are timed
# bytes a device needs for the 8B model: weights, cache, programs, and their making
_MODEL_MEMORY = 24 << 30


class Clock:
    """The rest of the time that the whole run may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def run_tests(seconds: float) -> dict[str, Any]:
    """Runs tests/gpu in a process of its own; returns its summary line and exit status.

    The status is 0 if the tests passed, None if they ran out of time.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "--maxfail=20",
        "-p",
        "no:cacheprovider",
    ]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]  # most of their time is compiling, on the host
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(seconds, 1)
        )
    except subprocess.TimeoutExpired:
        return {"status": None, "summary": f"not finished within {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    return {
        "status": done.returncode,
        "summary": lines[-1] if lines else "",
        "seconds": time.monotonic() - started,
    }


def time_kernels(gpu: Device, clock: Clock) -> tuple[float, list[gpu_kernels.Measurement]]:
    """The copy bandwidth in bytes/s, and every kernel that there is time for."""
    bandwidth = gpu.copy_bandwidth()
    print(f"device copy: {bandwidth / 1e9:.0f} GB/s, read plus written")
    rows = []
    timed = (gpu_kernels.others, gpu_kernels.products, gpu_kernels.matvecs, gpu_kernels.presets)
    for name, kernel, nbytes, config in itertools.chain.from_iterable(of() for of in timed):
        if clock.left() <= 0:
            print(f"out of time before {name}")
            break
        rows.append(gpu_kernels.measure(gpu, name, kernel, nbytes, bandwidth, config))
    return bandwidth, rows


def time_models(memory_bytes: int, bandwidth: float, clock: Clock) -> tuple[list[Any], list[str]]:
    """Decode rates, and why a model was left out."""
    from jax_q4k import models
    from tools.random_model import LLAMA_3_1_8B, random_model

    from . import gpu_models

    rows, skipped = [], []
    for name in _GOLDEN:
        if clock.left() <= 0:
            skipped.append(f"{name}: out of time")
            continue
        model = models.from_gguf(ROOT / "tests" / "data" / "golden" / f"{name}.Q4_K_M.gguf")
        rows.append(
            gpu_models.decode_rate(f"golden {name}", model, tokens=16, copy_bandwidth=bandwidth)
        )
    if memory_bytes < _MODEL_MEMORY:
        skipped.append(
            f"8B shape: the device has {memory_bytes >> 30} GiB, it needs {_MODEL_MEMORY >> 30}"
        )
    elif clock.left() < 60:  # its programs alone take most of a minute to compile
        skipped.append("8B shape: out of time")
    else:
        model = random_model(LLAMA_3_1_8B)
        rows.append(
            gpu_models.decode_rate("random Llama-3.1-8B, Q4_K_M", model, copy_bandwidth=bandwidth)
        )
    return rows, skipped


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--name", help="of the result file; default: the device's name and the date"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the result file (default: %(default)s)"
    )
    parser.add_argument("--commit", help="recorded where git cannot tell")
    parser.add_argument(
        "--seconds", type=float, default=450, help="time for all of it (default: %(default)s)"
    )
    parser.add_argument("--skip", nargs="*", default=[], choices=("tests", "kernels", "models"))
    options = parser.parse_args(argv)
    clock = Clock(options.seconds)
    try:
        gpu = Device()
    except DriverError as error:
        print(f"benchmarks.gpu needs a CUDA GPU: {error}", file=sys.stderr)
        return NO_GPU
    # the driver's buffers and JAX's share the GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with gpu, tuning.on_device(tuning.target(gpu.facts.name, gpu.facts.multiprocessors)):
        facts = gpu.facts
        for name, value in dataclasses.asdict(facts).items():
            print(f"{name:32} {value}")
        print(f"{'datasheet bandwidth':32} {facts.bandwidth / 1e9:.0f} GB/s")
        results: dict[str, Any] = {
            "device": dataclasses.asdict(facts) | {"bandwidth": facts.bandwidth}
        }

        if "tests" not in options.skip:
            results["tests"] = run_tests(0.5 * clock.left())
            print("\ntests/gpu:", results["tests"]["summary"])
        of_kernels = Clock(clock.left() - (0 if "models" in options.skip else _MODELS_SECONDS))
        bandwidth, kernels = (
            time_kernels(gpu, of_kernels) if "kernels" not in options.skip else (0.0, [])
        )
        results["copy_bandwidth"] = bandwidth
        results["kernels"] = [row.as_dict() for row in kernels]
        if kernels:
            print("\n" + gpu_kernels.table(kernels) + "\n\n" + gpu_kernels.preset_table(kernels))
    if "models" not in options.skip:
        from . import gpu_models

        rates, skipped = time_models(facts.memory_bytes, bandwidth, clock)
        results["models"], results["models_skipped"] = [row.as_dict() for row in rates], skipped
        print("\n" + gpu_models.table(rates), *skipped, sep="\n")

    name = options.name or f"gpu-{facts.name.replace(' ', '-').lower()}-{time.strftime('%Y%m%d')}"
    if options.commit:
        results["commit"] = options.commit
    path = write_results(options.out / f"{name}.json", results)
    if drawn := gpu_kernels.chart(
        kernels, path.with_suffix(".png"), f"{facts.name}: mat-vec strategies"
    ):
        print(f"drawn: {drawn}")
    print(f"\nwritten: {path}")
    return 0 if "tests" in options.skip or results["tests"]["status"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
