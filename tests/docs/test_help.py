"""Programs of examples/ and benchmarks/ print their help and do nothing else with `--help`."""

from __future__ import annotations

import runpy
import sys

import pytest
from support.paths import ROOT

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
BENCHMARKS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"
)


def printed_help(run, monkeypatch, capsys, folder) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code and not list(folder.iterdir())
    return capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, monkeypatch, capsys, tmp_path):
    if name == "ray_serve.py":
        pytest.importorskip("ray", reason="ray is no dependency of jax-q4k")
    path = ROOT / "examples" / name
    monkeypatch.syspath_prepend(path.parent)  # Python adds this folder when it runs a file
    text = printed_help(
        lambda: runpy.run_path(str(path), run_name="__main__"), monkeypatch, capsys, tmp_path
    )
    assert text.startswith("usage: ") and "show this help" in text


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark(name, monkeypatch, capsys, tmp_path):
    text = printed_help(
        lambda: runpy.run_module(f"benchmarks.{name}", run_name="__main__"),
        monkeypatch,
        capsys,
        tmp_path,
    )
    assert text.startswith("usage: ") and "show this help" in text


def test_a_part_of_a_benchmark_names_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.gpu_models", run_name="__main__")
    assert ended.value.code == 2 and "python -m benchmarks.gpu\n" in capsys.readouterr().err
