"""The benchmark of gradients measures what it says."""

from __future__ import annotations

import pytest

from benchmarks import gradients


@pytest.mark.slow("measures")
def test_a_measurement(monkeypatch):
    monkeypatch.setattr(gradients, "ROUNDS", 1)
    found = {row["operation"]: row for row in gradients.measure(256, 256, 9)}
    assert {*found} == {"mlp", "gated_matmul", "qkv_matmul", "causal_attention"}
    assert all(row["ms"] > 0 and row["gradient_ms"] > 0 for row in found.values())
    # of each matrix: int8 activations and the product, and its decoding on the way back
    assert found["mlp"]["gradient_launches"] == 9
    assert found["causal_attention"]["gradient_launches"] == 0
