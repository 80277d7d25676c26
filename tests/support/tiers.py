"""Tiers of the suite: `--tier quick` (the default), `all`, `rest` or `full`.

- quick: tests not marked `slow(reason, quick=ids)`, and slow ones whose parameter ids match one of
  the patterns; of a `grid`, cells that cover every value.
- all: every test; of a `grid`, cells that cover every pair of values.
- rest: tests in `all` but not in `quick`.
- full: every cell of every grid.

A test named by its node id runs in any tier.
"""

from __future__ import annotations

import fnmatch
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

TIERS = ("quick", "all", "rest", "full")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="quick",
        help="quick: without slow tests, each value of a grid's parameters; all: every test, each"
        " pair of values; rest: what all has beyond quick; full: each cell of every grid, and"
        " twenty perturbations of a kernel",
    )


def left_out(items: Sequence[pytest.Item], tier: str) -> dict[str, list[pytest.Item]]:
    """Returns the items that a tier leaves out: {"slow": [...], "grid": [...], "quick": [...]}."""
    out: dict[str, list[pytest.Item]] = {"slow": [], "grid": [], "quick": []}
    if tier == "full":
        return out
    quick = _left_out_by_marks(items, "quick")
    if tier == "quick":
        return out | quick
    out |= {"slow": [], "grid": _left_out_by_marks(items, "all")["grid"]}
    if tier == "rest":
        later = {id(item) for kind in quick.values() for item in kind}
        out["quick"] = [item for item in items if id(item) not in later]
    return out


def _left_out_by_marks(items: Iterable[pytest.Item], tier: str) -> dict[str, list[pytest.Item]]:
    slow: list[pytest.Item] = []
    grids: dict[Hashable, list[Any]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("slow"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str):
                raise pytest.UsageError(f"{item.nodeid}: slow(reason) says why it is slow")
            if not _is_quick(item, mark.kwargs.get("quick", ())):
                slow.append(item)
        if mark := item.get_closest_marker("grid"):
            params = item.callspec.params  # type: ignore[attr-defined]
            apart = (params[axis] for axis in mark.kwargs.get("apart", ()))
            grids[(item.nodeid.partition("[")[0], *apart)].append(item)
    are_slow = set(map(id, slow))
    cells: list[pytest.Item] = []
    for (name, *_), grid in grids.items():
        # one id per `parametrize`; pytest's indices would number the tests
        rows = [tuple(item.callspec._idlist) for item in grid]
        chosen = covering(rows, 1 if tier == "quick" else 2, seed=str(name))
        cells += (item for i, item in enumerate(grid) if i not in chosen)
    return {"slow": slow, "grid": [item for item in cells if id(item) not in are_slow]}


def _is_quick(item: pytest.Item, ids: Iterable[str]) -> bool:
    """Whether the item's parameter ids, as in its name, match a pattern of `slow(quick=)`."""
    inside = item.name.partition("[")[2].rstrip("]")
    return any(fnmatch.fnmatchcase(inside, pattern) for pattern in ids)


def covering(rows: Sequence[tuple[Hashable, ...]], strength: int, seed: str) -> set[int]:
    """Indices of rows that cover every combination of `strength` columns' values.

    The set is small, but not minimal; it is the same for the same seed.
    """

    def parts(row: tuple[Hashable, ...]) -> set[Hashable]:
        columns = list(enumerate(row))
        return set(itertools.combinations(columns, min(strength, len(columns))))

    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    missing = set().union(*map(parts, rows))
    chosen: set[int] = set()
    most = max((len(parts(row)) for row in rows), default=0)
    for least in range(most, 0, -1):  # rows that add most come first
        for index in order:
            if len(new := parts(rows[index]) & missing) >= least:
                chosen.add(index)
                missing -= new
    return chosen


def select(config: pytest.Config, items: list[pytest.Item]) -> Counter[str]:
    """Removes the tests that the tier leaves out from `items`; returns their number per kind."""
    named = {argument for argument in config.args if "::" in argument}

    def is_named(item: pytest.Item) -> bool:
        return any(item.nodeid == n or item.nodeid.startswith(f"{n}[") for n in named)

    tier = config.getoption("--tier")
    candidates = [item for item in items if not is_named(item)] if named else items
    if list(config.args) == config.getini("testpaths"):
        _check_patterns(items)
    out = left_out(candidates, tier)
    gone = {id(item) for kind in out.values() for item in kind}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in gone])
        items[:] = [item for item in items if id(item) not in gone]
    return Counter({kind: len(found) for kind, found in out.items()})


def _check_patterns(items: Sequence[pytest.Item]) -> None:
    """Raises UsageError if a pattern of `slow(quick=)` adds no test to the quick tier."""
    out = {id(item) for kind in left_out(items, "quick").values() for item in kind}
    missing: dict[tuple[str, str], bool] = {}
    for item in items:
        if mark := item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            for pattern in mark.kwargs.get("quick", ()):
                adds = _is_quick(item, [pattern]) and id(item) not in out
                missing[function, pattern] = missing.get((function, pattern), True) and not adds
    if wrong := sorted(key for key, value in missing.items() if value):
        raise pytest.UsageError(f"slow(quick=): patterns that add no test: {wrong}")


def summary(tier: str, counts: Counter[str]) -> list[str]:
    """Lines that report what a run left out, and the command that runs it."""
    slow, cells = counts["slow"], counts["grid"]
    if not slow + cells:
        return []
    if tier == "quick":
        return [
            f"the quick tier left out {slow:,} slow tests and {cells:,} cells of grids:",
            "`make test-all` runs the slow tests, and each pair of grids' parameters;",
            "`pytest --tier full` every cell",
        ]
    return [f"left out {cells:,} cells of grids, which `pytest --tier full` runs"]
