"""Measurements of the benchmark of float products."""

from __future__ import annotations

import pytest
from support.implementations import needs_native

from benchmarks import float_products
from jax_q4k import native, quantizers


@pytest.mark.slow("measures")
@needs_native
def test_a_measurement(monkeypatch):
    monkeypatch.setattr(float_products, "SECONDS", 0.0)
    monkeypatch.setattr(float_products, "ROUNDS", 1)
    monkeypatch.setattr(float_products, "SIZES", (256,))
    monkeypatch.setattr(float_products, "ROWS", (2,))
    monkeypatch.setattr(float_products, "TOKENS", 4)
    before = native.kernels()
    try:
        assert float_products.measure("none of them") is None
        found = float_products.measure("portable")
    finally:
        native.select(before)
    assert found["kernels"] == "portable" and found["demo_tokens_per_second"] > 0
    assert {row["format"] for row in found["products"]} == {
        *quantizers.names(),
        "F32",
        "F16",
        "BF16",
    }
    assert all(row["native"] > 0 and row["dense"] > 0 for row in found["products"])
    assert [row["format"] for row in found["products"] if "xla" in row] == ["Q4_K", "BF16"]
