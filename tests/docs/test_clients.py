"""Runs the Python snippets of docs/clients.md against a server, for clients that are installed."""

from __future__ import annotations

import re

import pytest

from jax_q4k import models
from tools import snippets

from ..models.server.running import serving

PAGE, URL = "docs/clients.md", "http://127.0.0.1:8080"
BLOCKS = [block for block in snippets.blocks(PAGE) if block.language == "python"]


def modules(block: snippets.Block) -> list[str]:
    """Modules that a block imports."""
    return re.findall(r"^(?:from|import) ([\w.]+)", block.code, re.MULTILINE)


@pytest.fixture(scope="module")
def url():
    model = models.load("demo")
    with models.Engine(model, max_rows=2, warm_up=False) as engine, serving(engine) as server:
        yield server.url


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: modules(block)[-1])
def test_snippets(block, url, capsys):
    for module in modules(block):
        pytest.importorskip(module, reason=f"{module} is no dependency of jax-q4k")
    assert URL in block.code
    exec(compile(block.code.replace(URL, url), "snippet", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out
