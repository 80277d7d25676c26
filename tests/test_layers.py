"""Layers: imports only point down, and no module imports itself by way of others."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGES = ("ptx_kernels", "jax_q4k", "models")


def modules() -> dict[str, Path]:
    """Every module of the packages by its name; `models` is installed as `jax_q4k.models`."""
    files = [f for package in PACKAGES for f in (ROOT / package).rglob("*.py")]
    of_name = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        of_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: file for name, file in of_name.items() if not name.startswith("jax_q4k.models")}


MODULES = modules()


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports at the top, in functions, and those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from statements(child)


def imported(name: str) -> Iterator[tuple[str, str]]:
    """(module, name that is taken from it or nothing) of each import of a module."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    for statement in statements(ast.parse(MODULES[name].read_text())):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names)
            continue
        above = package[: len(package) + 1 - statement.level] if statement.level else []
        source = ".".join([*above, *filter(None, [statement.module])])
        yield from ((source, alias.name) for alias in statement.names)


def dependencies(name: str) -> set[str]:
    """Modules of the packages that a module imports."""
    found = set()
    for source, taken in imported(name):
        source = source.replace("jax_q4k.models", "models")
        whole = f"{source}.{taken}"
        found |= {whole} & MODULES.keys() or {source} & MODULES.keys()
    return found - {name}


@functools.cache
def imports() -> dict[str, set[str]]:
    return {name: dependencies(name) for name in MODULES}


def test_no_circle():
    try:
        tuple(graphlib.TopologicalSorter(imports()).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize(
    "below, above",
    [
        ("ptx_kernels", "jax_q4k"),
        ("ptx_kernels", "models"),
        ("jax_q4k", "models"),
        ("ptx_kernels.ptx", "ptx_kernels.formats"),
        ("ptx_kernels.ptx", "ptx_kernels.simulator"),
        ("ptx_kernels.simulator", "ptx_kernels.kernels"),
        ("ptx_kernels.formats", "ptx_kernels.kernels"),
        ("ptx_kernels.formats", "ptx_kernels.tuning"),
        ("ptx_kernels.kernels", "ptx_kernels.tuning"),
        ("ptx_kernels.kernels", "ptx_kernels.machine_code"),
        ("ptx_kernels.tuning", "ptx_kernels.machine_code"),
    ],
)
def test_imports_point_down(below, above):
    def within(name: str, package: str) -> bool:
        return f"{name}.".startswith(f"{package}.") and name != "jax_q4k.__main__"  # the command

    found = [
        (name, other)
        for name, others in imports().items()
        for other in others
        if within(name, below) and within(other, above)
    ]
    assert not found


def test_ptx_kernels_needs_no_jax():
    roots = {
        source.split(".")[0]
        for name in MODULES
        if name.startswith("ptx_kernels")
        for source, _ in imported(name)
    }
    assert not roots & {"jax", "jaxlib", "flax"}


def test_models_use_public_names_of_jax_q4k():
    """Names in `__all__` of `jax_q4k`, or of a package that `jax_q4k` lists itself."""
    private = [
        (name, source, taken)
        for name in MODULES
        if name.split(".")[0] == "models"
        for source, taken in imported(name)
        if source.split(".")[0] == "jax_q4k" and not is_public(source, taken)
    ]
    assert not private


def is_public(source: str, taken: str) -> bool:
    package, _, rest = source.partition(".")
    listed = importlib.import_module(package).__all__
    if rest:
        return rest in listed and taken in importlib.import_module(source).__all__
    return not taken or taken in listed
