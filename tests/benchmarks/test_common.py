"""Command lines of the benchmarks whose only argument is the output file."""

from __future__ import annotations

import pytest

from benchmarks import quantizers, static, tensor_cores
from benchmarks.common import RESULTS, results_file
from ptx_kernels.machine_code import ptxas
from tools import tune


@pytest.mark.parametrize("benchmark", [quantizers, static, tensor_cores])
@pytest.mark.parametrize("arguments", [["--help"], ["--out", "x.json"], ["x.json", "y.json"]])
def test_options_are_no_files(benchmark, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    written = capsys.readouterr()
    usage = (written.out + written.err).partition("\n")[0]
    assert usage.startswith(f"usage: python -m {benchmark.__name__} [-h] ")
    assert usage.endswith(" [FILE]")
    assert not list(tmp_path.iterdir())


def test_the_file_or_the_repositorys_own(tmp_path):
    assert results_file([str(tmp_path / "a.json")], "static", None) == tmp_path / "a.json"
    assert results_file([], "static", None) == RESULTS / "static.json"


@pytest.mark.parametrize(
    "run",
    [lambda file: tensor_cores.main([file]), lambda file: tune.main(["--model", "--out", file])],
)
def test_without_an_assembler_a_sentence_says_what_to_install(run, tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ptxas.ToolNotFoundError(f"{name} was not found")

    monkeypatch.setattr(ptxas, "find_tool", missing)
    assert run(str(tmp_path / "x.json")) == 3
    assert "was not found" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", ["nan", "-1", "0"])
def test_a_search_takes_time(seconds, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--model", "--seconds", seconds, "--out", str(tmp_path / "x.json")])
    assert "must be positive" in capsys.readouterr().err and not list(tmp_path.iterdir())
