"""Assembles programs' kernels with another ptxas."""

from __future__ import annotations

import os
import shlex

import pytest

from ptx_kernels.machine_code import disk_cache, ptxas
from tools import aot, assembled

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

ONE_PROGRAM = ["--batches", "1", "--prompts"]


@pytest.fixture
def other_ptxas(monkeypatch, tmp_path):
    """Returns a function that installs a ptxas which first runs a line of shell."""
    real = ptxas.find_tool("ptxas")

    def make(line: str) -> None:
        path = tmp_path / "ptxas"
        path.write_text(f'#!/bin/sh\n{line}\nexec {shlex.quote(str(real))} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv(ptxas.VARIABLE, str(path))
        monkeypatch.delenv(disk_cache.VARIABLE, raising=False)  # it reports the real one's version
        clear()

    def clear() -> None:
        for cached in (ptxas.find_tool, ptxas.assemble):
            cached.cache_clear()

    yield make
    clear()


def test_a_programs_kernels(other_ptxas, tmp_path, capsys):
    other_ptxas(f"echo run >> {shlex.quote(str(tmp_path / 'runs'))}")
    assert assembled.main(ONE_PROGRAM) == 0
    title, _, row = capsys.readouterr().out.splitlines()
    assert title.startswith("ptxas 1") and row.startswith("llama-3.1-8b, batch 1 ")
    assert row.split()[-1] == "0"
    kernels = int(row.split()[-3])  # plus one run to get the version
    assert (tmp_path / "runs").read_text().count("run") == kernels + 1


def test_kernels_that_ptxas_refuses_fail(other_ptxas, capsys):
    other_ptxas('case "$*" in *--version*) ;; *) echo "error: too old"; exit 1;; esac')
    assert assembled.main(ONE_PROGRAM) == 1
    assert "ptxas -arch=sm_90 refused the kernel:\nerror: too old" in capsys.readouterr().out


def test_the_variable_must_name_a_program(monkeypatch, tmp_path):
    ptxas.find_tool.cache_clear()
    for path in (tmp_path, tmp_path / "missing"):
        monkeypatch.setenv(ptxas.VARIABLE, os.fspath(path))
        with pytest.raises(ptxas.ToolNotFoundError, match="JAX_Q4K_PTXAS=.* must name a ptxas"):
            ptxas.find_tool("ptxas")
