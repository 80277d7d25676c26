"""The command that counts kernel launches."""

from __future__ import annotations

import pytest

from tools import aot, launches

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


@pytest.mark.slow("compiles or simulates whole models")
def test_describes_every_program_and_lists_one(capsys):
    assert launches.main(["--list", "decode", "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    for name in ("prefill", "decode", "generate"):
        assert f"\n{name}: " in printed
    listed = [line for line in printed.splitlines() if "matvec" in line and " * " in line]
    assert len(listed) == 9  # four in each of two layers, and the output


def test_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(aot, "unavailable", lambda: "the plugin is missing")
    assert launches.main([]) == 3
    assert capsys.readouterr().err == "the plugin is missing\n"
