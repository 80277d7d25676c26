"""Measurements of the benchmark of startup times."""

from __future__ import annotations

import pytest

from benchmarks import startup


@pytest.mark.slow("starts the command several times")
def test_stages_and_the_command_are_timed(monkeypatch):
    monkeypatch.setattr(startup, "STAGES", {"import": "import sys\n---\nimport this"})
    found = startup.measure(startup.HERE, {"demo": "demo"})
    assert 0 < found["import"] < 5
    for start in ("first", "second"):
        stages = ("first token", "end", "CPU")
        token, end, cpu = (found[f"command, demo, {start} start: {stage}"] for stage in stages)
        assert found["import"] < token < end and cpu > 0
    assert 0 < found["host's part of a step"] < 0.01


def test_the_peers_command_is_timed(tmp_path):
    program, model = tmp_path / "llama-completion", str(tmp_path / "a.gguf")
    program.write_text(
        f"#!/bin/sh\nsleep 0.1\n[ $2 = {model} ] && printf token\nsleep 0.1\necho ' last'\n"
    )
    program.chmod(0o755)
    found = startup.measure_theirs(tmp_path, {"small": model})
    token, end = (found[f"command, small, second start: {at}"] for at in ("first token", "end"))
    assert 0.1 < token < 5 and end > token and end > 0.2
