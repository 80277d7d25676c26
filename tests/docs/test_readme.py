"""Runs README's Python snippets unchanged, in order, in one session."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.paths import ROOT


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow("runs all code of README.md in a process", quick=["*"])
def test_snippets(tmp_path):
    code = "\n".join(snippets())
    assert "models.load" in code and "jq.matmul" in code
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "launches of PTX kernels" in result.stdout
    assert (tmp_path / "tiny.Q4_K_S.gguf").is_file()


def test_links():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target
