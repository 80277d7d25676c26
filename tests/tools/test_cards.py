"""Predicted steps on GPUs beside published ones."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import jax_q4k as jq
from ptx_kernels.devices import DEVICES
from tools import cards


def explained(*seconds: float | None) -> Any:
    """Returns an explanation of an operation that runs three times, with kernels of these times."""
    figures = tuple(SimpleNamespace(seconds=each) for each in seconds)
    return SimpleNamespace(calls=[SimpleNamespace(name="matmul", count=3, figures=figures)])


def test_a_steps_time_is_the_sum_of_its_launches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(jq, "explain", lambda *_, **__: explained(1e-3, 4e-3))
    monkeypatch.setattr(cards, "relative_range", lambda: (0.8, 1.2))
    path = tmp_path / "cards.json"
    assert cards.main(["--cards", "T4", "RTX 4090", "--out", str(path)]) == 0
    t4, rtx = json.loads(path.read_text())["cards"]
    assert t4["predicted"] == rtx["predicted"] == pytest.approx(1 / 15e-3)
    assert (t4["published"], rtx["published"]) == (None, 130.58)
    assert capsys.readouterr().out.splitlines() == [
        "T4: PREDICTED 67 tokens/s (53 to 80), none published",
        "RTX 4090: PREDICTED 67 tokens/s (53 to 80), published 131",
    ]


def test_a_kernel_without_a_prediction_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jq, "explain", lambda *_, **__: explained(1e-3, None))
    with pytest.raises(RuntimeError, match="RTX 4090: a kernel of matmul has no prediction"):
        cards.card("RTX 4090")


@pytest.mark.slow("assembles every kernel of a step", quick=[])
def test_weights_take_most_of_a_step() -> None:
    """A step reads 4.617 GB of weights."""
    device = DEVICES["RTX 4090"]
    rate = cards.card("RTX 4090").predicted
    assert 0.8 * device.bandwidth <= 4.617e9 * rate <= device.datasheet_bandwidth
