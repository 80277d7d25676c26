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
    one = found["clients"][2]
    assert min(one.values()) > 0 and one["host_ms_per_step"] < one["step_ms"]
    assert found["cached_prompt"]["cached"] < found["cached_prompt"]["new"]
    assert found["long_prompt"].keys() == {"first_token", "gap_p99"}
    assert found["compilations"] == 0
