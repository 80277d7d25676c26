"""The command line's cache of compiled programs, shared by runs."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from rich.console import Console

from jax_q4k.models.cli import cache

from ..golden_files import path

COMMAND = [sys.executable, "-m", "jax_q4k", "generate", str(path("llama-gqa")), "--tokens", "1,2,3"]


def run(*arguments, **variables):
    """Runs a command in a new process with these environment variables: (tokens, notes)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPIL", "JAX_PERSIST"))}
    done = subprocess.run(
        [*COMMAND, "-n", "3", "--temperature", "0", *arguments],
        env={**kept, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def entries(folder):
    return sorted(file.name for file in folder.glob("**/*-cache"))


@pytest.mark.slow("starts the command several times")
def test_a_second_run_neither_traces_nor_compiles(tmp_path):
    asked = {"XDG_CACHE_HOME": str(tmp_path), "JAX_LOG_COMPILES": "1"}
    first, notes = run(**asked)
    assert "Finished tracing" in notes and "Finished XLA compilation" in notes
    folder = tmp_path / "jax-q4k" / "programs"
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = {file: file.read_bytes() for file in folder.iterdir() if file.suffix == ".program"}
    assert sorted(file.name.split("-")[0] for file in kept) == ["beginpieces", "decoderows"]
    assert entries(folder) == []  # JAX's cache gets no copies
    second, notes = run(**asked, PYTHONPROFILEIMPORTTIME="1")
    assert second == first
    assert "Finished" not in notes and "jax_q4k.models.runner.program_cache" in notes
    assert not re.search(r"\bflax\b", notes)
    assert all(file.read_bytes() == body for file, body in kept.items())


@pytest.mark.slow("starts the command several times")
def test_no_cache(tmp_path):
    for variables in ({}, {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own")}):
        run("--no-cache", XDG_CACHE_HOME=str(tmp_path), **variables)
        assert entries(tmp_path) == []


@pytest.mark.slow("starts the command several times")
def test_the_place_that_jax_was_told_counts(tmp_path):
    run(
        XDG_CACHE_HOME=str(tmp_path / "xdg"),
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    assert entries(tmp_path / "own") and not (tmp_path / "xdg").exists()


@pytest.mark.slow("starts the command several times")
def test_a_place_that_cannot_be_used_is_a_line(tmp_path):
    (tmp_path / "jax-q4k").write_text("a file")
    tokens, notes = run(XDG_CACHE_HOME=str(tmp_path))
    line, *_ = notes.splitlines()
    assert line.startswith(f"compiled programs are not cached: {tmp_path}/jax-q4k/programs: ")
    assert len(tokens.split()) == 3


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A private cache folder for this process, which has no other cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "jax-q4k" / "programs"
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def notes_of(function=lambda: None, **options):
    notes = Console(file=io.StringIO(), width=300)
    with cache.programs(notes, **options):
        function()
    return notes.file.getvalue()


def compile_some(count=6):
    for i in range(count):
        jax.jit(lambda x, i=i: jnp.sin(x) * i)(jnp.ones(i + 1))


def test_its_size_is_bounded(home, monkeypatch):
    assert notes_of(compile_some) == ""
    sizes = [file.stat().st_size for file in home.glob("*-cache")]
    assert len(sizes) >= 6
    limit = sum(sizes) // 2
    monkeypatch.setitem(cache._SETTINGS, "jax_compilation_cache_max_size", limit)
    notes_of(lambda: compile_some(12))
    left = [file.stat().st_size for file in home.glob("*-cache")]
    assert 0 < sum(left) <= limit


@pytest.mark.parametrize("lookup", ["pwd.getpwuid", "grp.getgrgid"])
def test_an_owner_without_a_name(home, monkeypatch, recwarn, lookup):
    """JAX's cache, which would warn at each program, is off; that of whole programs is on."""

    def unknown(number):
        raise KeyError(f"not found: {number}")

    monkeypatch.setattr(lookup, unknown)
    with cache.programs(Console(file=io.StringIO())) as found:
        compile_some(1)
        assert found is not None
    assert not recwarn.list and entries(home) == []


def test_settings_are_as_before_afterwards(home):
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", *cache._SETTINGS)
    before = [getattr(jax.config, name) for name in names]
    notes_of()
    notes_of(wanted=False)
    with pytest.raises(ZeroDivisionError):
        notes_of(lambda: 1 / 0)
    assert [getattr(jax.config, name) for name in names] == before


def test_a_folder_of_another_user_is_not_trusted(home, monkeypatch):
    assert notes_of() == ""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    line = f"compiled programs are not cached: {home} belongs to another user\n"
    assert notes_of(compile_some) == line
    assert entries(home) == []


def test_a_folder_that_others_may_write_is_not_trusted(home):
    home.mkdir(parents=True)
    home.chmod(0o777)
    line = f"compiled programs are not cached: {home} can be written by other users\n"
    assert notes_of(compile_some) == line
    assert entries(home) == []


def test_a_folder_that_cannot_be_written(home, monkeypatch):
    home.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert notes_of() == f"compiled programs are not cached: {home} cannot be written\n"


def test_places(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache.folder() == tmp_path / ".cache" / "jax-q4k" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(cache.folder()) == "/caches/jax-q4k/programs"
