"""Kernels that the CUDA driver does not load: the error says where to look."""

from __future__ import annotations

import collections
import re
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import custom_call, models
from jax_q4k.models import cli
from jax_q4k.models.engine.executor import Executor
from ptx_kernels import driver
from ptx_kernels.simulated_cuda import SimulatedDevice

LOADS = (
    "INTERNAL: Failed to load PTX text as a module: CUDA_ERROR_INVALID_PTX: a PTX JIT compilation "
    "failed",
    "INTERNAL: Failed to load in-memory CUBIN (compiled for a different GPU?).: CUDA_ERROR_UNKNOWN",
    "INTERNAL: CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with ...",
    "INTERNAL: CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available",
)


@pytest.fixture(params=LOADS)
def unloadable(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """XLA's message of every program."""

    def fails(*_: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError(request.param)

    monkeypatch.setattr(Executor, "run", fails)
    return str(request.param)


def test_generation_names_the_command_that_shows_which_one(unloadable: str) -> None:
    with pytest.raises(
        jq.KernelLoadError, match="jax-q4k doctor --gpu shows which kernels load"
    ) as raised:
        models.generate(models.load("demo"), "The sea", max_new_tokens=2)
    assert unloadable in str(raised.value)
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_so_does_the_command_line(
    unloadable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["generate", "demo", "-p", "The sea", "-n", "2", "--no-cache"]) == cli.FAILURE
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "jax-q4k doctor --gpu shows which kernels load" in printed


def test_logits_name_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError(LOADS[0])

    model = models.load("demo")
    monkeypatch.setattr(model.ready, "get", lambda key, make: fails)
    with pytest.raises(jq.KernelLoadError):
        model.logits([[1, 2]])


def test_the_kernel_and_the_drivers_log_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is there, and the program was compiled in this process."""
    w = jq.quantize(np.ones((64, 256), np.float32), "Q8_0")
    monkeypatch.setattr(custom_call, "launched_texts", collections.deque(maxlen=2))
    traced = jax.jit(jq.matmul).trace(jnp.ones((1, 256)), w)
    traced.lower(lowering_platforms=("cuda",))
    (text,) = custom_call.launched_texts

    def explained(**options: Any) -> str:
        monkeypatch.setattr(driver, "Device", lambda: SimulatedDevice(**options))
        with pytest.raises(jq.KernelLoadError) as raised, jq.explaining_loads():
            raise jax.errors.JaxRuntimeError(LOADS[0])
        return str(raised.value)

    found = explained(refuse=lambda found: "ptxas: line 7" if found == text else None)
    assert re.fullmatch(
        r"the CUDA driver did not load a kernel of this program: kernel matvec_q8_0_m1 \(PTX .*"
        r"does not load on H200 .*driver for CUDA 13.0.*the driver's log: ptxas: line 7",
        found,
    )
    assert LOADS[0] in explained()  # the driver loads it alone


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="^RESOURCE"), jq.explaining_loads():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
