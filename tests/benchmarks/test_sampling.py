"""Measurements of the benchmark of sampling."""

from __future__ import annotations

import pytest

from benchmarks import sampling


@pytest.mark.slow("compiles a program per case")
def test_a_measurement(monkeypatch):
    monkeypatch.setattr(sampling, "SECONDS", 0.0)
    monkeypatch.setattr(sampling, "ROUNDS", 1)
    found = sampling.measure(vocab=1500, rows=2)
    assert found.keys() == sampling.CASES.keys() and min(found.values()) > 0
