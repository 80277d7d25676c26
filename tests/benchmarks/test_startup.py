"""The benchmark of the start measures what it says."""

from __future__ import annotations

from benchmarks import startup


def test_stages_and_the_command_are_timed(monkeypatch):
    monkeypatch.setattr(startup, "REPEATS", 1)
    monkeypatch.setattr(startup, "STAGES", {"import": "import sys\n---\nimport this"})
    found = startup.measure(startup.HERE)
    assert 0 < found["import"] < 5
    for start in ("first", "second"):
        token, end = (found[f"command, {start} start: {stage}"] for stage in ("first token", "end"))
        assert found["import"] < token < end
    assert 0 < found["host's part of a step"] < 0.01
