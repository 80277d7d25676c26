"""Checks and times everything on a GPU in one command: `python -m benchmarks.gpu`.

Runs, in order: device facts, the GPU tests, the questions of the first hour, the kernels alone, and
full models: decoding of two golden ones; batches, prompts and an engine of a random one of
Llama-3.1-8B's shape. Needs JAX with CUDA and cuda-python; pytest for the tests. Prints tables and
writes one JSON file with device, driver, versions, commit and date. The file is rewritten after
each part, so that a later failure loses no measurement. Exits with 3 if there is no usable GPU,
with 1 if a test or a part failed.

With --dry-run everything runs on small shapes without a GPU: kernels in the simulator, the model on
the CPU. Nothing is measured then, and the file says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx_kernels import tuning
from ptx_kernels.driver import Device, DeviceFacts, DriverError
from ptx_kernels.simulated_cuda import SimulatedDevice
from tools.results import write_results

from . import gpu_kernels, gpu_questions
from .common import RESULTS
from .gpu_predictions import Predictions
from .gpu_sizes import FULL, SMALL, Sizes

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 3
_NOTHING_MEASURED = (
    "DRY RUN: nothing is measured. Kernels run in the simulator, their times are invented, and the"
    " model runs on the CPU."
)
#: Parts that can be skipped.
_PARTS = ("tests", "questions", "kernels", "models", "engine")
_GOLDEN = ("llama-gqa", "qwen3-qknorm")
#: Sequences per step, tokens in the cache before it, and tokens of prompts, for the 8B model.
_BATCHES, _CONTEXT, _PROMPTS = (1, 8, 32), 512, (512, 4096)
#: Switches of `jq.implementation`, each measured alone: in steps of one sequence, and in prompts.
_STEP_SWITCHES = ({"graphs": False}, {"clusters": False}, {"prefetch": False})
_PROMPT_SWITCHES = ({"decoded_products": True}, {"decoded_products": False})
_MODELS_SECONDS = 150  # reserved for the models while kernels are timed
_TEST_PROCESSES = 11  # limit: this many have shared the memory of an H100
_TESTS_SHARE = 0.4  # maximum fraction of the total time
_QUESTIONS_SECONDS = 75  # limit
_OVERTIME = 25  # seconds until a run that hangs is ended
#: Makes XLA launch independent kernels concurrently.
_CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
# bytes that a device needs for the 8B model: weights, cache, programs, and their compilation
_MODEL_MEMORY = 24 << 30


class Clock:
    """Remaining time of the run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def run_tests(seconds: float, *, collect_only: bool = False) -> dict[str, Any]:
    """Runs tests/gpu in a separate process; returns its summary line and exit status.

    The status is 0 if the tests passed, None if they ran out of time. `collect_only`: only imports
    and lists them, which needs no GPU.
    """
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    if collect_only:
        command += ["--collect-only"]
    else:
        command += ["--maxfail=20"]
        if importlib.util.find_spec("xdist"):
            # most of their time is compilation on the host
            command += ["-n", str(min(os.cpu_count() or 1, _TEST_PROCESSES))]
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


