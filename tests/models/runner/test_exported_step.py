"""Decode steps compiled ahead of time: they run in another process; invalid files are refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.cache import compiled_files
from jax_q4k.models import cli
from tools import aot

from .. import golden_files

NAME, PROMPT, COUNT = "llama-gqa", [1, 5, 9, 2], 12

DECODE = """
import sys, numpy as np
from jax_q4k import models
step = models.load_compiled(sys.argv[2], models.load(sys.argv[1]))
cache, tokens, given = step.create_cache(), [], list(map(int, sys.argv[3].split(",")))
while len(tokens) < int(sys.argv[4]):
    token = given.pop(0) if given else tokens[-1]
    logits, cache = step(np.full(step.batch, token, np.int32), cache)
    if not given:
        tokens.append(int(np.argmax(logits[-1])))
print(step.batch, step.capacity, step.cache_dtype, *tokens)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "step.bin"
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.jit(lambda x: x + 1)(0)  # JAX checks only once whether it has a cache
    before = set(cache.iterdir())
    models.compile_step(golden_files.model(NAME), path, batch=2, context=64)
    assert set(cache.iterdir()) == before, "JAX keeps a copy of what goes to the file"
    return path


@pytest.mark.slow("compiles several programs")
@pytest.mark.cpu_kernels
def test_another_process_decodes_the_same_tokens(file):
    want = models.generate(golden_files.model(NAME), PROMPT, max_new_tokens=COUNT).tokens
    arguments = str(golden_files.path(NAME)), str(file), ",".join(map(str, PROMPT)), str(COUNT)
    done = subprocess.run(
        [sys.executable, "-c", DECODE, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "64", "float32", *map(str, want)]


def test_a_step_that_was_compiled_before_runs(file, tmp_path):
    """An executable from JAX's compilation cache, which tests use, could not be saved on a CPU."""
    path = tmp_path / "again.bin"
    models.compile_step(golden_files.model(NAME), path, batch=2, context=64)
    token = np.ones(2, np.int32)
    step = models.load_compiled(path, golden_files.model(NAME))
    jax.block_until_ready(step(token, step.create_cache()))


@pytest.mark.slow("compiles programs of three models", quick=["qwen35"])
@pytest.mark.cpu_kernels
@pytest.mark.parametrize("name", ["qwen35", "gemma4-e", "deepseek2-noyarn"])
def test_states_and_pages_of_other_kinds(name, tmp_path):
    model = golden_files.model(name)
    models.compile_step(model, tmp_path / "step.bin", batch=2, context=64)
    step = models.load_compiled(tmp_path / "step.bin", model)
    cache, tokens, given = step.create_cache(), [], list(PROMPT)
    while len(tokens) < COUNT:
        token = given.pop(0) if given else tokens[-1]
        logits, cache = step(np.full(step.batch, token, np.int32), cache)
        if not given:
            tokens.append(int(np.argmax(logits[-1])))
    want = models.generate(model, PROMPT, max_new_tokens=COUNT, ignore_end=True).tokens
    assert tokens == want


@pytest.mark.slow("compiles several programs")
def test_the_command(tmp_path, capsys):
    path = tmp_path / "step.bin"
    arguments = [
        "compile",
        str(golden_files.path(NAME)),
        "--context",
        "32",
        "--cache-dtype",
        "bfloat16",
    ]
    assert cli.main([*arguments, "-o", str(path), "--implementation", "xla"]) == 0
    assert f"{path}: " in capsys.readouterr().err
    step = models.load_compiled(path, golden_files.model(NAME))
    assert (step.batch, step.capacity, step.cache_dtype) == (1, 32, "bfloat16")
    assert cli.main([*arguments, "-o", str(path), "--batch", "0"]) == 2
    assert "batch=0" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["step.bin"]


def altered(data, **fields):
    """The file's bytes with other header fields and a matching header checksum."""
    at = len(compiled_files.MAGIC)
    length = int.from_bytes(data[at : at + 4], "little")
    start = at + 4 + 32
    header = json.loads(data[start : start + length]) | fields
    text = json.dumps(header).encode()
    head = compiled_files.MAGIC + len(text).to_bytes(4, "little") + hashlib.sha256(text).digest()
    return head + text + data[start + length :]


class Exploding:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


WRONG = {
    "an empty file": (lambda data: b"", "magic"),
    "a plain pickle": (lambda data: pickle.dumps(Exploding()), "magic"),
    "a pickle behind the magic": (
        lambda data: compiled_files.MAGIC + pickle.dumps(Exploding()) * 9,
        "header",
    ),
    "a pickle as the body": (
        lambda data: altered(data[: -(1 << 10)]) + pickle.dumps(Exploding()),
        "body",
    ),
    "cut off in the magic": (lambda data: data[:9], "magic"),
    "cut off in the header": (lambda data: data[:100], "header"),
    "cut off in the body": (lambda data: data[:-1], "body"),
    "too long": (lambda data: data + b"\0", "body"),
    "a bit of the header": (lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:], "header"),
    "a bit of the body": (lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], "body"),
    "no fields": (lambda data: altered(data, extra=1), "header"),
    "a field of another type": (lambda data: altered(data, shapes=3), "header"),
    "another program": (lambda data: altered(data, program="score"), "program"),
    "another model": (lambda data: altered(data, model="0" * 64), "model"),
    "another device": (lambda data: altered(data, device="H200"), "device"),
    "another processor": (lambda data: altered(data, device="cpu 0123"), "device"),
    "no shapes": (lambda data: altered(data, shapes={}), "shapes"),
    "shapes that do not agree": (
        lambda data: altered(
            data,
            shapes={"batch": 2, "capacity": 32, "cache_dtype": "float32", "arguments": []},
        ),
        "shapes",
    ),
    "another JAX": (lambda data: altered(data, versions={"jax": "0.9"}), "versions"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_files_are_refused_before_they_are_loaded(what, file, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_files, "load_program", lambda *_: pytest.fail("it was loaded"))
    change, field = WRONG[what]
    path = tmp_path / "wrong.bin"
    path.write_bytes(change(file.read_bytes()))
    with pytest.raises(jq.CompiledFileError) as error:
        models.load_compiled(path, golden_files.model(NAME))
    assert error.value.field == field and str(path) in str(error.value)


def test_an_executable_that_xla_does_not_know(file, tmp_path):
    """The checksums are right, but the body is wrong: XLA's error becomes ours."""
    data, body = file.read_bytes(), b"no executable"
    checksum = hashlib.sha256(body).hexdigest()
    head = altered(data[: -body_bytes(data)], body_bytes=len(body), body_sha256=checksum)
    (tmp_path / "wrong.bin").write_bytes(head + body)
    with pytest.raises(jq.CompiledFileError, match="body: XLA cannot load it"):
        models.load_compiled(tmp_path / "wrong.bin", golden_files.model(NAME))


def body_bytes(data):
    at = len(compiled_files.MAGIC)
    length = int.from_bytes(data[at : at + 4], "little")
    return json.loads(data[at + 36 : at + 36 + length])["body_bytes"]


def test_a_file_for_another_model(file):
    with pytest.raises(jq.CompiledFileError, match="model: is for"):
        models.load_compiled(file, golden_files.model("qwen2-bias"))


def test_arguments_of_other_shapes_are_refused(file):
    step = models.load_compiled(file, golden_files.model(NAME))
    with pytest.raises(TypeError, match=r"is int32 \(3,\); the .* for int32 \(2,\)"):
        step(np.zeros(3, np.int32), step.create_cache())
    other = models.PagedCache.create(golden_files.model(NAME).config, 2, 128)
    with pytest.raises(TypeError, match="the program was compiled for float32"):
        step(np.zeros(2, np.int32), other)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"target": "tpu"}, "target='tpu' must be one of cpu, h200"),
        ({"context": 0}, "context=0 must be 1 to"),
        ({"context": 1 << 20}, "the model's context length"),
        ({"batch": 0}, "batch=0"),
    ],
)
def test_steps_that_cannot_be_compiled(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        models.compile_step(golden_files.model(NAME), tmp_path / "step.bin", **fields)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
def test_a_step_for_an_h200_is_whole_and_is_not_loaded_elsewhere(tmp_path):
    path = tmp_path / "step.bin"
    size = models.compile_step(golden_files.model(NAME), path, target="h200", batch=8, context=64)
    header, body = compiled_files._parsed(str(path), path.read_bytes())
    assert (header.target, header.device, len(body)) == ("h200", "H200", size)
    assert b".visible .entry" in body  # the PTX of our kernels
    if jax.default_backend() == "cpu":
        with pytest.raises(jq.CompiledFileError, match="device: is for H200; here is cpu"):
            models.load_compiled(path, golden_files.model(NAME))
