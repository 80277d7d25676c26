"""Variants of generation, which `doctor --gpu` tries after generation failed."""

from __future__ import annotations

import pytest

from jax_q4k.models.cli.gpu_checks import checks, generation, processes, report
from jax_q4k.models.cli.gpu_checks.results import Result, failed, ok
from ptx_kernels import simulator

VARIANTS = [name for name, check in checks.CHECKS.items() if check.without]
GENERATION = ["generation", *VARIANTS]


def shown(monkeypatch: pytest.MonkeyPatch, result, names=GENERATION) -> list[str]:
    """Returns the report of some checks, each with the result `result(name)`."""
    chosen = {name: checks.CHECKS[name] for name in names}
    monkeypatch.setattr(report, "CHECKS", chosen)
    monkeypatch.setattr(processes, "run", lambda name, simulated: result(name))
    lines: list[str] = []
    good = report.run_checks(True, lines.append)
    assert good == (lines[-1] == "no check failed")
    return lines[2:]


def statuses(lines: list[str]) -> dict[str, str]:
    return {
        name: line.removeprefix(name).split()[0]
        for name in GENERATION
        for line in lines
        if line.startswith(f"{name} ")
    }


def test_no_check_starts_after_the_limit_of_all(monkeypatch):
    monkeypatch.setattr(report, "SIMULATED_WHOLE_LIMIT", 0)
    lines = shown(monkeypatch, lambda name: ok("right"))
    assert statuses(lines) == dict.fromkeys(GENERATION, "failed")
    assert "did not start: the checks before it took 0 seconds" in lines[0]
    assert lines[-1] == "a check failed"


def test_no_variant_runs_without_a_failure(monkeypatch):
    assert statuses(shown(monkeypatch, lambda name: ok("right"))) == {"generation": "ok"}


@pytest.mark.parametrize("helps", VARIANTS)
def test_the_variant_that_works_is_advised(monkeypatch, helps):
    def result(name: str) -> Result:
        return ok("right") if name == helps else failed("wrong")

    lines = shown(monkeypatch, result)
    assert statuses(lines) == {n: "ok" if n == helps else "failed" for n in GENERATION}
    advice = checks.CHECKS[helps].advice
    given = [each.advice for each in checks.CHECKS.values() if each.advice in "\n".join(lines)]
    assert advice and set(given) == {advice, ""}


@pytest.mark.slow("simulates the demo model several times")
def test_a_wrong_kernel(monkeypatch):
    """Mat-vecs are wrong in the simulator: only plain JAX generates the right tokens."""
    right = simulator.run

    def run(kernel, *operands, **options):
        results = right(kernel, *operands, **options)
        if "matvec" in kernel.name:
            results[0][...] = -results[0]
        return results

    monkeypatch.setattr(simulator, "run", run)
    monkeypatch.setattr(generation, "SIMULATED", ("The sea", 1))
    names = ["generation", "no prefetch", "no kernels"]

    def result(name: str) -> Result:
        return checks.CHECKS[name].run(True, lambda line: None)

    lines = shown(monkeypatch, result, names)
    assert list(statuses(lines).values()) == ["failed", "failed", "ok"], lines
    assert "jq.implementation('xla')" in "\n".join(lines)
