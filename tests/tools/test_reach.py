"""Selects the tests that a change can reach: too many are slow, too few would hide a failure."""

from __future__ import annotations

import subprocess

import pytest
from support.paths import ROOT

from tools import reach
from tools.imports import arrows, modules


def test_indirect_imports():
    """A format reaches the tests that multiply with it; a command reaches no kernel test."""
    format = reach.reached(["ptx_kernels/formats/q4_k.py"])
    assert format is not None
    assert {
        "tests/ptx_kernels/test_golden_ptx.py",
        "tests/jax_q4k/ops/test_matmul.py",
        "tests/models/engine/test_generate.py",
    } <= format
    command = reach.reached(["models/cli/commands/generate.py"])
    assert command is not None and "tests/models/cli/commands/test_generate.py" in command
    assert not any(test.startswith("tests/ptx_kernels/kernels/") for test in command)


@pytest.mark.parametrize("package", ["kernels", "formats", "ptx", "simulator"])
def test_kernels_and_their_language_reach_executed_machine_code(package):
    """A change of a kernel, of the table or of the simulator is confirmed again."""
    confirmed = {
        f"tests/tools/machine_code/test_confirmed_{what}.py" for what in ("subjects", "programs")
    }
    paths = sorted((ROOT / "ptx_kernels" / package).rglob("*.py"))
    assert len(paths) > 10
    for path in paths:
        found = reach.reached([str(path.relative_to(ROOT))])
        assert found is None or confirmed <= found, path
    rows = "tests/tools/machine_code/test_confirmed_rows.py"
    assert rows in (reach.reached(["ptx_kernels/ptx/instructions/integers.py"]) or ())


def test_sources_of_the_library_reach_what_computes_with_it():
    found = reach.reached(["jax_q4k/native/src/attention.h"])
    assert found is not None
    assert {"tests/jax_q4k/native/test_attention.py", "tests/models/golden/test_native.py"} <= found
    assert "tests/ptx_kernels/ptx/test_language.py" not in found


def test_files_are_reached_by_their_names():
    assert "tests/ptx_kernels/simulator/test_nvcc.py" in (
        reach.reached(["tests/data/cuda/build.py"]) or ()
    )
    assert "tests/docs/test_docs.py" in (reach.reached(["docs/guide.md"]) or ())
    assert "tests/examples/test_lora.py" in (reach.reached(["examples/lora.py"]) or ())
    assert "tests/docs/test_figures.py" in (reach.reached(["benchmarks/results/cpu.json"]) or ())


def test_a_test_reaches_itself_and_a_helper_those_that_import_it():
    assert "tests/models/runner/test_program_cache.py" in (
        reach.reached(["tests/models/runner/test_program_cache.py"]) or ()
    )
    helper = reach.reached(["tests/support/gguf_bytes.py"])
    assert helper is not None
    for test, (imports, _, _) in reach._tests().items():
        assert (test in helper) >= ("tests.support.gguf_bytes" in imports), test


@pytest.mark.parametrize("path", ["pyproject.toml", "tests/conftest.py", f"{1}new/{2}new"])
def test_all_tests_where_it_cannot_tell(path):
    assert reach.reached([path, "docs/guide.md"]) is None


def test_nothing_reaches_nothing():
    assert reach.reached([]) == set()
    assert reach.reached(["LICENSE"]) == set()


@pytest.mark.slow("reads every module")
def test_every_module_of_the_packages_reaches_a_test():
    """A module that no test imports, even indirectly, would never run the tests that it breaks."""
    covered = set().union(*(imports for imports, _, _ in reach._tests().values()))
    packages = modules(*reach.PACKAGES)
    alone = {name for name in packages if name not in covered}
    assert not {name for name in alone if not name.endswith("__main__")}


def test_arrows_see_imports_in_functions_and_of_the_tests_own_folder():
    graph = arrows(*reach._FOLDERS)
    assert (
        "ptx_kernels" in graph["tests.test_layers"] or "tools.imports" in graph["tests.test_layers"]
    )
    assert "tests.support.helpers" in graph["tests.models.golden_files"]


def test_a_change_is_the_difference_to_a_tree():
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository: an archive of the sources")
    assert reach.changed_since(reach.tree_hash()) == []
    assert reach.changed_since("0" * 40) is None
    empty = git("hash-object", "-t", "tree", "-w", "/dev/null")
    assert "README.md" in (reach.changed_since(empty) or ())


def test_each_check_has_a_tree_of_its_own(tmp_path, monkeypatch, capsys):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository: an archive of the sources")
    monkeypatch.setattr(reach, "PASSED", tmp_path / "passed.txt")
    reach.PASSED.write_text(f"others {reach.tree_hash()} on a day\ntests {'0' * 40} on another\n")
    for arguments in ([], ["--touches", "jax_q4k"]):
        assert reach.main(["--check", "others", *arguments]) == 0
        assert capsys.readouterr().out.strip() == ""
    assert reach.main([]) == 0
    said = capsys.readouterr()
    assert said.out == "tests\n" and "is not known here" in said.err
