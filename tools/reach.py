"""Prints the test files that a change can affect: `python -m tools.reach [--since TREE]`.

`--record tests` writes to tests/passed.txt that every test passed on the tree that is checked out,
`--record others` that `.ci/others` did. `--touches PATH ...` prints the changed files that are
these or are below them instead.

The change is the difference between TREE (by default the one in tests/passed.txt on which
`--check`, `tests` or `others`, passed) and the commit that is checked out. It affects a test file
that imports a changed module, directly or indirectly; one whose strings name a changed file, or a
folder that contains it; and, if the change is in a package, one that starts processes. Prints
`tests`, which is all of them, if it cannot tell.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from .imports import OTHERS, PACKAGES, ROOT, arrows, modules

PASSED = ROOT / "tests" / "passed.txt"
CHECKS = ("tests", "others")
#: Files that every test depends on.
_EVERYTHING = ("pyproject.toml", "setup.py", "tests/conftest.py", "tests/support/tiers.py")
#: Files that no test reads.
_NOTHING = (".gitignore", "CHANGELOG.md", "LICENSE", "tests/passed.txt", "tests/README.md")
_FOLDERS = (*PACKAGES, *OTHERS)


def reached(changed: Iterable[str]) -> set[str] | None:
    """Returns the test files (paths from the root) that the changed paths affect; None for all."""
    found: set[str] = set()
    for path in changed:
        if path in _EVERYTHING:
            return None
        if path in _NOTHING:
            continue
        tests = _reached_by(path)
        if not tests and not path.startswith("tests/"):
            return None
        found |= tests
    return {path for path in found if (ROOT / path).exists()}


def _reached_by(path: str) -> set[str]:
    module, package = _module(path), path.split("/")[0] in PACKAGES
    names = {*Path(path).parts, Path(path).name.split(".")[0], path}
    names -= {"tests", "data", "support"}  # parts of all paths
    found = set()
    for test, (imports, strings, starts) in _tests().items():
        if module in imports or strings & names or (package and starts):
            found.add(test)
    return found


def _module(path: str) -> str:
    """Returns the module's name; for other files in a package, that of the package."""
    parts = Path(path).with_suffix("").parts if path.endswith(".py") else Path(path).parts[:-1]
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    known = modules(*_FOLDERS)
    while parts and ".".join(parts) not in known and not path.endswith(".py"):
        parts = parts[:-1]
    return ".".join(parts)


@cache
def _tests() -> dict[str, tuple[set[str], set[str], bool]]:
    """Maps each test file to its modules, its strings, and whether it starts processes."""
    found = {}
    for name, file in modules(*_FOLDERS).items():
        if name.startswith("tests.") and file.name.startswith("test_"):
            imports = _closure(name)
            of_tests = [m for m in imports if m.startswith("tests.")]
            strings = set().union(*map(_strings, of_tests))
            starts = any(_starts(m) for m in of_tests if not m.startswith("tests.support."))
            found[str(file.relative_to(ROOT))] = imports, strings, starts
    return found


def _closure(name: str) -> set[str]:
    """Returns direct and indirect imports of a module, with their packages and itself."""
    graph, found, left = arrows(*_FOLDERS), set[str](), [name]
    while left:
        module = left.pop()
        if module in graph and module not in found:
            found.add(module)
            left += graph[module] | _imports_by_name(module)
            left.append(module.rpartition(".")[0])
    return found


@cache
def _imports_by_name(module: str) -> set[str]:
    """Returns modules below a package whose __init__ imports some by name, and scripts by file."""
    known = modules(*_FOLDERS)
    file = known[module]
    if file.name != "__init__.py" or "import_module(" not in file.read_text():
        folder = module.rpartition(".")[0]
        files = {text for text in _strings(module) if text.endswith(".py")}
        return {f"{folder}.{text.removesuffix('.py')}" for text in files} & known.keys()
    below = {name for name in known if name.startswith(f"{module}.")}
    return {name for name in below if not name.endswith(".__main__")}


@cache
def _strings(module: str) -> set[str]:
    """Returns the strings of a module's text, and their parts between slashes."""
    tree = ast.parse(modules(*_FOLDERS)[module].read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    strings = {text for text in texts if isinstance(text, str) and len(text) < 200}
    return strings | {part for text in strings for part in text.split("/") if len(part) > 2}


def _starts(module: str) -> bool:
    text = modules(*_FOLDERS)[module].read_text()
    return any(word in text for word in ("subprocess", "multiprocessing", "runpy"))


def _is_below(path: str, paths: Iterable[str]) -> bool:
    return any(path == above or path.startswith(f"{above}/") for above in paths)


def tree_hash(revision: str = "HEAD") -> str:
    return _git("rev-parse", f"{revision}^{{tree}}").strip()


def changed_since(tree: str) -> list[str] | None:
    """Returns the paths that differ between a tree and the commit; None if git has no such tree."""
    try:
        listed = _git("diff-tree", "-r", "--name-only", "--no-renames", tree, "HEAD^{tree}")
        return listed.splitlines()
    except subprocess.CalledProcessError:
        return None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def passed() -> dict[str, str]:
    """Maps each check to the rest of its line in tests/passed.txt: tree hash, time, place."""
    lines = PASSED.read_text().splitlines() if PASSED.exists() else []
    return {check: rest for check, _, rest in (line.partition(" ") for line in lines)}


def record(check: str) -> str:
    """Writes the tree on which a check passed to tests/passed.txt; returns a message.

    A tree with uncommitted changes could not be found again, so it is not written.
    """
    mine = f":!{PASSED.relative_to(ROOT)}"
    if changes := _git("status", "--porcelain", "--", ".", mine):
        return f"tests/passed.txt stays as it is, since these are not committed:\n{changes}"
    now = f"{tree_hash()} {datetime.date.today()} Python {platform.python_version()}"
    lines = sorted((passed() | {check: now}).items())
    PASSED.write_text("".join(f"{name} {rest}\n" for name, rest in lines))
    return "tests/passed.txt names this tree now: commit it"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.reach",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--since", help="a tree or commit that git knows")
    parser.add_argument("--check", choices=CHECKS, default="tests", help="whose tree")
    parser.add_argument("--record", choices=CHECKS)
    parser.add_argument("--touches", nargs="+", metavar="PATH")
    arguments = parser.parse_args(argv)
    if arguments.record:
        print(record(arguments.record))
        return 0
    since = arguments.since or passed().get(arguments.check, "").partition(" ")[0]
    changed = changed_since(since) if since else None
    if changed is None:
        print(f"{since or 'no tree'} is not known here: everything counts", file=sys.stderr)
    if arguments.touches:
        paths = tuple(arguments.touches)
        found = paths if changed is None else [c for c in changed if _is_below(c, paths)]
        print(*found, sep="\n")
        return 0
    tests = None if changed is None else reached(changed)
    print(*(["tests"] if tests is None else sorted(tests)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
