"""Programs kept in a folder: found, they are not traced; what is wrong or other is compiled."""

from __future__ import annotations

import logging
import os
import pickle
import shutil

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import kept
from jax_q4k.kept import KeptPrograms

X = jnp.arange(6, dtype=jnp.float32)


class Calls:
    """A program that counts how often it is traced, as new processes would find it."""

    def __init__(self, folder, max_bytes=1 << 20):
        self.kept, self.traced = KeptPrograms(folder, max_bytes), 0

    def __call__(self, x=X, *, scale=2, name="program", model="m", **about):
        def function(x, unused):
            self.traced += 1
            return x * scale

        given = x, jnp.int32(0)
        program, about = jax.jit(function, keep_unused=True), {"scale": scale, **about}
        (device,) = x.devices()
        results = jax.ShapeDtypeStruct(x.shape, x.dtype)
        loaded = self.kept.get(name, program, given, results, device, model=model, about=about)
        (y,) = loaded(given)
        assert y.tolist() == (x * scale).tolist()
        return self.traced


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


def test_what_is_kept_is_not_traced(calls, tmp_path):
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
    "the sources": ({}, lambda patch: patch.setattr(kept, "_sources", lambda: "edited")),
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


DAMAGE = {
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
    assert calls() == 2  # it was replaced


def test_a_file_under_anothers_name_is_compiled_again(calls, tmp_path):
    calls(scale=2)
    (two,) = tmp_path.iterdir()
    calls(scale=3)
    (three,) = set(tmp_path.iterdir()) - {two}
    shutil.copy(three, two)
    assert calls(scale=2) == 3


def test_those_used_least_recently_make_room(tmp_path):
    Calls(tmp_path)()
    (file,) = tmp_path.iterdir()
    calls = Calls(tmp_path, max_bytes=file.stat().st_size * 5 // 2)
    calls(scale=3)
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))  # clocks of file systems are coarse
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
        assert caplog.messages == []  # unless asked
        with jax.explain_cache_misses(True):
            assert calls() == 2
    compiled, kept = (m for m in caplog.messages if m.startswith("program is "))
    assert "program is compiled: " in compiled and "program is not kept: " in kept
