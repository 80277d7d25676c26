"""No kernel is a copy of another: strategies are values of a Config. No function is long."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import ptx_kernels.kernels

FOLDER = Path(ptx_kernels.kernels.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))
SHARED_LINES = 6  # in sequence; as many or more belong in a helper


def significant(source: str) -> list[str]:
    """Lines of code, without indentation.

    Imports, comments, docstrings, blank lines and lone brackets are skipped.
    """
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        documented = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef)
        ) and ast.get_docstring(node)
        if documented:
            text = node.body[0]
            skipped.update(range(text.lineno, text.end_lineno + 1))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = (
        line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in skipped
    )
    return [line for line in lines if line.strip("()[]{},:*") and not line.startswith("#")]


def test_no_function_is_long():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 120, f"{path.name}: {node.name}"


def test_no_two_places_share_six_lines():
    places = defaultdict(list)
    for path in SOURCES:
        lines = significant(path.read_text())
        for start in range(len(lines) - SHARED_LINES + 1):
            places[tuple(lines[start : start + SHARED_LINES])].append(path.name)
    repeated = {
        names: run for run, names in ((r, tuple(n)) for r, n in places.items()) if len(names) > 1
    }
    assert not repeated, "\n".join(
        f"{names}:\n  " + "\n  ".join(run) for names, run in repeated.items()
    )


def test_significant_lines():
    source = (
        '"""Doc."""\nimport a\n\n\ndef f(\n    x,\n):\n'
        '    """Doc\n    more."""\n    # why\n    return x\n'
    )
    assert significant(source) == ["def f(", "x,", "return x"]
