"""The import graph of all Python files of the repository."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ptx_kernels", "jax_q4k", "models")
OTHERS = ("tests", "tools", "benchmarks", "examples")


@functools.cache
def modules(*folders: str) -> dict[str, Path]:
    """Every module below the folders by its name; `models` is installed as `jax_q4k.models`."""
    of_name = {}
    for file in (f for folder in folders for f in (ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        of_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: file for name, file in of_name.items() if not name.startswith("jax_q4k.models")}


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports at the top, in functions, and those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from _statements(child)


def imported(name: str, file: Path) -> Iterator[tuple[str, str]]:
    """(module, name that is taken from it or nothing) of each import of a module."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for statement in _statements(ast.parse(file.read_text())):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names)
            continue
        above = package[: len(package) + 1 - statement.level] if statement.level else []
        source = ".".join([*above, *filter(None, [statement.module])])
        yield from ((source, alias.name) for alias in statement.names)


def dependencies(name: str, known: dict[str, Path]) -> set[str]:
    """Modules of `known` that a module imports."""
    found = set()
    for source, taken in imported(name, known[name]):
        source = source.replace("jax_q4k.models", "models")
        if source.split(".")[0] == "support":  # tests/ itself is on the path
            source = f"tests.{source}"
        whole = f"{source}.{taken}"
        found |= {whole} & known.keys() or {source} & known.keys()
    return found - {name}


@functools.cache
def arrows(*folders: str) -> dict[str, set[str]]:
    """The modules that each module below the folders imports, of those."""
    known = modules(*folders)
    return {name: dependencies(name, known) for name in known}
