"""Bugs planted in Python and C++: each adds one switch and changes nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from jax_q4k.native import build
from tools.source_mutation import cpp_code, python_code, tree
from tools.source_mutation.mutant import Mutant, apply, draw

PYTHON = '''"""A module."""

from __future__ import annotations

import os

LIMIT = 3


def clamp(x: int, *, low: int = 0, high: int = 9) -> int:
    """The nearest in range."""
    if x < low:
        return low
    found = [
        min(x, high),
    ]
    found += [os.sep and f"{x + 1}"]
    return found[0]
'''


def changes(operator: str) -> set[tuple[str, str]]:
    found = python_code.mutants("m.py", PYTHON)
    return {(m.before, m.after) for m in found if m.operator == operator}


def test_python_mutants_are_of_functions_alone():
    assert changes("comparison") == {("x < low", "(x <= low)")}
    assert changes("condition") == {("x < low", "(not (x < low))")}
    assert changes("function") == {("min(x, high)", "(max(x, high))")}
    assert changes("statement") == {('found += [os.sep and f"{x + 1}"]', "pass")}
    assert changes("and/or") == {('os.sep and f"{x + 1}"', "(os.sep or f'{x + 1}')")}
    assert changes("constant") == {("0", "(1)")}  # not LIMIT, no default, nothing in an f-string
    assert changes("arithmetic") == set()


def run_python(mutants: list[Mutant], active: int, folder: Path) -> list[int]:
    (folder / "jax_q4k").mkdir(exist_ok=True)
    switch = Path(tree.__file__).with_name("switch.py").read_text()
    (folder / "jax_q4k" / "mutant_switch.py").write_text(switch)
    text = python_code.with_import(apply(PYTHON, list(enumerate(mutants, 1))))
    assert len(text.splitlines()) == len(PYTHON.splitlines())
    (folder / "m.py").write_text(text)
    program = "import m, json; print(json.dumps([m.clamp(x) for x in (-2, 0, 4, 12)]))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(folder), "MUTANT": str(active)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout) if done.returncode == 0 else [done.returncode]


def test_python_mutants_are_switched_one_by_one(tmp_path):
    mutants = draw(python_code.mutants("m.py", PYTHON), 100, seed=1)
    assert len(mutants) >= 5
    assert run_python(mutants, 0, tmp_path) == [0, 0, 4, 9]
    changed = [run_python(mutants, n, tmp_path) for n in range(1, len(mutants) + 1)]
    wrong = {m.operator for m, got in zip(mutants, changed, strict=True) if got != [0, 0, 4, 9]}
    assert {"condition", "function"} & wrong and len(wrong) >= 2


def test_draws_are_deterministic_and_do_not_overlap():
    found = list(python_code.mutants("m.py", PYTHON))
    first = draw(found, 6, seed=3)
    assert first == draw(found, 6, seed=3)
    assert not any(a.overlaps(b) for a in first for b in first if a is not b)
    assert {m.operator for m in draw(found, 4, seed=0)} != {"constant"}


CPP = """
#include <algorithm>
#include <cstdio>
int clamp(int x, int low, int high) {
  if (x < low) return low;
  else if (x == 100)
    x = 2 * x;
  else
    x = x + 1;
  return std::min(x, high) - 1;
}
int main() {
  for (int x : {-2, 0, 4, 12, 100}) std::printf("%d ", clamp(x, 0, 9));
}
"""


#: Selects a mutant after code with switches has run, like a fork of a process with the library.
LATER = """int main(int count, char** given) {
  if (count > 1) {
    clamp(4, 0, 9);
    setenv("MUTANT", given[1], 1);
    jax_q4k_mutant::jax_q4k_mutants_reset();
  }
"""


def test_cpp_mutants_are_switched_one_by_one(tmp_path):
    mutants = draw(cpp_code.mutants("m.cpp", CPP), 100, seed=0)
    assert {m.operator for m in mutants} >= {"operator", "constant", "condition", "statement"}
    planted = apply(CPP, list(enumerate(mutants, 1)))
    assert planted.count("int main() {") == 1
    (tmp_path / "m.cpp").write_text(planted.replace("int main() {", LATER))
    (tmp_path / "mutants.h").write_text(cpp_code.header())
    command = [*build.compiler(), "-std=c++17", "-include", "mutants.h", "m.cpp", "-o", "m"]
    subprocess.run(command, cwd=tmp_path, check=True)

    def printed(number: int, later: bool = False) -> str:
        variables = {"MUTANT": "0" if later else str(number), "MUTANT_HITS": str(tmp_path)}
        command = [tmp_path / "m", *([str(number)] if later else [])]
        return subprocess.check_output(command, env=os.environ | variables, text=True, timeout=20)

    assert printed(0) == "0 0 4 8 8 "
    seen = {
        int(line.split("\t")[0])
        for f in tmp_path.glob("*.cpp")
        if f.stem != "m"
        for line in f.read_text().splitlines()
    }
    assert seen <= set(range(1, len(mutants) + 1)) and len(seen) >= len(mutants) - 2
    different = [n for n in range(1, len(mutants) + 1) if printed(n) != printed(0)]
    assert len(different) >= len(mutants) / 2
    assert all(printed(n, later=True) == printed(n) for n in different[:3])


@pytest.mark.parametrize("path", ["models/sampling/params.py", "jax_q4k/ops/op.py"])
def test_real_modules_stay_python(path):
    text = (ROOT / path).read_text()
    mutants = draw(python_code.mutants(path, text), 40, seed=0)
    planted = python_code.with_import(apply(text, list(enumerate(mutants, 1))))
    assert ast.unparse(ast.parse(planted)) != ast.unparse(ast.parse(text))
    assert planted.count(f"{python_code.SWITCH}(") == len(mutants)


def test_mutants_come_back_from_their_file(tmp_path):
    mutants = draw(python_code.mutants("m.py", PYTHON), 5, seed=1)
    tree.write(tmp_path / "mutants.json", mutants)
    assert tree.read(tmp_path / "mutants.json") == mutants
