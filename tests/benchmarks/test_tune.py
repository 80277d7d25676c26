"""Tuning tables: chosen by the model from a handful of Configs, and measured on a stand-in device."""

from __future__ import annotations

import json

import pytest
from stand_in_device import StandIn

from benchmarks import tune
from ptx_kernels import tables
from ptx_kernels.cost import Prediction
from ptx_kernels.devices import REFERENCE
from ptx_kernels.driver import DriverError, Timing
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig

CONFIGS = (PRESETS["dp4a"], PRESETS["quarter_warp_dp4a"], MatvecConfig(lanes=3))  # the last goes with nothing


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tune, "SHAPES", ((14336, 4096), (64, 4096), (64, 896)))
    monkeypatch.setattr(tune, "ROWS", (1,))
    monkeypatch.setattr(tune, "candidates", lambda m: CONFIGS)


def test_the_model_writes_a_table(small, tmp_path):
    path = tmp_path / "h200.json"
    assert tune.main(["--model", "--formats", "Q4_K", "--out", str(path)]) == 0
    table = tables.load(path)
    assert (table.device, table.source) == ("H200", "model")
    assert [(r.format, r.n, r.columns, r.m) for r in table.rows] == [("Q4_K", 14336, 4096, 1), ("Q4_K", 64, 4096, 1)]
    large = table.nearest("matvec", "Q4_K", 14336, 4096, 1)
    assert large.config == PRESETS["quarter_warp_dp4a"] and large.why.endswith(" bound")
    assert 14336 * 2304 / REFERENCE.bandwidth < large.seconds < 20e-6
    assert json.loads(path.read_text())["ptxas"]


def test_of_equals_the_one_with_slack_wins(monkeypatch, small):
    slow, tight, roomy = CONFIGS[2], CONFIGS[0], CONFIGS[1]
    predictions = {
        slow: Prediction(9e-6, 1e-6, 1e-6, 1, "issue", 0),
        tight: Prediction(5e-6, 4e-6, 4e-6, 1, "issue", 0),
        roomy: Prediction(5.05e-6, 4e-6, 2e-6, 1, "issue", 0),
    }
    model = tune.Model(REFERENCE)
    monkeypatch.setattr(model, "predictions", lambda shape: dict(predictions))
    monkeypatch.setattr(tune, "spills", lambda *_: False)
    assert model.best(("Q4_K", 64, 4096, 1))[0] == roomy
    monkeypatch.setattr(tune, "spills", lambda *arguments: arguments[-1] in (roomy, tight))
    assert model.best(("Q4_K", 64, 4096, 1))[0] == slow
    monkeypatch.setattr(tune, "spills", lambda *_: True)
    with pytest.raises(ValueError, match="no candidate"):
        model.best(("Q4_K", 64, 4096, 1))


def test_candidates_hold_the_presets_and_no_config_twice():
    for m in tune.ROWS:
        found = tune.candidates(m)
        assert len(set(found)) == len(found)
        assert {PRESETS["dp4a"], PRESETS["half_warp_dp4a"], PRESETS["quarter_warp_dp4a"]} <= set(found)


def test_a_gpu_writes_what_it_measured(small, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "SHAPES", ((512, 4096), (64, 512)))
    times = iter((3e-6, 2e-6, 6e-6, 5e-6))

    class Timed(StandIn):
        def time(self, launches):
            assert len({kernel for kernel, _ in launches}) == 1 and len(launches) >= 16
            return Timing(next(times), 0.0, 0.0, 30)

    monkeypatch.setattr(tune, "Gpu", Timed)
    monkeypatch.setattr(tune.Model, "candidates", lambda *_: CONFIGS)
    path = tmp_path / "mine.json"
    assert tune.main(["--formats", "Q4_K", "--out", str(path)]) == 0
    table = tables.load(path)
    assert (table.device, table.source) == ("Stand-in", "measured")
    assert [(r.n, r.config, r.seconds) for r in table.rows] == [(512, CONFIGS[1], 2e-6), (64, CONFIGS[1], 5e-6)]
    assert next(times, None) is None
    content = json.loads(path.read_text())
    assert content["driver"] == "13.0" and content["commit"] and content["versions"]["numpy"]


def test_out_of_time_leaves_shapes_out(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "Gpu", StandIn)
    monkeypatch.setattr(tune, "SHAPES", ((64, 512),))
    path = tmp_path / "mine.json"
    assert tune.main(["--formats", "Q4_K", "--out", str(path), "--seconds", "-1"]) == 0
    assert tables.load(path).rows == ()
    assert "out of time at ('Q4_K', 64, 512, 1)" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    def fails():
        raise DriverError("cuInit failed: CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(tune, "Gpu", fails)
    assert tune.main([]) == 3
    assert "needs a CUDA GPU, or --model: cuInit failed" in capsys.readouterr().err
