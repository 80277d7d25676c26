"""`jax-q4k bench`: measures prompt and decode speed; prints a table or JSON, or draws a chart."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import jax_q4k as jq

from .. import interrupts
from ..arguments import add_model
from ..options import (
    add_cache_dtype,
    add_implementation,
    add_no_cache,
    implementation_arguments,
    implementation_of,
)
from ..output import UsageError, devices, load_model, printable, table_console

if TYPE_CHECKING:
    from ...runner.model import Model
    from ...tasks.bench import Speed, Test

THREADS = jq.cpus.THREADS[0]
MOST_THREADS = 1024
_UNITS = (("B", 1e9), ("M", 1e6), ("K", 1e3))


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a model's speed",
        description="Measure tokens per second of prompts (pp) and of decoding (tg): mean and "
        "standard deviation, after a warm-up run that compiles. Comma-separated lists (128,512) "
        "measure every combination.",
    )
    parser.set_defaults(command=_bench, runs_programs=True)
    add_model(parser)
    lists = (
        ("-p", "--n-prompt", "prompt", "512", 0, "prompt tokens; 0 skips this test"),
        ("-n", "--n-gen", "new", "128", 0, "tokens to decode; 0 skips this test"),
        ("-d", "--n-depth", "depth", "0", 0, "tokens already in the context"),
        ("-b", "--batch", "batch", "1", 1, "sequences per batch"),
    )
    for short, long, name, default, minimum, text in lists:
        parser.add_argument(
            short,
            long,
            dest=name,
            type=_numbers(minimum),
            default=_numbers(minimum)(default),
            metavar="N,...",
            help=f"{text}; default: {default}",
        )
    parser.add_argument(
        "-t",
        "--threads",
        type=_numbers(1, MOST_THREADS),
        metavar="N,...",
        help="CPU threads, each number in its own process; default: one per CPU",
    )
    parser.add_argument(
        "-r", "--repetitions", type=_numbers(1), default=[5], metavar="N", help="default: 5"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every repetition")
    parser.add_argument("--plot", metavar="FILE.png", help="also plot speed over depth")
    add_cache_dtype(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _numbers(minimum: int, maximum: int = 1 << 31) -> Any:
    """Returns an argparse type for comma-separated integers from `minimum` to `maximum`."""

    def numbers(text: str) -> list[int]:
        parts = text.split(",")
        if not all(part.isascii() and part.isdecimal() and len(part) < 11 for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} must be comma-separated integers")
        found = list(dict.fromkeys(int(part) for part in parts))
        if not all(minimum <= number <= maximum for number in found):
            raise argparse.ArgumentTypeError(f"{text!r} must be from {minimum} to {maximum}")
        return found

    return numbers


def _bench(options: argparse.Namespace, notes: Console) -> int:
    tests = _tests(options)
    if len(options.repetitions) > 1:
        raise UsageError("--repetitions takes one number")
    if not tests:
        raise UsageError("-p 0 and -n 0 leave nothing to measure")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    if options.threads and devices()[0].platform != "cpu":
        raise UsageError("--threads is for CPUs; JAX_PLATFORMS=cpu selects the CPU")
    if options.threads:
        rows = []
        for count in options.threads:
            code, found = _in_a_process(options, count, notes)
            if code:
                return code  # the process has printed the reason
            rows += found
    else:
        rows = _measured(options, tests, notes)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        table_console().print(_table(rows))
    if options.plot:
        _plot(rows, Path(options.plot))
    return 0


def _tests(options: argparse.Namespace) -> list[Test]:
    """Returns prompt tests, then decode tests, for every depth and batch; skips 0 tokens."""
    kinds = [("pp", tokens) for tokens in options.prompt] + [("tg", n) for n in options.new]
    each = itertools.product(options.batch, options.depth, filter(lambda kind: kind[1], kinds))
    from ...tasks.bench import Test  # imports JAX

    return [Test(kind, tokens, depth, batch) for batch, depth, (kind, tokens) in each]


def _in_a_process(
    options: argparse.Namespace, threads: int, notes: Console
) -> tuple[int, list[dict[str, Any]]]:
    """Runs the tests in a process with `threads` threads.

    Returns its exit code and its rows of results.
    """
    command = [sys.executable, "-m", "jax_q4k", "bench", options.model, "--json"]
    for name in ("prompt", "new", "depth", "batch", "repetitions"):
        option = {"prompt": "n-prompt", "new": "n-gen", "depth": "n-depth"}.get(name, name)
        command += [f"--{option}", ",".join(map(str, getattr(options, name)))]
    command += ["--cache-dtype", options.cache_dtype]
    command += implementation_arguments(options)
    command += [] if options.keeps_programs else ["--no-cache"]
    environment = os.environ | {THREADS: str(threads)}
    with (
        _status(f"{threads} threads", notes),
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process,
        interrupts.killing(process),
    ):
        printed, _ = process.communicate()
    return process.returncode, json.loads(printed) if process.returncode == 0 else []


def _measured(
    options: argparse.Namespace, tests: list[Test], notes: Console
) -> list[dict[str, Any]]:
    """Runs the tests in this process; returns one row of results per test."""
    from ...tasks import bench  # imports JAX

    model = load_model(options.model, notes)
    (repetitions,) = options.repetitions
    speeds = []
    try:
        for test in tests:
            bench.check(model, test)
        with implementation_of(options):
            for test in tests:
                with _status(test.name, notes):
                    speeds.append(bench.measure(model, test, repetitions, options.cache_dtype))
    except ValueError as error:
        raise UsageError(error) from error
    about = _about(model, options)
    return [about | _row(speed) for speed in speeds]


def _status(text: str, notes: Console) -> contextlib.AbstractContextManager[Any]:
    return notes.status(text) if notes.is_terminal else contextlib.nullcontext()


def _about(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """Returns columns that describe the measurement, with llama-bench's names if it has them."""
    from ...network.build import named_tensors  # imports Flax

    (device,) = model.weights[0].devices()
    import jax

    used = options.implementation or jq.default_implementation(device.platform)
    tensors = named_tensors(model).values()
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    on_cpu = device.platform == "cpu"
    return {
        "version": jq.__version__,
        "jax": jax.__version__,
        "device": device.device_kind,
        "implementation": used,
        "kernels": jq.native.kernels() if used == "native" else None,
        "n_threads": _threads() if on_cpu else None,
        "model_filename": options.model,
        "model_type": f"{model.config.architecture} {_file_type(model)}".strip(),
        "model_size": sum(leaf.nbytes for leaf in model.weights),
        "model_n_params": count,
        "cache_dtype": options.cache_dtype,
    }


