"""`jax-q4k doctor`: shows which kernels run on this machine, and what is missing for others."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jax_q4k as jq
from jax_q4k.gpu_checks import plugin

from ..gpu_checks.checks import CHECKS
from ..gpu_checks.report import run_checks
from ..gpu_checks.results import failed
from ..output import UsageError, devices, table_console

BROKEN = 1
_PACKAGES = ("jax", "jaxlib", "numpy", "flax")

#: Kernels -> instruction sets that they need, by the names that Linux uses.
NEEDS = {
    "avx512": ("avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"),
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimddp", "asimdhp"),
    "portable": (),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what runs here, and why",
        description="Show which kernels run on this machine, and which missing parts would enable "
        "more. Exit code 1: something is broken.",
    )
    parser.set_defaults(command=_doctor)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="run every kernel of the demo model on the GPU, compare with plain JAX, and print a "
        "report to paste",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --gpu: without a GPU, by the simulator"
    )
    parser.add_argument("--gpu-check", choices=CHECKS, metavar="NAME", help=argparse.SUPPRESS)


def _doctor(options: argparse.Namespace, notes: Console) -> int:
    if options.gpu_check:
        return _run_check(options.gpu_check, options.dry_run)
    if options.gpu:
        return _check_gpu(options.dry_run)
    if options.dry_run:
        raise UsageError("--dry-run is for --gpu")
    return _overview(notes)


def _check_gpu(dry_run: bool) -> int:
    if not dry_run and not jq.environment.cuda_devices():
        raise UsageError(
            f"no GPU to check: {jq.environment.cuda_driver()}; --dry-run runs the checks in the "
            "simulator"
        )
    return 0 if run_checks(dry_run, functools.partial(print, flush=True)) else BROKEN


def _run_check(name: str, simulated: bool) -> int:
    """Runs one check in this process and prints its result as JSON."""
    try:
        result = CHECKS[name].run(simulated, functools.partial(print, file=sys.stderr, flush=True))
    except Exception as error:
        traceback.print_exc()
        result = failed(f"{type(error).__name__}: {error}")
    print(result.as_json(), flush=True)
    os._exit(0)  # after a fault of the device, objects that use it cannot be freed


def _overview(notes: Console) -> int:
    unused = plugin.problem(jq.environment.installed())  # first, as it quotes how JAX starts
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_versions(), *_cpu(), *_gpu(), *_defaults()):
        table.add_row(name, escape(value))
    table_console().print(table)
    if (cache := _jit_cache()) and cache.problem:
        notes.print(
            "[bold yellow]warning:[/] the CUDA driver does not cache machine code, and compiles "
            f"every kernel again in every process: {escape(cache.problem)}",
            soft_wrap=True,
        )
    broken = _broken() or jq.environment.driver_problem() or unused
    if broken:
        notes.print(f"[bold red]broken:[/] {escape(broken)}", soft_wrap=True)
    return BROKEN if broken else 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "jax-q4k", f"{jq.__version__} in {Path(jq.__file__).parent}"
    yield "Python", f"{platform.python_version()} in {sys.prefix}"
    yield from ((name, importlib.metadata.version(name)) for name in _PACKAGES)
    yield "machine", f"{platform.system()} {platform.release()}, {platform.machine()}"


def instruction_sets() -> frozenset[str]:
    """Returns the processor's instruction sets by Linux's names; empty without /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    values = (
        line.split(":", 1)[1]
        for line in lines
        if line.split(":")[0].strip() in ("flags", "Features")
    )
    return frozenset(next(values, "").split())


def _cpu() -> Iterator[tuple[str, str]]:
    has = instruction_sets()
    known = sorted({name for needed in NEEDS.values() for name in needed} & has)
    yield "instruction sets", ", ".join(known) or "none that the kernels use"
    yield "threads of XLA", _threads()
    yield "C++ compiler", _compiler()
    build = jq.native.build
    path, problem = jq.native.library_path(), jq.native.problem()
    yield (
        "CPU kernels",
        problem or f"{path}{', built from the sources next to it' if build.fingerprint() else ''}",
    )
    used, compiled = jq.native.kernels(), jq.native.compiled()
    for name in build.kernels():
        missing = [need for need in NEEDS[name] if need not in has]
        if name == used:
            state = "in use"
        elif missing:
            state = f"not in use: this processor lacks {', '.join(missing)}"
        elif used is None:
            state = "not in use: the library is not"
        elif name not in compiled:
            state = "not in the library: its compiler does not support them"
        elif jq.native.named():
            state = f"not in use: ${jq.native.VARIABLE} is {used}"
        else:
            state = f"not in use: {used} is faster"
        yield f"  {name}", state


