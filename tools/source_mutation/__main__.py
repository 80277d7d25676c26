"""Mutation testing of the Python and C++ sources: `python -m tools.source_mutation FOLDER`.

Options: `--mutants 300` (of each language), `--seed 0`, `--limit 60`, `--tests ARGUMENT ...`,
`--json FILE`.

Plants small bugs in a copy of the repository (`FOLDER/tree`), all at once, each with a switch. Runs
the suite once to see which tests run which mutant's code. Then, for each mutant, runs those tests
with the mutant switched on, the quick ones first, until one fails. A mutant that none finds within
`--limit` seconds of tests survives. Existing results in FOLDER are reused, so an interrupted run
can be continued. `--tests` (arguments of pytest, such as `-m "not slow"`) then tells which mutants
another selection of tests kills.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..results import write_results
from . import tree
from .mutant import Mutant

LANGUAGES = ("Python", "C++")
KNOWN = tree.ROOT / "tests" / "data" / "mutation" / "sources.toml"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="working folder, new or of an earlier run")
    parser.add_argument("--mutants", type=int, default=300, help="of Python, and as many of C++")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests for each mutant")
    parser.add_argument("--tests", default="", help="arguments of pytest that select tests")
    parser.add_argument("--name", default="all", help="name of this selection of tests")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    if not (folder / "mutants.json").exists():
        python = tree.python_mutants(arguments.mutants, arguments.seed)
        tree.make(folder, [*python, *tree.cpp_mutants(arguments.mutants, arguments.seed)])
    mutants = tree.read(folder / "mutants.json")
    if not (folder / "hits.json").exists():
        record(folder, arguments.tests)
    outcomes = judge(folder, mutants, arguments.tests, arguments.name, arguments.limit)
    print(report(mutants, outcomes))
    if arguments.json:
        write_results(arguments.json, results(folder, mutants, arguments.name, arguments.seed))
    return 0


def _environment(folder: Path) -> dict[str, str]:
    """Returns the environment in which everything imports the copy and keeps bytecode there."""
    variables = os.environ | {"PYTHONPATH": str(folder / "tree")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def _python(folder: Path, arguments: str, **variables: Path) -> None:
    environment = _environment(folder) | {name: str(value) for name, value in variables.items()}
    command = f"{sys.executable} {arguments}"
    subprocess.run(command, shell=True, cwd=folder / "tree", env=environment)


def record(folder: Path, tests: str) -> None:
    """Runs the suite once and writes hits.json: tests' seconds, and which tests run a mutant."""
    raw = folder / "hits"
    raw.mkdir(exist_ok=True)
    options = "-n 2 --dist worksteal -q --disable-warnings -p tools.source_mutation.recording"
    _python(folder, f"-m pytest {options} {tests}", MUTANT_HITS=raw)
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for file in raw.glob("*.tests"):
        for line in file.read_text().splitlines():
            test, outcome, duration = json.loads(line)
            seconds[test] += duration
            if outcome != "passed":
                failed.add(test)
    hits: dict[str, set[str]] = defaultdict(set)
    for file in raw.iterdir():
        if file.suffix != ".tests":
            for line in file.read_text().splitlines():
                number, _, test = line.partition("\t")
                hits[number].add(test)
    found = {
        "seconds": {test: round(time, 3) for test, time in seconds.items() if test not in failed},
        "hits": {number: sorted(tests - failed) for number, tests in hits.items()},
    }
    (folder / "hits.json").write_text(json.dumps(found, indent=0))


def judge(
    folder: Path, mutants: Sequence[Mutant], tests: str, name: str, limit: float
) -> dict[int, dict[str, Any]]:
    """Returns outcomes of all mutants by number; runs those missing in FOLDER/NAME.outcomes.

    A mutant that another selection has killed by a test of this one is not run again.
    """
    done = folder / f"{name}.outcomes"
    elsewhere = [_outcomes(file) for file in folder.glob("*.outcomes") if file != done]
    outcomes = _outcomes(done)
    recorded = json.loads((folder / "hits.json").read_text())
    hits, seconds = recorded["hits"], recorded["seconds"]
    selected = _collected(folder, tests) if tests else set(seconds)
    jobs, at_import = [], []
    for number in range(1, len(mutants) + 1):
        if number in outcomes:
            continue
        killers = {found[number]["killed_by"] for found in elsewhere if number in found}
        if known := [k for k in killers if re.sub(" (timeout|crash)$", "", k) in selected]:
            _note(done, number, known[0], known)
            continue
        covering = [test for test in hits.get(str(number), []) if test in seconds]
        chosen: list[str] = []
        total = 0.0
        for test in sorted(selected.intersection(covering), key=seconds.__getitem__):
            total += seconds[test]
            if chosen and total > limit:
                break
            chosen.append(test)
        job = json.dumps([number, chosen, 60 + 10 * min(total, limit)])
        if not chosen:
            _note(done, number, "", [])
        elif "" in hits[str(number)]:
            at_import.append(job)
        else:
            jobs.append(job)
    if jobs:
        (folder / "jobs").write_text("\n".join(jobs) + "\n")
        _python(folder, f"-m tools.source_mutation.serving {folder / 'jobs'} {done}")
    for job in at_import:
        number, chosen, timeout = json.loads(job)
        _note(done, number, _in_new_process(folder, number, chosen, timeout), chosen)
    return _outcomes(done)


