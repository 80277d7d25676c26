"""The charts of docs/ show the results that lie in benchmarks/results/ now."""

from __future__ import annotations

import json

import pytest

from tools import charts


@pytest.mark.parametrize("name", charts.ALL)
def test_chart_shows_the_results(name):
    now = json.loads(json.dumps(charts.ALL[name][0]()))
    assert charts.shown(name) == now, "python -m tools.charts draws them anew"


def test_predictions_are_labeled():
    for name in ("predicted", "llama-step"):
        assert "redicted" in (charts.CHARTS / f"{name}.svg").read_text().split("</metadata>")[1]


def test_they_can_be_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is no dependency of jax-q4k")
    monkeypatch.setattr(charts, "CHARTS", tmp_path)
    charts.main()
    assert {file.stem for file in tmp_path.iterdir()} == set(charts.ALL)
    assert charts.shown("gpu") == charts.gpu()
