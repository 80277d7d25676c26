"""Counts of tensor-core products, for one format.

`tuning` and the docs state the same results.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.paths import ROOT

from benchmarks import tensor_cores
from benchmarks.common import RESULTS
from ptx_kernels import formats
from ptx_kernels.devices import target
from ptx_kernels.kernels.gemm import GemmConfig, fused_gemm_rule, gemm_rule

DOCS = ROOT / "docs" / "kernel-tables.md"


@pytest.mark.slow("measures")
def test_writes_bounds_and_errors(monkeypatch, tmp_path, capsys):
    few = {key: value for key, value in tensor_cores.CONFIGS.items() if key[0] == "Q4_K"}
    monkeypatch.setattr(tensor_cores, "CONFIGS", few)
    assert tensor_cores.main([str(tmp_path / "tensor_cores.json")]) == 0
    rows = {
        row["products"]: row
        for row in json.loads((tmp_path / "tensor_cores.json").read_text())["rows"]
    }
    assert set(rows) == {"int8", "f16", "bf16"}
    assert all(
        row["spill_bytes"] == 0 and 0 < row["hot_loop"] < row["step"] for row in rows.values()
    )
    assert rows["f16"]["nmse"] <= 1e-6 < rows["bf16"]["nmse"] < rows["int8"]["nmse"]
    h200 = {products: max(row["clocks"]["H200"].values()) for products, row in rows.items()}
    assert h200["int8"] >= 1.25 * h200["f16"]
    assert abs(rows["int8"]["step"] - formats.get("Q4_K").tuning.int8_issue_slots) <= 1
    assert "Q4_K" in capsys.readouterr().out


def test_the_counted_configs_are_those_of_tuning():
    shape = tensor_cores.N, tensor_cores.COLUMNS, tensor_cores.M
    for (format, products), config in tensor_cores.CONFIGS.items():
        if products != "bf16":
            found = gemm_rule(target(), format, *shape)
            if products == "f16":
                n, *rest = shape
                found = fused_gemm_rule(target(), (format,), (n,), *rest, "f32", "f16")
            assert replace(found, splits=1) == config


def test_counts_agree_with_tuning_and_the_docs():
    rows = json.loads((RESULTS / "tensor_cores.json").read_text())["rows"]
    slots = {row["format"]: round(row["step"], 1) for row in rows if row["products"] == "int8"}
    weighed = {name: formats.get(name).tuning.int8_issue_slots for name in slots}
    assert all(weighed[name] in (None, slots[name]) for name in slots)
    assert sum(weight is not None for weight in weighed.values()) == 3
    docs = DOCS.read_text()
    for row in rows:
        config = GemmConfig(**row["config"])
        clocks = [row["clocks"][device] for device in ("H200", "A100", "RTX 5090")]
        cells = (
            *(
                row["format"],
                row["products"],
                f"{config.rows} x {config.m_tile}",
                str(row["registers"]),
            ),
            *(f"{row['hot_loop']:.1f}", f"{row['step']:.1f}", f"{row['nmse']:.1e}"),
            *(
                f"{of[bound]:.1f} {bound}"
                for of in clocks
                for bound in [max(of, key=of.__getitem__)]
            ),
        )
        assert f"| {' | '.join(cells)} |" in docs
