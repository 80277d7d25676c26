"""All non-public JAX names are in one file, and all of them exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from support.paths import ROOT

from jax_q4k import jax_internals

FILE = Path(jax_internals.__file__)


def private_names() -> list[tuple[str, str]]:
    """(module, attribute) of each use of `jax._src` in `jax_internals`."""
    tree = ast.parse(FILE.read_text())
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src")
        for alias in node.names
    }
    uses = (
        (modules[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    )
    return sorted(set(uses))


def test_there_are_some() -> None:
    assert ("jax._src.dispatch", "apply_primitive") in private_names()


@pytest.mark.parametrize(("module", "name"), private_names())
def test_jax_still_has(module: str, name: str) -> None:
    package, _, attribute = module.rpartition(".")  # some modules are jaxlib's, aliased in JAX
    assert hasattr(getattr(importlib.import_module(package), attribute), name)


def test_they_stand_nowhere_else() -> None:
    folders = ("jax_q4k", "models", "examples", "benchmarks", "tools", "ptx_kernels")
    found = [
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.name != FILE.name and "jax._src" in path.read_text()
    ]
    assert found == []
