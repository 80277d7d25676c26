"""The suite's own conftest: tiers, time budgets, and the report of what a run left out."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS
from support.tiers import covering

SAMPLE = """
import os, time
import pytest

def test_quick():
    pass

@pytest.mark.slow("sleeps")
def test_slow():
    pass

@pytest.mark.grid
@pytest.mark.parametrize("rows", range(4))
@pytest.mark.parametrize("format", ["a", "b", "c"])
@pytest.mark.parametrize("flag", [False, True])
def test_grid(rows, format, flag):
    pass

@pytest.mark.slow("of three, one", quick=["b*"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_names(name):
    pass

@pytest.mark.slow("is killed")
def test_crash():
    if os.environ.get("CRASH"):
        os.kill(os.getpid(), 9)
"""


PROGRAM = """
import os
import jax

def test_a_program():
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    assert jax.jit(lambda x: x + 41)(1) == 42
    assert ("/jax/compilation_cache/cache_hits" in events) == (os.environ["RUN"] == "second")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one test file and this suite's conftest."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(TESTS / "support", folder / "tests" / "support")
    shutil.copy(TESTS / "conftest.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests" / "test_sample.py").write_text(SAMPLE)
    return folder


def run(project: Path, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    """Returns pytest's exit status, its output, and the names of tests that ran or were skipped."""
    file = project / "timings.json"
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timings", str(file), *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(project / "cache")}
        | variables,
    )
    ran = json.loads(file.read_text())["seconds"] if file.exists() else {}
    return done.returncode, done.stdout + done.stderr, [name.rpartition("::")[2] for name in ran]


def cells(names: list[str]) -> list[list[str]]:
    return [name[10:-1].split("-") for name in names if name.startswith("test_grid[")]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_the_quick_tier_says_what_it_leaves_out(project, workers):
    status, printed, names = run(project, *workers)
    assert status == 0 and "test_quick" in names and "test_slow" not in names
    assert [name for name in names if name.startswith("test_names")] == ["test_names[b]"]
    grid = cells(names)
    assert {value for cell in grid for value in cell} == {
        *("flag=False", "flag=True", "a", "b", "c"),
        *(f"rows={row}" for row in range(4)),
    }
    assert len(grid) <= 6
    assert f"the quick tier left out 4 slow tests and {24 - len(grid)} cells of grids" in printed
    assert "make test-all" in printed and "most memory: " in printed


@pytest.mark.slow("starts pytest several times")
def test_all_and_full_and_rest(project):
    _, printed, names = run(project, "--tier", "all")
    grid = cells(names)
    assert "test_slow" in names and 12 <= len(grid) < 24
    assert len({pair for cell in grid for pair in itertools.combinations(cell, 2)}) == 8 + 6 + 12
    assert "which `pytest --tier full` runs" in printed
    _, printed, full = run(project, "--tier", "full")
    assert len(cells(full)) == 24 and "left out" not in printed
    _, _, quick = run(project)
    _, _, rest = run(project, "--tier", "rest")
    assert set(rest) == set(names) - set(quick)


def test_a_test_named_by_its_id_runs_in_any_tier(project):
    sample = "tests/test_sample.py"
    cell = "test_grid[flag=False-a-rows=3]"
    _, _, names = run(project, f"{sample}::test_slow", f"{sample}::{cell}")
    assert names == ["test_slow", cell]
    _, _, names = run(project, f"{sample}::test_grid")
    assert len(cells(names)) == 24


def test_tests_without_time_are_named_and_come_first(project):
    status, printed, _ = run(project, "--tier", "all", "--budget", "0")
    assert status == 0 and "tests not run: no time left in the budget" in printed
    assert "tests/test_sample.py::test_slow" in printed
    left = project / "cache" / "jax-q4k-tests" / "not-run.txt"
    left.write_text("tests/test_sample.py::test_slow\nanother.py::test")
    _, printed, names = run(project, "--tier", "all", "--budget", "600")
    assert names[0] == "test_slow" and "not run" not in printed
    assert left.read_text() == "another.py::test"


def test_a_worker_that_crashes_is_reported_with_the_tests_name(project):
    status, printed, _ = run(project, "--tier", "all", "-n", "2", CRASH="1")
    assert status != 0
    assert "crashed while running 'tests/test_sample.py::test_crash'" in printed


@pytest.mark.slow("starts pytest twice")
def test_programs_of_an_earlier_run_are_not_compiled_again(project, tmp_path):
    (project / "tests" / "test_program.py").write_text(PROGRAM)
    for name in ("first", "second"):
        code, output, _ = run(
            project, "tests/test_program.py", RUN=name, XDG_CACHE_HOME=str(tmp_path)
        )
        assert code == 0, output
    (project / "tests" / "test_program.py").unlink()
    kept = tmp_path / "jax-q4k-tests"
    assert list(kept.glob("programs/*")) and not list(kept.glob("programs-of-a-run-*"))


def test_slow_needs_a_reason(project):
    file = project / "tests" / "test_bare.py"
    file.write_text("import pytest\n\n@pytest.mark.slow\ndef test_bare():\n    pass\n")
    try:
        status, printed, _ = run(project)
    finally:
        file.unlink()
    assert status != 0 and "test_bare: slow(reason) says why it is slow" in printed


def test_patterns_of_no_test_are_refused(project):
    file = project / "tests" / "test_pattern.py"
    file.write_text(
        "import pytest\n\n@pytest.mark.slow('many', quick=['a', 'q*'])\n"
        "@pytest.mark.parametrize('name', ['a', 'b'])\ndef test_pattern(name):\n    pass\n"
    )
    try:
        status, printed, _ = run(project)
    finally:
        file.unlink()
    assert status != 0 and "patterns that add no test: [('tests/test_pattern.py::" in printed
    assert "'q*')]" in printed


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covering(strength):
    rows = list(itertools.product(range(5), "abc", (False, True), range(3)))
    chosen = covering(rows, strength, seed="x")
    assert chosen == covering(rows, strength, seed="x") != covering(rows, strength, seed="y")

    def parts(row):
        return set(itertools.combinations(enumerate(row), strength))

    assert set().union(*map(parts, rows)) == set().union(*(parts(rows[i]) for i in chosen))
    fewest = [5, 15, 45][strength - 1]
    assert fewest <= len(chosen) <= 1.7 * fewest
