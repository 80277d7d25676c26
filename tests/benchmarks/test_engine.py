"""Measurements of the benchmark of the engine."""

from __future__ import annotations

import pytest

from benchmarks import engine
from jax_q4k import models


@pytest.mark.slow("compiles the programs of an engine")
def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ANSWER", (4, 8))
    monkeypatch.setattr(engine, "REQUESTS", 1)
    found = engine.measure(models.load("demo"), clients=(2,), rounds=1)
    one = found["clients"][2]["engine"]
    assert min(one.values()) > 0 and one["host_ms_per_step"] < one["step_ms"]
    assert found["clients"][2]["deterministic"]["tokens_per_second"] > 0
    cached = found["cached_prompt"]["engine"]
    assert cached["cached"] < cached["new"]
    assert found["long_prompt"]["engine"].keys() == {"first_token", "gap_p99"}
    assert found["compilations"] == 0 and found["reused_tokens"] >= engine.LONG // 2
