"""Kernels that the CUDA driver does not load: the error says where to look."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.engine.executor import Executor

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


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="^RESOURCE"), jq.explaining_loads():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