def _note(file: Path, number: int, killed_by: str, tests: Sequence[str]) -> None:
    outcome = {"mutant": number, "killed_by": killed_by, "tests": len(tests), "seconds": 0}
    with file.open("a") as lines:
        lines.write(json.dumps(outcome) + "\n")


def _collected(folder: Path, tests: str) -> set[str]:
    """Returns the node ids of the tests that pytest's arguments select."""
    listed = subprocess.run(
        f"{sys.executable} -m pytest --collect-only -q {tests}",
        shell=True,
        cwd=folder / "tree",
        env=_environment(folder),
        capture_output=True,
        text=True,
    )
    return {line for line in listed.stdout.splitlines() if "::" in line}


def _in_new_process(folder: Path, number: int, tests: Sequence[str], limit: float) -> str:
    """Runs a mutant whose code runs while modules are imported, before any fork."""
    environment = _environment(folder) | {"MUTANT": str(number)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rf", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=folder / "tree",
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1] if failed else "" if done.returncode == 0 else "at import"


def _outcomes(path: Path) -> dict[int, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {outcome["mutant"]: outcome for outcome in map(json.loads, lines)}


def language(mutant: Mutant) -> str:
    return "Python" if mutant.path.endswith(".py") else "C++"


def known() -> list[dict[str, str]]:
    """Returns the survivors that are not bugs: path, line (its text), before, after, reason."""
    tables: list[dict[str, str]] = tomllib.loads(KNOWN.read_text())["survivor"]
    return tables


def reason(mutant: Mutant, tables: Sequence[dict[str, str]]) -> str | None:
    """Returns the reason that a survivor is not a bug; None if no table has it."""
    lines = (tree.ROOT / mutant.path).read_text().splitlines()
    line = "".join(lines[mutant.line - 1 : mutant.line]).strip()
    fields = {"path": mutant.path, "line": line, "before": mutant.before, "after": mutant.after}
    return next((t["reason"] for t in tables if fields.items() <= t.items()), None)


def report(mutants: Sequence[Mutant], outcomes: dict[int, dict[str, Any]]) -> str:
    """Formats the survivors with their code, and the number of killed mutants of each language."""
    lines, tables = [], known()
    for number, mutant in enumerate(mutants, 1):
        outcome = outcomes.get(number)
        if outcome and not outcome["killed_by"]:
            why = reason(mutant, tables) or "UNEXPLAINED"
            lines.append(
                f"survives {outcome['tests']} tests: {number}, {mutant.operator}, "
                f"{mutant.path}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}\n  {why}"
            )
    for name in LANGUAGES:
        lines.append("{}: {} of {} killed".format(name, *_count(mutants, outcomes, name)))
    return "\n".join(lines)


def results(folder: Path, mutants: Sequence[Mutant], name: str, seed: int) -> dict[str, Any]:
    """Returns the JSON file's contents: counts of every selection so far, survivors of `name`."""
    selections = {file.stem: _outcomes(file) for file in sorted(folder.glob("*.outcomes"))}
    tables = known()
    return {
        "seed": seed,
        "killed": {
            title: {each: "{} of {}".format(*_count(mutants, outcomes, each)) for each in LANGUAGES}
            for title, outcomes in selections.items()
        },
        "survivors": [
            {
                "place": f"{mutant.path}:{mutant.line}",
                "before": mutant.before,
                "after": mutant.after,
                "reason": reason(mutant, tables),
            }
            for number, mutant in enumerate(mutants, 1)
            if number in selections[name] and not selections[name][number]["killed_by"]
        ],
    }


def _count(
    mutants: Sequence[Mutant], outcomes: dict[int, dict[str, Any]], name: str
) -> tuple[int, int]:
    """Counts the killed and the judged mutants of a language."""
    numbers = [n for n, m in enumerate(mutants, 1) if language(m) == name and n in outcomes]
    return sum(bool(outcomes[n]["killed_by"]) for n in numbers), len(numbers)


if __name__ == "__main__":
    sys.exit(main())
