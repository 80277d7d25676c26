"""A model sharded over the devices of two processes gives the results of one device."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from support.helpers import free_port
from support.paths import GOLDEN, ROOT

import jax_q4k as jq
from jax_q4k import models

PROCESSES, DEVICES = 2, 4  # per process
TIMEOUT = 240  # seconds
PROMPT = [1, 5, 9, 2, 7, 11, 3, 4]

#: Runs the example and prints the bytes read of each tensor.
COUNTED = """
import json, runpy, sys
import jax_q4k as jq
from jax_q4k.gguf.source import Source
counts, read = {}, Source.read_into
def counted(self, offset, target, field):
    if field.startswith("tensor "):  # one thread reads it
        name = field.split("'")[1]
        counts[name] = counts.get(name, 0) + target.nbytes
    read(self, offset, target, field)
Source.read_into = counted
sys.argv[0] = "examples/multihost_decode.py"
with jq.implementation(activations="f32"):
    runpy.run_path(sys.argv[0], run_name="__main__")
print("counts:", json.dumps(counts))
"""

#: Calls of generation on one kind of mesh. The explicit mesh has a batch axis. The number of tokens
#: of a step must not depend on the clock, which differs between processes.
WAYS = """
import json, sys, time, types, warnings
import jax
jax.distributed.initialize(sys.argv[-5], int(sys.argv[-3]), int(sys.argv[-1]))
import jax_q4k as jq
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from jax_q4k import models
from jax_q4k.models.engine import loop
warnings.simplefilter("ignore")
def compared(*_, **__):
    raise AssertionError("comparing processes' values costs a program for each array")
multihost_utils.assert_equal = compared
kind, count = AxisType[sys.argv[2]], jax.device_count()
shape = (count,) if kind == AxisType.Auto else (2, count // 2)
mesh = jax.make_mesh(shape, ("dp", "tp")[-len(shape):], axis_types=(kind,) * len(shape))
model = models.load(sys.argv[1], mesh=mesh)
# a token seems to take process 0 no time, and process 1 longer than a step may
factor = 1e9 if jax.process_index() else 1e-9
clock = dict(perf_counter=lambda: factor * time.perf_counter(), thread_time=time.thread_time)
loop.time = types.SimpleNamespace(monotonic=time.monotonic, **clock)
with jq.implementation(activations="f32"):
    print("ways:", json.dumps(ways(model)))
"""


def ways(model: Any) -> list[Any]:
    """Runs sampling with penalties, a batch with a stop string, a stream, and scoring."""
    text, length = "Once upon a time, in a village by the sea,", 8
    options = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3, "seed": 3}
    batch = models.generate(model, [text, text[:10]], max_new_tokens=2 * length, stop=["Spe"])
    pieces = list(models.stream(model, text, max_new_tokens=2 * length, stop=["Spe"]))
    return [
        models.generate(model, text, max_new_tokens=length, **options).tokens,
        [output.tokens for output in batch],
        [pieces[-1].output.text, pieces[-1].output.finish_reason],
        round(models.score(model, text).nats, 2),
    ]


def processes(code: str, *arguments: object) -> list[str]:
    """Runs `code` in each process with these arguments and its index; returns what each prints."""
    port = free_port()
    count = f"--xla_force_host_platform_device_count={DEVICES}"  # replaces this process's count
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {count}",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)]
            + ["--coordinator", f"127.0.0.1:{port}"]
            + ["--processes", str(PROCESSES), "--process", str(process)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(PROCESSES)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 0, text
    return printed


def after(label: str, text: str) -> Iterator[str]:
    return (line.removeprefix(label) for line in text.splitlines() if line.startswith(label))


@pytest.mark.slow("starts four processes")
def test_tokens_and_parts() -> None:
    path = GOLDEN / "llama-gqa.Q4_K_M.gguf"
    printed = processes(COUNTED, path, " ".join(map(str, PROMPT)), "--ids", "--new-tokens", 8)
    model = models.load(path)
    with jq.implementation(activations="f32"):
        want = models.generate(model, PROMPT, max_new_tokens=8).tokens
    first, second = (list(after("tokens: ", text)) for text in printed)
    assert [int(token) for token in first[0].split()] == want
    assert second == []  # only process 0 prints the text

    size = sum(leaf.nbytes for leaf in model.weights)
    with jq.gguf.TensorFile(path) as file:
        infos = file.header.tensors
    for process, text in enumerate(printed):
        (line,) = after(f"process {process} of {PROCESSES}: ", text)
        assert line.startswith(f"{DEVICES} of {PROCESSES * DEVICES} devices, read ")
        held = int(line.split(" holds ")[1].split()[0])
        assert size / PROCESSES <= held < 0.7 * size
        (counts,) = map(json.loads, after("counts: ", text))
        assert counts.keys() == infos.keys()
        for name in ("token_embd", "blk.0.ffn_gate", "blk.1.ffn_up", "blk.0.ffn_down"):
            weight = f"{name}.weight"
            assert counts[weight] == infos[weight].nbytes // PROCESSES
        assert counts["output_norm.weight"] == infos["output_norm.weight"].nbytes


@pytest.mark.slow("starts four processes, each with programs to compile")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_generation_in_two_processes(kind: str) -> None:
    path = GOLDEN / "text-spm.Q4_K_M.gguf"
    code = f"from typing import Any\n{inspect.getsource(ways)}\n{WAYS}"
    found = [json.loads(next(after("ways: ", text))) for text in processes(code, path, kind)]
    with jq.implementation(activations="f32"):
        want = ways(models.load(path))
    assert found == [want, want]


@pytest.mark.parametrize(
    "command", [["multihost_decode.py", "demo", "Once"], ["multihost_serve.py", "demo"]]
)
def test_place_is_given_whole(command: list[str]) -> None:
    example, *arguments = command
    done = subprocess.run(
        [sys.executable, f"examples/{example}", *arguments, "--processes", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode != 0
    assert "--coordinator, --processes and --process go together" in done.stderr
    assert jax.process_count() == 1
