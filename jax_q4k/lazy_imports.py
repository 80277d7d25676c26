"""Imports a package's public names on first use, because JAX and Flax take long to import."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .collecting import gc_throttled

__all__ = ["attach"]


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and `__dir__` of a package that is being imported.

    They import what the package's `__init__.py` imports in its block `if TYPE_CHECKING:`, which
    type checkers read, too.
    """
    module = sys.modules[package]
    homes = _type_checking_imports(Path(str(module.__file__)))

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, attribute = homes[name]
        with gc_throttled():
            value = _imported(home, attribute, package)
        setattr(module, name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(module), *homes})

    return __getattr__, __dir__


def _imported(home: str, name: str, package: str) -> Any:
    """Returns what `from home import name` imports in a package."""
    if home.strip(".") and hasattr(module := importlib.import_module(home, package), name):
        return getattr(module, name)
    return importlib.import_module(f"{home.rstrip('.')}.{name}", package)


def _type_checking_imports(file: Path) -> dict[str, tuple[str, str]]:
    """Maps names to (relative module, name in it)."""
    return {
        alias.asname or alias.name: ("." * statement.level + (statement.module or ""), alias.name)
        for block in ast.parse(file.read_bytes()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
