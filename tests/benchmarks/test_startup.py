"""The benchmark of the start measures what it says."""

from __future__ import annotations

from benchmarks import startup


def test_stages_and_the_command_are_timed(monkeypatch):
    monkeypatch.setattr(startup, "STAGES", {"import": "import sys\n---\nimport this"})
    found = startup.measure(startup.HERE, {"demo": "demo"})
    assert 0 < found["import"] < 5
    for start in ("first", "second"):
        stages = ("first token", "end", "CPU")
        token, end, cpu = (found[f"command, demo, {start} start: {stage}"] for stage in stages)
        assert found["import"] < token < end and cpu > 0
    assert 0 < found["host's part of a step"] < 0.01
