"""Checks on simulated devices that report what other GPUs do."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.cards import CARDS, TOO_OLD, card

import jax_q4k as jq
from jax_q4k.gpu_checks import devices
from jax_q4k.models.cli.gpu_checks import checks, demo, processes, report
from jax_q4k.models.cli.gpu_checks.results import Result, failed, ok
from ptx_kernels.driver import ModuleLoadError
from ptx_kernels.kernels import KERNELS

BY_DRIVER = [name for name, check in checks.CHECKS.items() if not check.on_gpu]


def shown(monkeypatch: pytest.MonkeyPatch, name: str, *about: int) -> dict[str, str]:
    """Returns status by check of a report; checks run in this process, and JAX's are right."""

    def run(check: str, simulated: bool) -> Result:
        if checks.CHECKS[check].on_gpu:
            return ok("right")
        return checks.CHECKS[check].run(True, lambda line: None)

    monkeypatch.setattr(devices, "open_device", lambda simulated: card(name, *about))
    monkeypatch.setattr(processes, "run", run)
    lines: list[str] = []
    report.run_checks(False, lines.append)
    named = ((line.split(" ", 1)[0], line) for line in lines)
    return {check: line[len(check) :].strip() for check, line in named if check in checks.CHECKS}


@pytest.mark.parametrize("name", CARDS)
def test_all_checks_pass(monkeypatch, name):
    rng = np.random.default_rng(0)
    w = jq.quantize(rng.standard_normal((32, 256), np.float32), "Q4_K")
    xs = [jnp.asarray(rng.standard_normal((m, 256), np.float32)) for m in (1, 9, 72)]
    monkeypatch.setattr(demo, "steps", lambda simulated: [lambda: [x @ w.T for x in xs]])
    found = shown(monkeypatch, name, *CARDS[name])
    capability, _ = CARDS[name]
    without_clusters = "not run  " if capability < 90 else "ok  "
    assert found.pop("clusters").startswith(without_clusters), found
    assert set(found) == {"jax", *BY_DRIVER, "generation", "devices"} - {"clusters"}
    assert all(line.startswith("ok ") for line in found.values()), found


def test_nothing_else_runs_on_a_device_that_is_too_old(monkeypatch):
    found = shown(monkeypatch, *TOO_OLD)
    assert found.pop("jax").startswith("ok ")
    assert found.pop("driver").startswith(f"failed   {TOO_OLD[0]}, sm_70")
    assert set(found.values()) == {"not run  because driver failed"}
    assert set(found) == {*BY_DRIVER, "generation", "devices"} - {"driver"}


def test_no_generation_where_jax_uses_no_gpu(monkeypatch):
    """Nor its variants; the driver's checks run."""

    def run(check: str, simulated: bool) -> Result:
        return failed("JAX does not use the GPU") if check == "jax" else ok("right")

    monkeypatch.setattr(processes, "run", run)
    lines: list[str] = []
    assert not report.run_checks(False, lines.append)
    found = {line.split()[0]: line for line in lines[1:-1]}
    assert list(found) == ["jax", *BY_DRIVER, "generation", "devices"]
    for check in ("generation", "devices"):
        assert found[check].endswith("not run  because jax failed")
    assert all(" ok " in found[check] for check in BY_DRIVER)


def test_the_driver_refuses_kernels_of_a_newer_architecture():
    kernel = KERNELS["quantize_q8_1"](rows=2, columns=64)
    with pytest.raises(ModuleLoadError, match="sm_80 is higher than that of this device"):
        card("Tesla T4", *CARDS["Tesla T4"]).time_load(kernel.text)
    card("NVIDIA L4", *CARDS["NVIDIA L4"]).time_load(kernel.text)
