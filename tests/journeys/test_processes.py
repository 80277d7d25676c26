"""Commands in processes of their own that share a program cache."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from support.implementations import needs_native

import jax_q4k

from .calls import Call, alone
from .commands import PACKAGE, arguments, finish, results, start
from .damage import ENDLESS, programs
from .journey import Journey

pytestmark = needs_native
CALL = Call(model="llama-bias", activations=None)
LONGER = dataclasses.replace(CALL, new_tokens=150)
#: Limit of the address space in bytes; a command takes less than half of it.
MEMORY = 8 << 30


@pytest.mark.slow("starts processes at once")
def test_two_commands_at_once(tmp_path: Path) -> None:
    """Starts two equal calls and a longer one together, then repeats them in Python."""
    journey, calls = Journey(tmp_path / "jax-q4k" / "programs"), (CALL, CALL, LONGER)
    running = [start(tmp_path, *arguments(call)) for call in calls]
    for call, process in zip(calls, running, strict=True):
        journey.say(f"generate {call}, beside others")
        journey.compare(results(finish(process)), alone(call))
    assert programs(journey.folder)
    for call in (LONGER, CALL):
        journey.take(call)


@pytest.mark.slow("compiles a program for each call of a journey")
@pytest.mark.parametrize("kinds", [("a pipe",) * 2, ("a link to /dev/zero", "200 GB of nothing")])
def test_files_without_an_end(kinds: tuple[str, str], tmp_path: Path) -> None:
    """Ignores such files: a command neither waits for one nor reads it into memory."""
    journey = Journey(tmp_path / "jax-q4k" / "programs")
    journey.folder.mkdir(parents=True, mode=0o700)
    journey.take(CALL)
    found = programs(journey.folder)
    for what, file in zip(kinds, found, strict=True):
        ENDLESS[what](file)
    process = start(tmp_path, *arguments(CALL), memory=MEMORY)
    journey.compare(results(finish(process)), alone(CALL))
    assert programs(journey.folder) == found  # programs that it looked for


@pytest.mark.slow("starts a command on each of several copies of the package")
def test_the_package_changes(tmp_path: Path) -> None:
    """Edits a module of a copy of the package, then its version; each state runs its own code."""
    copy = tmp_path / "copy"
    for name in ("jax_q4k", "ptx_kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE / name, copy / name, ignore=ignored)  # follows the `models` link

    def tokens() -> tuple[int, ...]:
        process = start(tmp_path / "cache", *arguments(CALL), package=copy)
        return results(finish(process))[0].tokens

    assert tokens() == alone(CALL)[0].tokens
    with (copy / "jax_q4k" / "models" / "network" / "rows.py").open("a") as file:
        file.write("\n_right = last_tokens\n\n\ndef last_tokens(vectors, lengths):\n")
        file.write("    return -_right(vectors, lengths)\n")
    other = tokens()
    assert other[0] != alone(CALL)[0].tokens[0]
    version = copy / "ptx_kernels" / "__init__.py"
    stat, text = version.stat(), version.read_text()
    now = jax_q4k.__version__
    assert now in text and not now.endswith("9")
    version.write_text(text.replace(now, now[:-1] + "9"))  # same length and modification time
    os.utime(version, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = len(programs(tmp_path / "cache" / "jax-q4k" / "programs"))
    assert tokens() == other
    after = len(programs(tmp_path / "cache" / "jax-q4k" / "programs"))
    assert after > before  # another version's programs are recompiled
