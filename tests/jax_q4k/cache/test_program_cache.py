"""On-disk program cache: hits are not traced; damaged and different programs are recompiled."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k.cache import compiled_files, program_cache
from jax_q4k.cache.program_cache import ProgramCache

X = jnp.arange(6, dtype=jnp.float32)


class Calls:
    """A program that counts its traces, looked up as in a new process."""

    def __init__(self, folder, max_bytes=1 << 20):
        self.kept, self.traced = ProgramCache(folder, max_bytes), 0

    def __call__(self, x=X, *, scale=2, name="program", model="m", results=None, **about):
        def function(x, unused):
            self.traced += 1
            return x * scale

        given = x, jnp.int32(0)
        program, about = jax.jit(function, keep_unused=True), {"scale": scale, **about}
        (device,) = x.devices()
        results = results or jax.ShapeDtypeStruct(x.shape, x.dtype)
        loaded = self.kept.get(name, program, given, results, device, model=model, about=about)
        (y,) = loaded(given)
        assert y.tolist() == (x * scale).tolist()
        return self.traced


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


def test_a_cached_program_is_not_traced(calls, tmp_path):
    assert calls() == 1
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    assert calls() == 1 and file.read_bytes() == before


OTHERS = {
    "model": ({"model": "n"}, None),
    "name": ({"name": "other"}, None),
    "about": ({"scale": 3}, None),
    "shape": ({"x": X[:5]}, None),
    "dtype": ({"x": X.astype(jnp.int32)}, None),
    "XLA's flags": ({}, lambda patch: patch.setenv("XLA_FLAGS", "--xla_dump_to=")),
    "the sources": ({}, lambda patch: patch.setattr(program_cache, "_sources", lambda: "edited")),
    "JAX": ({}, lambda patch: patch.setattr(jax, "__version__", "9.9")),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_program_is_another_file(what, calls, tmp_path, monkeypatch):
    assert calls() == 1
    changed, patch = OTHERS[what]
    if patch:
        patch(monkeypatch)
    assert calls(**changed) == 2 and len(list(tmp_path.iterdir())) == 2
    assert calls(**changed) == 2


def test_another_structure_is_another_program(tmp_path):
    """The leaves are the same, but a function's behavior may depend on the structure."""

    def function(both):
        return both["a"] + both["b"] if isinstance(both, dict) else both[0] - both[1]

    programs, (device,) = ProgramCache(tmp_path, 1 << 20), X.devices()
    program, result = jax.jit(function, keep_unused=True), jax.ShapeDtypeStruct(X.shape, X.dtype)
    for both, want in (({"a": X, "b": X}, 2 * X), ((X, X), 0 * X)):
        loaded = programs.get("program", program, (both,), result, device, model="m", about={})
        (y,) = loaded(jax.tree.leaves(both))
        assert y.tolist() == want.tolist()
    assert len(list(tmp_path.iterdir())) == 2


def test_an_option_of_jax(calls):
    calls()
    with jax.default_matmul_precision("highest"):
        assert calls() == calls() == 2
    assert calls() == 2


def test_an_implementation_has_programs_of_its_own(calls):
    calls()
    with jq.implementation("xla", fused=("mlp", "matmul")):
        assert calls() == 2
    with jq.implementation("xla", fused=("matmul", "mlp")):
        assert calls() == 2


