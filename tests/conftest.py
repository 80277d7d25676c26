"""Options and fixtures for all tests; runs tests marked `gpu` on CUDA and the rest on the CPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support import budget, memory, tiers, timings
from support.paths import cache_folder

from ptx_kernels import driver
from ptx_kernels.machine_code import disk_cache

#: Module -> the state of its `rng` right after import.
_RANDOM_STATES: dict[Any, Any] = {}
_LEFT_OUT = pytest.StashKey[Counter[str]]()


@functools.cache
def no_gpu_reason() -> str | None:
    """Returns why no CUDA device can be used, or None; asks the driver before JAX is imported."""
    try:
        if driver.count_devices() == 0:
            return "no CUDA device: the driver counts none"
    except driver.DriverError as error:
        return f"no CUDA device: {error}"
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX is told not to use CUDA: JAX_PLATFORMS={platforms}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the golden files under tests/data from what the code gives now",
    )
    parser.addoption(
        "--optimized", action="store_true", help="XLA optimizes programs as it does for users"
    )
    tiers.add_options(parser)
    budget.add_options(parser)
    parser.addoption("--timings", type=Path, metavar="FILE", help="write every test's seconds here")


def pytest_configure(config: pytest.Config) -> None:
    # Must run before JAX is imported: its CUDA plugin, installed for ahead-of-time compilation,
    # warns if there is no device.
    if no_gpu_reason():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # test processes share it
    _set_xla_flags(optimized=config.getoption("--optimized"))
    _keep_compiled_programs(config)
    _keep_machine_code(config)
    _keep_bytecode()
    reports = not hasattr(config, "workerinput")
    if reports:
        config.pluginmanager.register(timings.Timings(config.getoption("--timings")))
    config.pluginmanager.register(memory.Bound())
    if (seconds := config.getoption("--budget")) is not None:
        config.pluginmanager.register(budget.Budget(seconds, reports))


def _set_xla_flags(optimized: bool) -> None:
    """Gives the CPU eight devices, for sharded arrays, and turns most XLA optimizations off.

    Most programs of tests run once. Optimizing them took half of the suite's time.
    """
    flags = ["--xla_force_host_platform_device_count=8"]
    if not optimized and no_gpu_reason():
        flags += [
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",
        ]
        major, minor = version("jaxlib").split(".")[:2]
        if (int(major), int(minor)) < (0, 11):  # later versions do not know the flag and abort
            flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def _keep_compiled_programs(config: pytest.Config) -> None:
    """Points JAX's compilation cache to a private folder that is removed at the end.

    The folder starts with the entries of earlier runs. JAX writes entries in place, so a process
    could read part of an entry that another one writes. New entries move to the shared folder at
    the end.
    """
    kept = cache_folder() / "programs"
    kept.mkdir(parents=True, exist_ok=True)
    for left in cache_folder().glob("programs-of-a-run-*"):  # left by a killed process
        if left.stat().st_mtime < time.time() - 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="programs-of-a-run-", dir=cache_folder()))
    for entry in kept.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile, or a file system without links
            os.link(entry, folder / entry.name)
    config.add_cleanup(functools.partial(_give_back, folder, kept))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"  # the folder is part of keys


def _give_back(folder: Path, kept: Path) -> None:
    for entry in folder.iterdir():
        if not (kept / entry.name).exists():
            entry.replace(kept / entry.name)
    shutil.rmtree(folder, ignore_errors=True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names parameters in test ids: `rows=4-causal=True`."""
    return f"{argname}={val}" if isinstance(val, int | float | complex | None) else None


def pytest_collection_finish() -> None:
    """Freezes imported objects and runs Python's garbage collector a tenth as often.

    Tracing and simulating make many small objects, of which almost none is in a cycle. Scanning all
    of JAX's modules each time took a tenth of the suite.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_LEFT_OUT] = tiers.select(config, items)
    if config.getoption("--budget") is not None:
        budget.first_those_left_over(items)
    if reason := no_gpu_reason():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _keep_machine_code(config: pytest.Config) -> None:
    """Caches the output of ptxas and nvdisasm between test runs."""
    folder = cache_folder() / "machine-code"
    os.environ.setdefault(disk_cache.VARIABLE, str(folder))
    if not hasattr(config, "workerinput"):
        disk_cache.remove_oldest(folder, most_bytes=1 << 30)
        disk_cache.remove_oldest(cache_folder() / "programs", most_bytes=2 << 30)


def _keep_bytecode() -> None:
    """Redirects bytecode to the test cache if Python was told to write none.

    Compiling the tests and, in every process that a test starts, the packages takes seconds.
    """
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(cache_folder() / "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or Python was started with -B


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Copies an xdist worker's counts of left-out tests, which are the same in all workers."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = Counter(left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        output = session.config.workeroutput
        output["left_out"] = dict(session.config.stash.get(_LEFT_OUT, Counter()))
        output["megabytes"] = timings.own_megabytes()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints figures recorded by `record_property("figure", line)` and the tests left out."""
    figures = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        for line in sorted(figures):
            terminalreporter.line(line)
    config = terminalreporter.config
    for line in tiers.summary(config.getoption("--tier"), config.stash.get(_LEFT_OUT, Counter())):
        terminalreporter.line(line)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if mark := item.get_closest_marker("slow"):
        item.user_properties.append(("slow", mark.args[0]))  # for `--timings`
    _restart_random_numbers(item)


def _restart_random_numbers(item: pytest.Item) -> None:
    """Resets a module's `rng` to its initial state before each test."""
    if generator := getattr(getattr(item, "module", None), "rng", None):
        bits = generator.bit_generator
        bits.state = _RANDOM_STATES.setdefault(item.module, bits.state)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest):
    """Runs tests without the `gpu` mark on the CPU even if the machine has a GPU."""
    if no_gpu_reason():
        yield
        return
    import jax

    on_gpu = request.node.get_closest_marker("gpu") is not None
    with jax.default_device(jax.devices("cuda" if on_gpu else "cpu")[0]):
        yield


@pytest.fixture
def exact():
    """Keeps activations of products in float32 in every implementation."""
    from jax_q4k import implementation

    with implementation(activations="f32"):
        yield


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")
