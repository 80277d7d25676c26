"""The count of tensor cores' products, on one pair of Configs."""

from __future__ import annotations

import json

from benchmarks import tensor_cores
from ptx_kernels.tuning import INT8_SLOTS


def test_writes_bounds_and_errors(monkeypatch, tmp_path, capsys):
    few = {key: value for key, value in tensor_cores.CONFIGS.items() if key[0] == "Q4_K"}
    monkeypatch.setattr(tensor_cores, "CONFIGS", few)
    assert tensor_cores.main([str(tmp_path / "tensor_cores.json")]) == 0
    rows = {row["products"]: row for row in json.loads((tmp_path / "tensor_cores.json").read_text())["rows"]}
    assert set(rows) == {"int8", "f16", "bf16"}
    assert all(row["spill_bytes"] == 0 and 0 < row["hot_loop"] < row["step"] for row in rows.values())
    assert rows["f16"]["nmse"] <= 1e-6 < rows["bf16"]["nmse"] < rows["int8"]["nmse"]
    h200 = {products: max(row["clocks"]["H200"].values()) for products, row in rows.items()}
    assert h200["int8"] >= 1.25 * h200["f16"]
    assert abs(rows["int8"]["step"] - INT8_SLOTS["Q4_K"]) <= 1
    assert "Q4_K" in capsys.readouterr().out