def test_a_tuning_table_that_changes(calls, tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    table.write_text("{}")
    monkeypatch.setenv("JAX_Q4K_TUNING", str(table))
    assert calls() == calls() == 1
    table.write_text("{ }")
    assert calls() == 2


def forged(header: bytes) -> bytes:
    """A file whose header has the right checksum."""
    length = len(header).to_bytes(4, "little")
    return compiled_files.MAGIC + length + hashlib.sha256(header).digest() + header


DAMAGE = {
    "an older format": lambda data: data.replace(b"program 2", b"program 1", 1),
    "a header that is no JSON": lambda data: forged(b"{"),
    "a header that is no text": lambda data: forged(b"\xff\xfe"),
    "a header nested deeply": lambda data: forged(b"[" * 100_000),
    "a header with a long number": lambda data: forged(b"1" * 5000),
    "a header of another kind": lambda data: forged(b"[]"),
    "cut off": lambda data: data[:-100],
    "cut off in the header": lambda data: data[:50],
    "empty": lambda data: b"",
    "a bit": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "a pickle": lambda data: pickle.dumps(data),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_compiled_again(what, calls, tmp_path):
    calls()
    (file,) = tmp_path.iterdir()
    file.write_bytes(DAMAGE[what](file.read_bytes()))
    assert calls() == 2
    assert calls() == 2  # the file was replaced


def other_user(path):
    os.chown(path, 1234, -1)


PLACES = {
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to(path.parent / "none")),
    "a sparse file": lambda path: os.truncate(path, 200 << 30),
    "a file that others may write": lambda path: path.chmod(0o666),
    "another user's file": other_user,
}


@pytest.mark.parametrize("what", PLACES)
def test_foreign_files_are_replaced(what, calls, tmp_path):
    """A call does not wait for it, read all of it, or run it; it replaces the file."""
    if what == "another user's file" and os.geteuid():
        pytest.skip("only root can give files away")
    calls()
    (file,) = tmp_path.iterdir()
    PLACES[what](file)
    assert calls() == 2
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert calls() == 2  # the file was replaced


def test_a_folder_in_a_files_place(calls, tmp_path):
    calls()
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert calls() == 2 and file.is_dir()


def test_files_of_older_formats_are_dropped(calls, tmp_path):
    calls(scale=2)
    (old,) = tmp_path.iterdir()
    old.write_bytes(DAMAGE["an older format"](old.read_bytes()))
    calls(scale=3)
    assert not old.exists() and len(list(tmp_path.iterdir())) == 1


def test_a_file_for_other_results_is_not_used(calls, tmp_path):
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    calls()
    with pytest.raises(AssertionError, match="program returns .*, expected "):
        calls(results=jax.ShapeDtypeStruct((7,), X.dtype))
    with pytest.raises(AssertionError, match="program returns .*, expected "):
        calls(results=[x, x])
    assert calls() == 3 and len(list(tmp_path.iterdir())) == 1


def test_nothing_is_cached_of_sources_that_changed_since_the_import(calls, tmp_path, monkeypatch):
    """The file's key has the current sources, but the traced code may have been imported before."""
    monkeypatch.setattr(program_cache, "_IMPORTED", 0)
    assert calls() == 1 and list(tmp_path.iterdir()) == []


def test_sources_are_told_apart_by_content(tmp_path, monkeypatch):
    file = tmp_path / "module.py"
    file.write_text("a = 1")
    monkeypatch.setattr(program_cache, "_source_files", lambda: [str(file)])
    before, times = program_cache._sources.__wrapped__(), file.stat()
    file.write_text("a = 2")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert program_cache._sources.__wrapped__() != before


def test_threads_leave_jaxs_cache_as_it_was(tmp_path):
    """The switch belongs to the process; each thread turns it off while it compiles."""
    assert jax.config.values["jax_enable_compilation_cache"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: Calls(tmp_path)(scale=i), range(2, 14)))
    assert jax.config.values["jax_enable_compilation_cache"]


def test_a_file_under_anothers_name_is_compiled_again(calls, tmp_path):
    calls(scale=2)
    (two,) = tmp_path.iterdir()
    calls(scale=3)
    (three,) = set(tmp_path.iterdir()) - {two}
    shutil.copy(three, two)
    assert calls(scale=2) == 3


def test_the_least_recently_used_make_room(tmp_path):
    Calls(tmp_path)()
    (file,) = tmp_path.iterdir()
    calls = Calls(tmp_path, max_bytes=file.stat().st_size * 5 // 2)
    calls(scale=3)
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))  # file system clocks are coarse
    calls(scale=2)  # used again
    calls(scale=4)
    assert len(list(tmp_path.iterdir())) == 2
    before = calls.traced
    assert calls(scale=2) == calls(scale=4) == before
    assert calls(scale=3) == before + 1


def test_a_folder_that_is_not_there(tmp_path, caplog):
    calls = Calls(tmp_path / "none")
    with caplog.at_level(logging.WARNING):
        assert calls() == 1
        assert caplog.messages == []  # silent by default
        with jax.explain_cache_misses(True):
            assert calls() == 2
    compiled, kept = (m for m in caplog.messages if m.startswith("program is "))
    assert "program is compiled: " in compiled and "program is not cached: " in kept
