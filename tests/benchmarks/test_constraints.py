"""The benchmark of constraints runs, and compares requests of equal lengths."""

from __future__ import annotations

import pytest

from benchmarks import constraints
from jax_q4k import models


@pytest.mark.slow("compiles an engine's programs")
def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "CLIENTS", (1,))
    found = constraints.measure(models.load("demo"), rounds=1)
    assert found["seconds"].keys() == {"regex", "json_schema"} and not found["compilations"]
    kinds = found["clients"][1]
    assert kinds.keys() == {"plain", "regex", "json_schema"}
    assert all(kind["tokens_per_second"] > 0 for kind in kinds.values())
