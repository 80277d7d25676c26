"""Measurements of the benchmark of the quantizers."""

from __future__ import annotations

from benchmarks import quantizers


def test_a_measurement(monkeypatch):
    monkeypatch.setattr(quantizers, "ROWS", 16)
    monkeypatch.setattr(quantizers, "REPEATS", 1)
    row = quantizers.measure("Q8_0")
    assert row["format"] == "Q8_0" and row["cores"] >= 1
    assert row["million_per_second"] > 0 and row["million_per_cpu_second"] > 0
    assert 1e-3 < row["rmse"] < 1e-2
