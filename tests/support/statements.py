"""Statements of pages with checks: a test fails if the words are gone or false."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from support.paths import ROOT


@dataclasses.dataclass
class Statement:
    """A check, and the (page, words) that it verifies."""

    check: Callable[[], Any]
    said: list[tuple[str, str]]

    def test(self) -> None:
        for page, words in self.said:
            text = " ".join((ROOT / page).read_text().split())
            assert words in text, f"{page} does not say this any more: {words}"
        self.check()


class Statements:
    """Statements of a test module, in order."""

    def __init__(self) -> None:
        self._by_check: dict[Callable[[], Any], Statement] = {}

    def says(self, page: str, *words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Decorates the check of a page's statements; repeat it for several pages."""

        def register(check: Callable[[], Any]) -> Callable[[], Any]:
            found = self._by_check.setdefault(check, Statement(check, []))
            found.said += [(page, some) for some in words]
            return check

        return register

    def parameters(self) -> list[Any]:
        """Lists each statement once, for `pytest.mark.parametrize`."""
        return [pytest.param(one, id=one.check.__name__) for one in self._by_check.values()]


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the rows of the table whose header begins with `head`."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def quoted(cell: str) -> list[str]:
    """The inline code of a cell."""
    return re.findall(r"`([^`]+)`", cell)
