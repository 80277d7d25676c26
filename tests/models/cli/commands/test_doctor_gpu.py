"""`jax-q4k doctor --gpu`: its report, and the checks on a simulated device."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest

import jax_q4k as jq
from jax_q4k import Selection, environment, models
from jax_q4k.gpu_checks import devices
from jax_q4k.gpu_checks.kernels import Comparison
from jax_q4k.models import cli
from jax_q4k.models.cli.gpu_checks import checks, demo, generation, processes
from jax_q4k.models.cli.gpu_checks.results import Result, failed, not_run, ok
from ptx_kernels.driver import DriverError, ModuleLoadError
from ptx_kernels.simulated_cuda import SimulatedDevice


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Result]:
    """Results by the checks' names; those that are not in it are right."""
    found: dict[str, Result] = {}

    def run(name: str, *, simulated: bool) -> Result:
        return found.get(name, ok(f"a finding, {simulated=}"))

    monkeypatch.setattr(processes, "run", run)
    return found


def test_without_a_gpu(capsys, results, monkeypatch):
    monkeypatch.setattr(environment, "cuda_devices", lambda: 0)
    monkeypatch.setattr(environment, "cuda_driver", lambda: "there is no driver")
    assert cli.main(["doctor", "--gpu"]) == cli.FAILURE
    assert capsys.readouterr().err == (
        "error: no GPU to check: there is no driver; --dry-run runs the checks in the simulator\n"
    )
    assert cli.main(["doctor", "--dry-run"]) == cli.FAILURE
    assert capsys.readouterr().err == "error: --dry-run is for --gpu\n"


