"""Options and fixtures for every test, and where JAX runs them: on the CPU, `gpu`-marked ones on a CUDA device."""

from __future__ import annotations

import ctypes
import functools
import os

import pytest


@functools.cache
def no_gpu_reason() -> str | None:
    """Why no CUDA device can be used, or None where one can. Asks the driver, so that JAX need not be started."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA device: the driver library libcuda.so.1 is not installed"
    if error := driver.cuInit(0):
        return f"no CUDA device: cuInit returned error {error}"
    count = ctypes.c_int()
    if error := driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"no CUDA device: cuDeviceGetCount returned error {error}"
    if count.value == 0:
        return "no CUDA device: the driver counts none"
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX is told not to use CUDA: JAX_PLATFORMS={platforms}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite the golden files under tests/data from what the code gives now")


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports JAX. Without a device its CUDA plugin, which the ahead-of-time tests use, only warns.
    if no_gpu_reason():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes share the device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := no_gpu_reason():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest):
    """On a machine with a GPU, tests without the `gpu` mark still run on the CPU."""
    if no_gpu_reason():
        yield
        return
    import jax

    on_gpu = request.node.get_closest_marker("gpu") is not None
    with jax.default_device(jax.devices("cuda" if on_gpu else "cpu")[0]):
        yield


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")