@dataclass
class Run:
    """One run: its resources, and its results so far.

    Attributes:
      results: contents of the file; `errors` names the failed parts and their errors.
      path: path of the file.
    """

    options: argparse.Namespace
    sizes: Sizes
    clock: Clock
    results: dict[str, Any]
    path: Path

    def save(self) -> None:
        write_results(self.path, self.results)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Runs a part that may fail independently of others; writes the results after it."""
        try:
            yield
        except Exception as error:  # whatever the error, later parts can be measured
            print(f"{name} FAILED: {type(error).__name__}: {error}")
            traceback.print_exc()
            self.results["errors"][name] = f"{type(error).__name__}: {error}"
        self.save()

    def skips(self, name: str) -> bool:
        return name in self.options.skip

    @property
    def succeeded(self) -> bool:
        """Whether no part failed, and the tests passed if they ran."""
        tests = self.results.get("tests", {"status": 0})
        return tests["status"] == 0 and not self.results["errors"]


def show_facts(run: Run, gpu: Device) -> None:
    facts = gpu.facts
    run.results["device"] = dataclasses.asdict(facts) | {"bandwidth": facts.bandwidth}
    for name, value in dataclasses.asdict(facts).items():
        print(f"{name:32} {value}")
    print(f"{'datasheet bandwidth':32} {facts.bandwidth / 1e9:.0f} GB/s")
    bandwidth = gpu.copy_bandwidth(run.sizes.copy_bytes)
    run.results["copy_bandwidth"] = bandwidth
    print(f"{'copy, read plus written':32} {bandwidth / 1e9:.0f} GB/s")


def check_and_predict(run: Run, predictions: Predictions) -> None:
    """Runs the GPU tests in other processes, and meanwhile the cost model in this one."""
    kernels = []
    if not run.skips("questions"):
        kernels += gpu_questions.timed_kernels(run.sizes)
    if not run.skips("kernels"):
        kernels += [built for _, built, *_ in gpu_kernels.all_timed(run.sizes)]
    seconds = _TESTS_SHARE * run.clock.left()
    until = Clock(seconds)
    with ThreadPoolExecutor(1) as pool:
        tests = None
        if not run.skips("tests"):
            tests = pool.submit(run_tests, seconds, collect_only=run.options.dry_run)
        with run.part("predictions"):
            left_out = predictions.prepare(kernels, lambda: until.left() > 0)
            if left_out:
                print(f"predictions: {left_out}")
        if tests is not None:
            run.results["tests"] = tests.result()
            what = "tests/gpu, only collected:" if run.options.dry_run else "tests/gpu:"
            print(f"\n{what}", run.results["tests"]["summary"])


def ask_questions(run: Run, bench: gpu_questions.Bench) -> None:
    """Answers every question that time allows: prints a line, and records it in the results."""
    clock = Clock(min(_QUESTIONS_SECONDS, run.clock.left()))
    answers = run.results["questions"] = []
    print("\nthe first hour's questions")
    for question in gpu_questions.QUESTIONS:
        record: dict[str, Any] = {"name": question.name, "asks": question.asks}
        answers.append(record)
        if clock.left() <= 0:
            record["answer"] = "out of time"
        else:
            record["answer"] = "failed"
            with run.part(f"question {question.name!r}"):
                record |= question.answer(bench).as_dict()
        print(f"  {question.asks} {record['answer']}")


def time_kernels(run: Run, bench: gpu_questions.Bench) -> list[gpu_kernels.Measurement]:
    """Times every kernel that time allows; prints tables, and draws a chart next to the results."""
    clock = Clock(run.clock.left() - (0 if run.skips("models") else _MODELS_SECONDS))
    rows: list[gpu_kernels.Measurement] = []
    records = run.results["kernels"] = []
    for timed in gpu_kernels.all_timed(run.sizes):
        if clock.left() <= 0:
            print(f"out of time before {timed[0]}")
            run.results["kernels_left_out_from"] = timed[0]
            break
        with run.part(timed[0]):
            rows.append(bench.measure(timed))
            records.append(rows[-1].as_dict())
    if rows:
        print("\n" + gpu_kernels.table(rows) + "\n\n" + gpu_kernels.preset_table(rows))
    return rows


def time_models(run: Run) -> None:
    """Measures the rates of full models; records what was skipped and why."""
    import jax.numpy as jnp

    import jax_q4k as jq
    from jax_q4k import models
    from tools.random_model import LLAMA_3_1_8B, random_model

    from . import engine, gpu_models

    found = run.results["models"] = []
    switched = run.results["switches"] = []
    skipped: list[str] = []
    decoded: list[gpu_models.DecodeRate] = []
    prompts: list[gpu_models.PromptRate] = []

    def measure(
        what: str, rows: list[Any], name: str, switch: dict[str, Any], rate: Callable[[str], Any]
    ) -> None:
        """Measures `rate(name)`, with a switch of `jq.implementation` if it is not empty."""
        name = ", ".join([name, *(f"{key}={value}" for key, value in switch.items())])
        if run.clock.left() <= 0:
            skipped.append(f"{name}, {what}: out of time")
            return
        with jq.implementation(**switch):
            rows.append(rate(name))
        (switched if switch else found).append(rows[-1].as_dict())
        run.save()

    def decode(
        name: str,
        model: models.Model,
        batch: int = 1,
        switches: Sequence[dict[str, Any]] = ({},),
        **options: Any,
    ) -> None:
        for switch in switches:
            rate = functools.partial(gpu_models.decode_rate, model=model, batch=batch, **options)
            measure(f"batch {batch}", decoded, name, switch, rate)

    def prompt(
        name: str,
        model: models.Model,
        tokens: int,
        switches: Sequence[dict[str, Any]] = ({},),
    ) -> None:
        for switch in switches:
            rate = functools.partial(gpu_models.prompt_rate, model=model, tokens=tokens)
            measure(f"a prompt of {tokens}", prompts, name, switch, rate)

    if run.options.dry_run:
        small = random_model(gpu_models.SMALL_MODEL)
        decode("small, on the CPU", small, tokens=4, segments=2, batch=2)
        prompt("small, on the CPU", small, 8)
        decode("small, on the CPU", small, switches=_STEP_SWITCHES, tokens=4, segments=2)
        prompt("small, on the CPU", small, 8, _PROMPT_SWITCHES)
        skipped.append("all others: a dry run")
    else:
        bandwidth: dict[str, Any] = {"copy_bandwidth": run.results.get("copy_bandwidth")}
        memory_bytes = run.results["device"]["memory_bytes"]
        if memory_bytes < _MODEL_MEMORY:
            needs = f"has {memory_bytes >> 30} GiB, it needs {_MODEL_MEMORY >> 30}"
            skipped.append(f"8B shape: the device {needs}")
        else:
            model, name = random_model(LLAMA_3_1_8B), "random Llama-3.1-8B, Q4_K_M"
            for batch in _BATCHES:
                decode(name, model, context=_CONTEXT, batch=batch, **bandwidth)
            for tokens in _PROMPTS:
                prompt(name, model, tokens)
            decode(name, model, switches=_STEP_SWITCHES, context=_CONTEXT, **bandwidth)
            prompt(name, model, _PROMPTS[0], _PROMPT_SWITCHES)
            if not run.skips("engine") and run.clock.left() > 0:
                with run.part("engine"):
                    run.results["engine"] = engine.measure(
                        model, _BATCHES, rounds=2, long=_PROMPTS[-1], cache_dtype=jnp.bfloat16
                    )
            del model
        for name in _GOLDEN:
            file = ROOT / "tests" / "data" / "golden" / f"{name}.Q4_K_M.gguf"
            decode(f"golden {name}", models.from_gguf(file), tokens=16, **bandwidth)
    run.results["models_skipped"] = skipped
    tables = gpu_models.table(decoded), gpu_models.prompt_table(prompts)
    print("", *tables, *skipped, sep="\n")


def measure_on(run: Run, gpu: Device) -> list[gpu_kernels.Measurement]:
    """Runs all parts that need no JAX, in order: facts, tests, questions, kernels."""
    rows: list[gpu_kernels.Measurement] = []
    with run.part("device facts"):
        show_facts(run, gpu)
    predictions = Predictions(gpu.facts.name)
    with run.part("tests"):
        check_and_predict(run, predictions)
    bandwidth = run.results.get("copy_bandwidth", gpu.facts.bandwidth)
    bench = gpu_questions.Bench(gpu, run.sizes, bandwidth, predictions, run.options.dry_run)
    if not run.skips("questions"):
        with run.part("questions"):
            ask_questions(run, bench)
    if not run.skips("kernels"):
        with run.part("kernels"):
            rows = time_kernels(run, bench)
    return rows


def draw(run: Run, rows: list[gpu_kernels.Measurement]) -> None:
    title = run.results["device"]["name"]
    if run.options.dry_run:
        title = f"DRY RUN, nothing was measured: {title}"
    if drawn := gpu_kernels.chart(rows, run.path.with_suffix(".png"), title):
        print(f"drawn: {drawn}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--name", help="of the result file; default: the device's name and the date"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder of the result file (default: {RESULTS}, of a dry run a new temporary one)",
    )
    parser.add_argument("--commit", help="recorded where git cannot tell")
    parser.add_argument(
        "--seconds", type=float, default=500, help="time for all of it (default: %(default)s)"
    )
    parser.add_argument("--skip", nargs="*", default=[], choices=_PARTS)
    parser.add_argument(
        "--concurrent",
        action="store_true",
        help=f"models with XLA's {_CONCURRENT}: kernels that do not depend on each other overlap",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run all of it on small shapes without a GPU, in the simulator; nothing is measured",
    )
    options = parser.parse_args(argv)
    if options.dry_run and options.out and options.out.resolve().is_relative_to(RESULTS):
        parser.error(f"--dry-run measures nothing: its results do not go to {RESULTS}")
    return options


def file_of(options: argparse.Namespace, device: str) -> Path:
    """Returns the result file that a run writes."""
    name = options.name
    if options.dry_run:
        folder = options.out or Path(tempfile.mkdtemp(prefix="jax-q4k-dry-run-"))
        return folder / f"{name or 'dry-run'}.json"
    name = name or f"gpu-{device.replace(' ', '-').lower()}-{time.strftime('%Y%m%d')}"
    return (options.out or RESULTS) / f"{name}.json"


def set_environment(options: argparse.Namespace) -> None:
    """Sets the environment variables that JAX reads when it is imported."""
    # the driver's buffers and JAX's share the GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.concurrent:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_CONCURRENT}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        gpu = SimulatedDevice() if options.dry_run else Device()
        facts = gpu.facts
    except DriverError as error:
        print(f"benchmarks.gpu needs a CUDA GPU: {error}", file=sys.stderr)
        return NO_GPU
    set_environment(options)
    with ended_after(options.seconds + _OVERTIME):
        return measure(options, gpu, facts)


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Ends the process with a traceback if the body takes too long, for example in a hung kernel.

    Everything measured until then has been written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # standard error
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(options: argparse.Namespace, gpu: Device, facts: DeviceFacts) -> int:
    """Runs all parts; returns the exit status."""
    results: dict[str, Any] = {"dry_run": options.dry_run, "errors": {}}
    if options.dry_run:
        results["note"] = _NOTHING_MEASURED
        print(_NOTHING_MEASURED + "\n")
    results |= {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    results |= {"commit": options.commit} if options.commit else {}
    sizes = SMALL if options.dry_run else FULL
    run = Run(options, sizes, Clock(options.seconds), results, file_of(options, facts.name))
    rows: list[gpu_kernels.Measurement] = []
    with run.part("device"), gpu:
        with tuning.on_device(tuning.target(facts.name, facts.multiprocessors)):
            rows = measure_on(run, gpu)
    if not run.skips("models"):
        with run.part("models"):
            time_models(run)
    with run.part("chart"):
        draw(run, rows)
    print(f"\nwritten: {run.path}")
    if options.dry_run:
        print(_NOTHING_MEASURED)
    return 0 if run.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
