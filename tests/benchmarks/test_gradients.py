"""Measurements of the benchmark of gradients."""

from __future__ import annotations

import pytest

from benchmarks import gradients


@pytest.mark.slow("measures")
def test_a_measurement(monkeypatch):
    monkeypatch.setattr(gradients, "ROUNDS", 1)
    found = {row["operation"]: row for row in gradients.measure(256, 256, 9)}
    assert {*found} == {"mlp", "gated_matmul", "qkv_matmul", "causal_attention"}
    assert all(row["ms"] > 0 and row["gradient_ms"] > 0 for row in found.values())
    # per matrix: int8 activations, the product, and decoding for the backward pass
    assert found["mlp"]["gradient_launches"] == 9
    assert found["causal_attention"]["gradient_launches"] == 0
