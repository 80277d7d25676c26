"""Measurements of the benchmark of the server."""

from __future__ import annotations

import pytest

from benchmarks import engine, server


@pytest.mark.slow("starts a server, and compiles the programs of its engine")
def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine, server):
        monkeypatch.setattr(module, "ANSWER", (4, 8))
        monkeypatch.setattr(module, "REQUESTS", 1)
    found = server.measure("demo", clients=(2,), rounds=1)
    one = found["clients"][2]
    assert min(one["server"].values()) > 0 and one["server"].keys() > one["engine"].keys()
    assert one["overhead"] < 1
    for name in ("engine", "server"):
        assert found["cached_prompt"][name].keys() == {"new", "cached"}
        assert found["long_prompt"][name]["first_token"] > 0