def _threads() -> str:
    """Describes how many threads XLA's CPU client starts, and why."""
    if (quota := jq.cpus.limited_to()) is not None:
        return f"{jq.cpus.available()}, for a CPU quota of {quota:g}"
    for name in jq.cpus.THREADS:
        if os.environ.get(name, "").isdecimal():
            return f"{os.environ[name]}, set by ${name}"
    return f"{jq.cpus.available()}, the CPUs that this process may use"


def _compiler() -> str:
    command = jq.native.build.compiler()
    if not command or shutil.which(command[0]) is None:
        return f"not found: {' '.join(command)}; set $CXX to use another"
    try:
        printed = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)} does not run: {error}"
    return f"{' '.join(command)}: {next(iter(printed.splitlines()), 'unknown version')}"


def _gpu() -> Iterator[tuple[str, str]]:
    plugins = plugin.installed_plugins().items()
    found = ", ".join(f"{plugin.PLUGINS[cuda]} {version}" for cuda, version in plugins)
    missing = f"not installed; {plugin.advice(jq.environment.installed())}"
    yield "CUDA plugin", found or missing
    yield "PTX of kernels", jq.environment.kernel_ptx()
    yield "CUDA driver", jq.environment.cuda_driver()
    if cache := _jit_cache():
        yield (
            "CUDA driver's cache",
            f"none: {cache.problem}" if cache.problem else f"{cache.folder}",
        )
    yield "ptxas", jq.environment.ptxas()


def _jit_cache() -> jq.environment.JitCache | None:
    """Returns the CUDA driver's cache; None if there is neither a GPU nor JAX's plugin for one."""
    if jq.environment.cuda_devices() or plugin.installed_plugins():
        return jq.environment.jit_cache()
    return None


def _defaults() -> Iterator[tuple[str, str]]:
    for name in ("JAX_PLATFORMS", jq.native.VARIABLE):
        yield f"${name}", os.environ.get(name) or "not set"
    try:
        found = devices()
        yield (
            "devices of JAX",
            ", ".join(f"{d.platform}: {d.device_kind} ({d.id})" for d in found) + _left_out(),
        )
        yield "pages of an engine", _engine_memory(found)
    except RuntimeError as error:
        yield "devices of JAX", f"none: {error}"
    on_cpu = jq.default_implementation("cpu")
    if on_cpu == "native":
        reason = jq.native.problem() or f"C++ kernels for {jq.native.kernels()}"
    else:
        reason = "plain JAX, which is slow"
    yield "default on cpu", f"{on_cpu}: {reason}"
    problem = jq.environment.gpu_problem()
    yield "default on cuda", f"xla: {problem}" if problem else "ptx: generated PTX kernels"


def _left_out() -> str:
    """Returns a note if the user keeps JAX from using the GPU."""
    named = plugin.platforms_without_gpu()
    if named and jq.environment.cuda_devices():
        return f"; $JAX_PLATFORMS={named} leaves out the GPU"
    return ""


def _engine_memory(devices: list[Any]) -> str:
    """Returns how much memory an Engine takes for KV pages if `pages` is not given."""
    from ...engine import memory, sizing

    free = memory.free_bytes_of(devices)
    if free is None:
        return "unknown free memory: set Engine(pages=...)"
    share = sizing.GPU_SHARE if devices[0].platform == "gpu" else sizing.CPU_SHARE
    return f"up to {share * free / 2**30:.1f} GiB, {share:.0%} of the free memory"


def _broken() -> str | None:
    """Returns what is wrong with JAX's device or the CPU kernels; None if both work."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    try:
        devices()
    except RuntimeError as error:
        return f"JAX has no device: {error}"
    if not jq.native.available():
        asked_for = jq.native.named() or jq.native.library_path().exists()
        return jq.native.problem() if asked_for else None
    try:
        cpu = devices("cpu")[0]
    except RuntimeError:  # $JAX_PLATFORMS leaves it out
        return None
    x = np.linspace(-1, 1, 256, dtype=np.float32)[None]
    with jax.default_device(cpu):
        try:
            w = jq.quantize(np.linspace(-3, 5, 16 * 256, dtype=np.float32).reshape(16, 256), "Q8_0")
            got, want = (
                jq.implementation(name)(jq.matmul)(x, w, activations="f32")
                for name in ("native", "xla")
            )
        except jax.errors.JaxRuntimeError as error:
            return f"{jq.native.build.LIBRARY} fails: {error}"
        if not jnp.allclose(got, want, rtol=1e-4, atol=1e-4):
            difference = jnp.max(jnp.abs(got - want))
            library = jq.native.build.LIBRARY
            return f"{library} computes a product that differs from plain JAX's by {difference}"
    return None
