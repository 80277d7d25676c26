"""griffe extension: converts this repository's docstrings to the Google style that griffe reads.

The package's docstrings describe several names in one sentence, `k, v: as in attention`, and put
several errors, or short arguments, into one entry. The API reference shows each as a separate
entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import griffe

_SECTION = re.compile(r"^( *)(Args|Attributes|Raises):$")
_NAMES = re.compile(r"^((?:\*{0,2}[\w.]+)(?:, \*{0,2}[\w.]+)*): ?(.*)$", re.DOTALL)
_ERROR = r"(?:\w+\.)*[A-Z]\w*(?:Error|Warning)"
_ERRORS = re.compile(rf"(?<=[.;]) (?={_ERROR}(?:, (?:a )?{_ERROR})*: )")
_NAMED_ERRORS = re.compile(rf"^({_ERROR}(?:, {_ERROR})*)(?:, an? {_ERROR})?: ", re.DOTALL)


def entries_apart(text: str, parameters: Iterable[str] = ()) -> str:
    """Returns a docstring with a separate entry for each name in Args, Attributes and Raises."""
    lines, out, at = text.split("\n"), [], 0
    while at < len(lines):
        line = lines[at]
        out.append(line)
        at += 1
        match = _SECTION.match(line)
        if not match:
            continue
        outer, body = len(match[1]), []
        while at < len(lines) and (not lines[at].strip() or _indent(lines[at]) > outer):
            body.append(lines[at])
            at += 1
        split = _errors if match[2] == "Raises" else _arguments(parameters)
        for entry in _entries(body):
            out += [f"{match[1]}    {part}" for part in split(entry)]
        if body and not body[-1].strip():
            out.append("")
    return "\n".join(out)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _entries(body: list[str]) -> list[str]:
    """Joins the entries of a section to one line each."""
    filled = [line for line in body if line.strip()]
    found: list[str] = []
    for line in filled:
        if _indent(line) == _indent(filled[0]):
            found.append(line.strip())
        else:
            found[-1] += f" {line.strip()}"
    return found


def _errors(entry: str) -> list[str]:
    found: list[str] = []
    for part in _ERRORS.split(entry):
        match = _NAMED_ERRORS.match(part)
        names = match[1].split(", ") if match else []
        found += [f"{name}: {part[match.end() :]}" for name in names] if match else [part]
    return found


def _arguments(parameters: Iterable[str]) -> Callable[[str], list[str]]:
    """Splits an entry at names, and at further parameters after the end of a sentence."""
    known = "|".join(map(re.escape, parameters))
    further = re.compile(rf"(?<=\.) (?=(?:{known})(?:, (?:{known}))*: )") if known else None

    def split(entry: str) -> list[str]:
        found: list[str] = []
        for part in further.split(entry) if further else [entry]:
            match = _NAMES.match(part)
            found += [f"{n}: {match[2]}" for n in match[1].split(", ")] if match else [part]
        return found

    return split


class Entries(griffe.Extension):
    """Applies `entries_apart` to every docstring, and shows `_field(X, ...)` as the default X."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            names: list[str] = []
            if obj.is_function:
                names = [parameter.name for parameter in obj.parameters]
            obj.docstring.value = entries_apart(obj.docstring.value, names)

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        if str(attr.value).startswith("_field("):
            attr.value = attr.value.arguments[0]
