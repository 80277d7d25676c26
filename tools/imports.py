"""Import graph of all Python files of the repository."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ptx_kernels", "jax_q4k", "models")
OTHERS = ("tests", "tools", "benchmarks", "examples")
TYPE_CHECKING = "TYPE_CHECKING"


@functools.cache
def modules(*folders: str) -> dict[str, Path]:
    """Maps module names to files below the folders; `models` is installed as `jax_q4k.models`."""
    of_name = {}
    for file in (f for folder in folders for f in (ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        of_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: file for name, file in of_name.items() if not name.startswith("jax_q4k.models")}


def _statements(node: ast.AST, typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields imports of modules and functions; `typing`: also those only for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif typing or not (isinstance(child, ast.If) and ast.unparse(child.test) == TYPE_CHECKING):
            yield from _statements(child, typing)


def imported(name: str, file: Path, *, typing: bool = True) -> Iterator[tuple[str, str]]:
    """Yields (module, imported name or "") for each import of a module."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for statement in _statements(ast.parse(file.read_text()), typing):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names)
            continue
        above = package[: len(package) + 1 - statement.level] if statement.level else []
        source = ".".join([*above, *filter(None, [statement.module])])
        yield from ((source, alias.name) for alias in statement.names)


def dependencies(name: str, known: dict[str, Path], *, typing: bool = True) -> set[str]:
    """Returns the modules of `known` that a module imports."""
    found = set()
    for source, taken in imported(name, known[name], typing=typing):
        source = source.replace("jax_q4k.models", "models")
        if source.split(".")[0] == "support":  # tests/ itself is on the path
            source = f"tests.{source}"
        submodule = f"{source}.{taken}".replace("jax_q4k.models", "models")
        found |= {submodule} & known.keys() or {source} & known.keys()
    return found - {name}


@functools.cache
def arrows(*folders: str, typing: bool = True) -> dict[str, set[str]]:
    """Maps each module below the folders to those among them that it imports.

    typing: whether to count imports that are only for type checkers.
    """
    known = modules(*folders)
    return {name: dependencies(name, known, typing=typing) for name in known}
