"""Runs README's Python snippets unchanged, in order, in one session."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.paths import ROOT

#: What stands before line 60.
EARLY = ("pip install", "docs/charts/", "jax-q4k chat ", "@jax.jit", "jax.grad(")


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow("runs all code of README.md in a process", quick=["*"])
def test_snippets(tmp_path):
    code = "\n".join(snippets())
    assert "models.load" in code and "jq.matmul" in code and "jax.grad" in code
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "launches of PTX kernels" in result.stdout


def test_it_is_short_and_shows_code_early():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(text.encode()) <= 7_000 and len(lines) <= 120
    first = {word: next(i for i, line in enumerate(lines, 1) if word in line) for word in EARLY}
    assert max(first.values()) < 60, first


def test_links():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target
