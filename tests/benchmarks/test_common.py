"""Command lines of the benchmarks that take nothing but the file to write."""

from __future__ import annotations

import pytest

from benchmarks import quantizers, static, tensor_cores
from benchmarks.common import RESULTS, results_file


@pytest.mark.parametrize("benchmark", [quantizers, static, tensor_cores])
@pytest.mark.parametrize("arguments", [["--help"], ["--out", "x.json"], ["x.json", "y.json"]])
def test_options_are_no_files(benchmark, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    written = capsys.readouterr()
    assert f"usage: python -m {benchmark.__name__} [-h] [FILE]" in written.out + written.err
    assert not list(tmp_path.iterdir())


def test_the_file_or_the_repositorys_own(tmp_path):
    assert results_file([str(tmp_path / "a.json")], "static", None) == tmp_path / "a.json"
    assert results_file([], "static", None) == RESULTS / "static.json"
