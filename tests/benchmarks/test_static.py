"""The command that collects static evidence, on two kernels."""

from __future__ import annotations

import json

import pytest

from benchmarks import static
from ptx_kernels.kernels import CASES
from ptx_kernels.kernels.matvec import PRESETS


@pytest.mark.slow("measures")
def test_writes_figures_of_every_target(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        static, "cases", lambda: [case for case in CASES if case.family == "append_kv"][:2]
    )
    # tests/jax_q4k/aot compiles the real step
    monkeypatch.setattr(static, "launches_of_8b_step", lambda: {"launches": 1})
    layer = static.layer_times.LayerTime("8B", "local", 12, 10, 86_000_000, 40e-6, 4e-6)
    monkeypatch.setattr(static.layer_times, "layer_times", lambda: [layer])
    monkeypatch.setattr(static.aot, "unavailable", lambda: None)
    assert static.main([str(tmp_path / "static.json")]) == 0
    written = json.loads((tmp_path / "static.json").read_text())
    assert written["spill_bytes"] == dict.fromkeys(static.TARGETS, 0)
    assert [kernel["label"] for kernel in written["kernels"]] == ["append_kv-f32", "append_kv-bf16"]
    assert all(
        registers > 0 for target in written["registers"].values() for registers in target.values()
    )
    assert written["layers"][0]["limit"] == 86e6 / 4.3e12
    printed = capsys.readouterr().out
    assert "append_kv-bf16" in printed
    assert ["8B,", "local", "12", "10", "86.0", "20.0", "40.0", "4.0"] in map(
        str.split, printed.splitlines()
    )


def test_every_strategy_is_in_it():
    labels = [case.label for case in static.cases()]
    assert len(set(labels)) == len(labels)
    assert {
        f"{preset}-Q4_K-4096x4096-m{4 if preset == 'batched' else 1}" for preset in PRESETS
    } <= set(labels)


def test_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(static.aot, "unavailable", lambda: "no plugin")
    assert static.main([]) == 3
    assert "no plugin" in capsys.readouterr().err
