"""Measurements of the benchmark of MoE feed-forward networks."""

from __future__ import annotations

import pytest
from support.implementations import needs_native

from benchmarks import experts


@pytest.mark.slow("measures")
@needs_native
def test_a_measurement(monkeypatch):
    small = {"SECONDS": 0.0, "ROUNDS": 1, "HIDDEN": 256, "INNER": 256, "TOP": 2, "COPIES": 2}
    for name, value in (
        small | {"EXPERTS": (4,), "TOKENS": (1, 3), "ACTIVATIONS": ("q8_1",)}
    ).items():
        monkeypatch.setattr(experts, name, value)
    rows = experts.measure()
    assert [row["tokens"] for row in rows] == [1, 3]
    for row in rows:
        flops = 2 * 3 * 256 * 256 * 2 * row["tokens"]
        seconds = row["experts_ms"] / 1e3
        assert row["experts_gigaflops"] * seconds == pytest.approx(flops / 1e9)
        size = 256 * 256 * (2 * 144 + 210) / 256  # bytes of one expert
        used = row["experts_gigabytes_per_second"] * seconds * 1e9 / size
        assert used == pytest.approx(2) if row["tokens"] == 1 else 1.99 < used < 4.01
        read = row["dense_gigabytes_per_second"] * row["dense_ms"] * 1e6
        assert read == pytest.approx(size * (2 if row["tokens"] == 1 else 1))
