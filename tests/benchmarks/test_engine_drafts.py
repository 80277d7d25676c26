"""The benchmark of an engine's drafts runs."""

from __future__ import annotations

import pytest

from benchmarks import engine_drafts
from jax_q4k import models


@pytest.mark.slow("compiles the programs of two engines")
def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_drafts, "ROWS", (1, 2))
    monkeypatch.setattr(engine_drafts, "TOKENS", 24)
    found = engine_drafts.measure(models.load("demo"), rounds=1)
    assert [*found["costs"]] == [1, 2] and [*found["rows"]] == [1, 2]
    assert all(one["lookup_tokens_per_second"] > 0 for one in found["rows"].values())
