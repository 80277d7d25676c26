"""Generates the tables of tests/README.md from recorded timings."""

from __future__ import annotations

import json

import pytest

from tools import test_times


@pytest.fixture
def page(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    tables = "<!-- seconds -->\nearlier rows\n<!-- end -->\nbetween\n<!-- long -->\n<!-- end -->\n"
    path.write_text(f"# Tests\n\n{tables}")
    monkeypatch.setattr(test_times, "PAGE", path)
    return path


def timings(path, seconds, reasons=None):
    path.write_text(json.dumps({"seconds": seconds, "reasons": reasons or {}, "megabytes": {}}))
    return str(path)


QUICK = {"tests/models/test_a.py::test_x[1]": 1.0, "tests/test_layers.py::test_y": 0.25}
ALL = QUICK | {
    "tests/models/files/test_b.py::test_long[a]": 6.0,
    "tests/models/files/test_b.py::test_long[b]": 7.5,
}


def test_a_row_for_each_folder(page, tmp_path):
    reasons = {"tests/models/files/test_b.py::test_long[b]": "waits"}
    arguments = [timings(tmp_path / "q", QUICK), timings(tmp_path / "a", ALL, reasons)]
    assert test_times.main([*arguments, "--machine", "two cores"]) == 0
    text = page.read_text()
    assert "| models | 1 | 1 | 1 | 1 |" in text
    assert "| models/files | 0 | 0 | 2 | 14 |" in text
    assert "| (top) | 1 | 0 | 1 | 0 |" in text
    assert "| all | 2 | 1 | 4 | 15 |" in text
    assert "| `models/files/test_b.py::test_long` | 8 | waits |" in text
    assert "earlier rows" not in text and "between" in text and "two cores" in text
    assert test_times.main([*arguments, "--machine", "two cores"]) == 0
    assert page.read_text() == text


def test_a_long_test_needs_a_reason(page, tmp_path, capsys):
    arguments = [timings(tmp_path / "q", QUICK), timings(tmp_path / "a", ALL)]
    assert test_times.main(arguments) == 1
    assert "test_b.py::test_long takes more than 5 s and has no slow(reason)" in (
        capsys.readouterr().out
    )
