"""Mutants of Python functions.

Code that runs at import, decorators, annotations and default values are not mutated: only the
bodies of functions run after a test has chosen a mutant.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from .mutant import Edit, Mutant

#: The name under which a module with mutants imports `switch.on`.
SWITCH = "_mutant_on"

_SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Finds every mutant of the functions in a module's text."""
    tree = ast.parse(text)
    lines = text.split("\n")
    for node in _function_nodes(tree):
        for operator, changed in _changes(node):
            yield from _expression(path, lines, node, operator, changed)
        if isinstance(node, ast.stmt):
            yield from _without(path, lines, node)


def _function_nodes(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yields the nodes below functions' bodies."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in child.body:
                yield statement
                yield from _function_nodes(statement, inside=True)
        elif isinstance(child, (ast.JoinedStr, ast.Assert, ast.NamedExpr)):
            continue  # positions in f-strings are wrong before Python 3.12
        elif inside:
            if isinstance(child, ast.AnnAssign):
                child = child.value or ast.Pass()
            if not isinstance(child, (ast.arguments, ast.Yield, ast.YieldFrom, ast.Starred)):
                yield child
            if not isinstance(child, ast.arguments):
                yield from _function_nodes(child, inside=True)
        elif isinstance(child, ast.ClassDef):
            yield from _function_nodes(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields (operator, mutated node) for an expression."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        if not (isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)):
            yield "arithmetic", _with(node, op=_SWAPPED[type(node.op)]())
    if isinstance(node, ast.BoolOp):
        yield "and/or", _with(node, op=_SWAPPED[type(node.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        yield "comparison", _with(node, ops=[_SWAPPED[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "sign", node.operand
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield "constant", ast.Constant(node.value + 1)
        elif isinstance(node.value, float):
            yield "constant", ast.Constant(node.value * 2 or 1.0)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg:
                others = [other for other in node.keywords if other is not keyword]
                yield "argument", _with(node, keywords=others)
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            yield "function", _with(node, func=ast.Name(_FUNCTIONS[node.func.id]))


def _with(node: ast.expr, **fields: Any) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _expression(
    path: str, lines: list[str], node: ast.AST, operator: str, changed: ast.expr
) -> Iterator[Mutant]:
    yield from _switched(path, lines, node, operator, lambda _: f"({ast.unparse(changed)})")


def _without(path: str, lines: list[str], node: ast.stmt) -> Iterator[Mutant]:
    """Yields mutants of a statement: left out, its condition negated, its result None."""
    if isinstance(node, (ast.If, ast.While)):
        yield from _switched(path, lines, node.test, "condition", lambda was: f"(not ({was}))")
    if isinstance(node, ast.Return) and node.value is not None:
        if not isinstance(node.value, ast.Constant):
            yield from _switched(path, lines, node.value, "result", lambda _: "None")
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if call or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
        line = lines[node.lineno - 1]
        column = len(line.encode()[: node.col_offset].decode())
        if not line[:column].strip():
            start = (node.lineno, column)
            edit = Edit(start, start, f"if not {SWITCH}({{id}}): ")
            yield Mutant("statement", path, node.lineno, line.strip(), "pass", (edit,))


def _switched(
    path: str, lines: list[str], node: ast.AST, operator: str, mutated: Callable[[str], str]
) -> Iterator[Mutant]:
    assert isinstance(node, ast.expr) and node.end_lineno and node.end_col_offset is not None
    start = (node.lineno, _column(lines, node.lineno, node.col_offset))
    end = (node.end_lineno, _column(lines, node.end_lineno, node.end_col_offset))
    text = "\n".join(lines[start[0] - 1 : end[0]])
    was = text[start[1] : len(text) - (len(lines[end[0] - 1]) - end[1])]
    if "\n" in was and "#" in was:
        return  # a comment would swallow the code after it
    now = mutated(was)
    edits = (Edit(start, start, f"({now} if {SWITCH}({{id}}) else ("), Edit(end, end, "))"))
    yield Mutant(operator, path, start[0], " ".join(was.split()), " ".join(now.split()), edits)


def _column(lines: list[str], line: int, offset: int) -> int:
    return len(lines[line - 1].encode()[:offset].decode())


def with_import(text: str) -> str:
    """Returns the text with the switch imported on the line of its first import, or before it."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if docstring or future:
            continue
        simple = isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr))
        line = f"from jax_q4k.mutant_switch import on as {SWITCH}{'; ' if simple else chr(10)}"
        lines[node.lineno - 1] = line + lines[node.lineno - 1]
        return "\n".join(lines)
    raise ValueError("a module without code has no mutants")