def test_a_report(capsys, results, monkeypatch):
    monkeypatch.setattr(environment, "cuda_devices", lambda: 1)
    results["clusters"] = not_run("no clusters here")
    assert cli.main(["doctor", "--gpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"jax-q4k {jq.__version__}, Python ")
    always = [name for name, check in checks.CHECKS.items() if check.without is None]
    assert [line.split()[0] for line in lines[1:-1]] == always
    assert lines[1].split(maxsplit=2)[1:] == ["ok", "a finding, simulated=False"]
    assert [line for line in lines if "not run  no clusters here" in line]
    assert lines[-1] == "no check failed"


def test_a_failed_check(capsys, results):
    results["kernels"] = failed("18 of 19 operations", "mlp (matvec): NMSE 3.0e-01")
    assert cli.main(["doctor", "--gpu", "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert "failed   18 of 19 operations\n" in out and " mlp (matvec): NMSE 3.0e-01\n" in out
    assert "a finding, simulated=True" in out and out.endswith("a check failed\n")


def test_a_search_for_the_part_that_fails(capsys, results):
    results["generation"] = failed("3 of 32 tokens")
    results["no prefetch"] = failed("3 of 32 tokens")
    assert cli.main(["doctor", "--gpu", "--dry-run"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = [line.startswith("no clusters") for line in lines].index(True)
    assert "ok" in lines[at] and "write jq.implementation(clusters=False)" in lines[at + 1]
    assert re.match("no prefetch +failed", lines[at + 2])
    assert re.match("no decoded products +ok", lines[at + 3])
    assert "--no-decoded-products" in lines[at + 4]
    assert re.match("no graph +ok", lines[at + 5]) and "please report it" in lines[at + 6]
    assert lines[at + 7].startswith("no kernels")


@pytest.mark.parametrize(
    "part, selected",
    [
        (None, Selection("ptx", "f32")),
        ("clusters", Selection("ptx", "f32", clusters=False)),
        ("prefetch", Selection("ptx", "f32", prefetch=False)),
        ("decoded products", Selection("ptx", "f32", decoded_products=False)),
        ("graph", Selection("ptx", "f32", graphs=False)),
        ("kernels", Selection("xla", "f32")),
    ],
)
def test_parts_are_switched_off(monkeypatch, part, selected):
    model = models.load("demo")
    model.network = dataclasses.replace(model.network, on_gpu=True)

    class Stop(Exception):
        pass

    def stopping(model: Any, *_: Any, **__: Any) -> Any:
        assert jq.current_selection() == selected
        assert model.network.on_gpu
        raise Stop

    monkeypatch.setattr(models, "load", lambda name: model)
    monkeypatch.setattr(models, "generate", stopping)
    with pytest.raises(Stop):
        generation.generates(False, lambda line: None, part)


def test_generation_must_run_on_a_gpu():
    assert generation.generates(False, lambda line: None) == failed(
        "nothing ran, because JAX put the demo model on no GPU"
    )


@pytest.mark.slow("compiles the demo model in plain JAX")
def test_tokens_are_compared(monkeypatch):
    def generated(*tokens: int) -> Result:
        output = SimpleNamespace(tokens=list(tokens), timings=SimpleNamespace(tokens_per_second=9))
        monkeypatch.setattr(models, "generate", lambda *_, **__: output)
        monkeypatch.setattr(generation, "_is_on_gpu", lambda model: True)
        monkeypatch.setattr(generation, "GENERATED", ("The sea", 2))
        return generation.generates(False, lambda line: None)

    assert generated(327, 260).line == (
        "tokens with f32 and default activations are those of plain JAX (9 and 9 tokens/s)"
    )
    assert generated(327, 261) == failed(
        "1 of 2 tokens with f32 activations are not those of plain JAX, from token 2 on"
    )


def test_one_gpu_copies_nothing(monkeypatch):
    monkeypatch.setattr(environment, "cuda_devices", lambda: 1)
    assert checks.CHECKS["devices"].run(False, lambda line: None) == not_run("there is one GPU")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs a check on a simulated device: (name, **its options)."""

    def run(name: str, device: type = SimulatedDevice, **options: Any) -> Result:
        opened = functools.partial(device, **options)
        monkeypatch.setattr(devices, "open_device", lambda simulated: opened())
        return checks.CHECKS[name].run(True, lambda line: None)

    return run


OLD = {"COMPUTE_CAPABILITY_MAJOR": 8, "COMPUTE_CAPABILITY_MINOR": 9}


def test_drivers(on):
    assert on("driver").status == "ok"
    old = on("driver", version=12020)
    assert old.status == "ok" and "older than CUDA 12.3" in old.details[0]
    too_old = on("driver", version=11080)
    assert too_old.status == "failed" and "install a newer driver" in too_old.details[0]


def test_memory(on):
    assert on("memory").status == "ok"
    assert on("memory", free=1 << 20).status == "failed"


def test_clusters(on):
    places = "clusters at once: 66 of 2 blocks, 31 of 4 blocks, 15 of 8 blocks"
    assert on("clusters") == ok("clusters have the right results, also in a CUDA graph", places)
    assert on("clusters", attributes=OLD) == not_run("sm_89 has no clusters, and kernels use none")
    wrong = on("clusters", executes=False)
    assert wrong.line == "clusters of 2, 4, 8 blocks have wrong results in a stream"
    assert "jq.implementation(clusters=False)" in wrong.details[0]


class WrongInGraphs(SimulatedDevice):
    def run(self, kernel, *operands, graph=False):
        results = super().run(kernel, *operands, graph=graph)
        return tuple(result + 1 for result in results) if graph else results


def test_graphs(on):
    assert on("graphs").status == "ok"
    assert on("graphs", WrongInGraphs).status == "failed"
    assert "in a CUDA graph" in on("clusters", WrongInGraphs).line


def test_a_summary_of_kernels():
    right = Comparison("linear", ("matvec",), ("a",), 2e-7)
    wrong = Comparison("mlp", ("gated", "matvec"), ("b", "c"), 3e-1)
    unloadable = Comparison("argmax", ("argmax",), ("d",), error=ModuleLoadError("bad", "a", ""))
    lost = Comparison("argmax", ("argmax",), ("d",), error=DriverError("ILLEGAL_ADDRESS"))
    assert checks.summary([right]).line.endswith("NMSE up to 2.0e-07 (linear)")
    found = checks.summary([right, wrong, unloadable])
    assert found.status == "failed"
    assert found.line.startswith("1 of 3 operations, with 4 kernels of the demo model")
    assert found.details == ("mlp (gated, matvec): NMSE 3.0e-01", "argmax (argmax): bad")
    assert checks.summary([lost]).details[1].startswith("later kernels did not run")
    assert checks.summary([]).status == "failed"


@functools.cache
def kernels_of_checks(device: str, dry: bool) -> dict[str, str]:
    """Returns kernels of the check `kernels`: text -> name."""
    found = {}
    for steps in demo.steps(dry):
        for call in jq.explain(steps, platform="cuda", device=device).calls:
            found |= {kernel.text: kernel.name for kernel in call.kernels}
    return found


@pytest.mark.slow("chooses the kernels of programs of the demo model")
@pytest.mark.parametrize("length", [8, 40, 100, 400])
@pytest.mark.parametrize("device", ["H200", "Tesla T4"])
def test_the_checks_run_all_kernels_of_generation(device, length):
    """Compares texts for a short prompt; other texts depend on the number of rows."""
    dry = length == 8
    programs = models.abstract_programs(
        models.load("demo"), prompt_length=length, capacity=9 if dry else 512
    )
    found: dict[str, str] = {}
    for function, arguments in programs.values():
        for call in jq.explain(function, *arguments, platform="cuda", device=device).calls:
            found |= {kernel.text: kernel.name for kernel in call.kernels}
    run = kernels_of_checks(device, dry)
    assert len(found) > 12
    assert set(found.values()) - set(run.values()) == set()
    assert not dry or set(found) <= set(run)


def test_generation_reads_a_prompt_that_has_decoded_products():
    tokenizer = models.load("demo").tokenizer
    assert 64 < len(tokenizer.encode(generation.GENERATED[0])) <= 128


@pytest.mark.slow("runs every check in a process, with kernels in the simulator")
def test_a_dry_run(capsys):
    assert cli.main(["doctor", "--gpu", "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[2:-1] if line[0] != " "]
    found = dict(line.split(maxsplit=1) for line in lines)
    assert all(line.startswith("ok ") for line in found.values())
    assert "19 of 19 operations, with 26 kernels" in found["kernels"]
    assert "tokens with f32 activations are those of plain JAX" in found["generation"]
    assert re.search(r"the same products on \d devices", found["devices"])