def _threads() -> int:
    """Returns the number of threads that XLA's CPU client starts."""
    for name in jq.cpus.THREADS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return jq.cpus.available()


def _file_type(model: Model) -> str:
    from gguf.constants import LlamaFileType

    try:
        name = LlamaFileType(model.metadata.get("general.file_type", -1)).name
    except ValueError:
        return ""
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _row(speed: Speed) -> dict[str, Any]:
    test = speed.test
    return {
        "test": test.name,
        "n_prompt": test.tokens if test.kind == "pp" else 0,
        "n_gen": test.tokens if test.kind == "tg" else 0,
        "n_depth": test.depth,
        "n_sequences": test.batch,
        "avg_ts": speed.mean,
        "stddev_ts": speed.deviation,
        "samples_ts": speed.samples,
        "samples_ns": [round(seconds * 1e9) for seconds in speed.seconds],
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "size", "params", "implementation", "threads", "batch", "test")
    table.add_column("tokens/s", justify="right")
    for row in rows:
        runs_on = f"{row['implementation']} {row['kernels'] or ''}".strip()
        table.add_row(
            printable(row["model_type"]),
            f"{row['model_size'] / 2**20:,.2f} MiB",
            _shortened(row["model_n_params"]),
            runs_on,
            str(row["n_threads"] or ""),
            str(row["n_sequences"]),
            row["test"],
            f"{row['avg_ts']:,.2f} ± {row['stddev_ts']:,.2f}",
        )
    return table


def _shortened(count: int) -> str:
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots tokens per second over depth: prompts above, decoding below, one line per setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (title, found)
        for title, key in (("prompts", "n_prompt"), ("decoding", "n_gen"))
        if (found := [row for row in rows if row[key]])
    ]
    figure, axes = pyplot.subplots(
        len(panels), squeeze=False, figsize=(7, 3.5 * len(panels)), layout="constrained"
    )
    for (title, found), axis in zip(panels, axes[:, 0], strict=True):
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in found:
            name = row["test"].split(" @ ")[0]
            name += f", batch {row['n_sequences']}" if row["n_sequences"] > 1 else ""
            if threads := row["n_threads"]:
                name += f", {threads} thread{'s' * (threads > 1)}"
            lines.setdefault(name, []).append(row)
        for name, line in lines.items():
            values = [[row[key] for row in line] for key in ("n_depth", "avg_ts", "stddev_ts")]
            axis.errorbar(values[0], values[1], yerr=values[2], marker="o", capsize=3, label=name)
        axis.set_xticks(sorted({row["n_depth"] for row in found}))
        axis.set(title=title, xlabel="tokens before", ylabel="tokens/s", ylim=(0, None))
        axis.legend()
    figure.suptitle(printable(rows[0]["model_type"]))
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:] or "png")
    pyplot.close(figure)
    path.write_bytes(picture.getvalue())
