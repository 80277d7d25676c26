"""Writes the tables of tests/README.md: `python -m tools.test_times QUICK ALL`.

QUICK and ALL are files that `pytest --timings FILE` wrote, of the quick tier and of `--tier all`.
Exits with 1 if a test takes more than five seconds and no mark `slow` gives a reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "tests" / "README.md"
LONG = 5.0  # seconds


def folder(test: str) -> str:
    """Returns the folder below tests/ whose table row counts the test, two levels deep."""
    parts = test.partition("::")[0].split("/")[1:-1]
    return "/".join(parts[:2]) or "(top)"


def table(quick: dict[str, Any], everything: dict[str, Any]) -> list[str]:
    """Formats a Markdown table of tests and seconds of each folder in both tiers."""
    lines = ["| folder | quick: tests | s | all: tests | s |", "|---|---:|---:|---:|---:|"]
    columns = []
    for timings in (quick["seconds"], everything["seconds"]):
        seconds: dict[str, float] = defaultdict(float)
        for test, time in timings.items():
            seconds[folder(test)] += time
        columns.append((Counter(map(folder, timings)), seconds))
    for name in sorted(columns[1][0]):
        cells = [f"{count[name]:,} | {seconds[name]:.0f}" for count, seconds in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sums = [f"{count.total():,} | {sum(seconds.values()):.0f}" for count, seconds in columns]
    return [*lines, f"| all | {' | '.join(sums)} |"]


def long_tests(everything: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns (Markdown list of functions with a test over `LONG` s, those without reason)."""
    longest: dict[str, float] = defaultdict(float)
    reasons: dict[str, str] = {}
    for test, time in everything["seconds"].items():
        function = test.partition("[")[0]
        longest[function] = max(longest[function], time)
        if reason := everything["reasons"].get(test):
            reasons[function] = reason
    long = sorted((f for f in longest if longest[f] > LONG), key=lambda f: -longest[f])
    rows = [
        f"| `{f.removeprefix('tests/')}` | {longest[f]:.0f} | {reasons.get(f, '')} |" for f in long
    ]
    head = ["| test | s of its longest case | why |", "|---|---:|---|"]
    return [*head, *rows], [f for f in long if f not in reasons]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quick", type=Path)
    parser.add_argument("all", type=Path)
    parser.add_argument("--machine", default=f"{platform.machine()}, two workers")
    arguments = parser.parse_args(argv)
    quick, everything = (json.loads(p.read_text()) for p in (arguments.quick, arguments.all))
    long, bare = long_tests(everything)
    parts = {
        "seconds": [f"On {arguments.machine}; seconds of work of both workers together.", ""]
        + table(quick, everything),
        "long": long,
    }
    text = PAGE.read_text()
    for name, lines in parts.items():
        head, found, rest = text.partition(f"<!-- {name} -->")
        if not found:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}")
        _, end, tail = rest.partition("<!-- end -->")
        text = "\n".join([head + found, *lines, end + tail])
    PAGE.write_text(text)
    for function in bare:
        print(f"{function} takes more than {LONG:.0f} s and has no slow(reason)")
    return 1 if bare else 0


if __name__ == "__main__":
    sys.exit(main())
