"""`jax-q4k bench` and its measurements."""

import importlib.util
import json
import math
import os
import re
import time

import jax
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.tasks import bench

from ..golden_files import model, path

pytestmark = pytest.mark.cpu_kernels

FILE = str(path("llama-gqa"))


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command line: (exit code, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        code = cli.main(("bench", *map(str, arguments)))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def exact():
    """Float32 activations, so that passes in chunks give the results of full passes."""
    with jq.implementation("native", activations="f32"):
        yield


@pytest.mark.slow("compiles several programs", quick=["depth=20-*-llama-gqa"])
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "lfm2"])
@pytest.mark.parametrize("kind", ["pp", "tg"])
@pytest.mark.parametrize("depth", [0, 20])
def test_the_models_work_is_timed(name, kind, depth, monkeypatch):
    """Full passes over the same tokens predict the last token after a test.

    A prompt after cached tokens is cut into chunks.
    """
    monkeypatch.setattr(bench, "PIECE", 16)
    given, test = model(name), bench.Test(kind, 20 if kind == "pp" else 5, depth, batch=2)
    made = bench._Bench(given, test, np.float32, np.random.default_rng(1))
    chunks, ends = [], []
    chunk = made.chunk
    monkeypatch.setattr(made, "chunk", lambda *a: chunks.append(chunk(*a)) or chunks[-1])

    def seconds(times, run, prepare):
        ends.append(run(prepare()))
        again = run(prepare())  # the cached tokens are still there
        np.testing.assert_array_equal(again[0], ends[0][0])
        return [1.0] * times

    monkeypatch.setattr(bench, "_seconds", seconds)
    (made.prompts if kind == "pp" else made.decoding)(2)
    [(token, cache)] = ends
    if kind == "pp":  # the test's own chunks are created first
        chunks = [*chunks[1:2], chunks[0]] if not depth else [chunks[1], *chunks[2:]]
    rows = np.concatenate([np.asarray(ids)[:, : int(n[0])] for ids, n in chunks], axis=1)
    steps = 5 if kind == "tg" else 0
    assert rows.shape == (2, max(depth, 1) if kind == "tg" else depth + 20)
    np.testing.assert_array_equal(cache.context_lens, [rows.shape[1] + steps] * 2)
    for _ in range(steps):
        following = np.asarray(given.logits(rows))[:, -1].argmax(-1)
        rows = np.concatenate([rows, following[:, None]], axis=1)
    logits = np.asarray(given.logits(rows))[:, -1]
    np.testing.assert_array_equal(token, logits.argmax(-1))


def test_the_clock_runs_until_the_device_is_done(monkeypatch):
    """Includes the wait for the result, but not compilation and preparation."""
    waited = []
    wait = jax.block_until_ready

    def block(x):
        time.sleep(0.05)
        waited.append(x)
        return wait(x)

    monkeypatch.setattr(jax, "block_until_ready", block)
    seconds = bench._seconds(3, lambda x: x + 1, lambda: time.sleep(0.1) or 1)
    assert waited == [1, 2] * 3 and all(0.05 <= s < 0.1 for s in seconds)


def test_rates():
    speed = bench.Speed(bench.Test("tg", 10, batch=3), (1.0, 2.0, 3.0))
    assert speed.samples == [30.0, 15.0, 10.0]
    assert speed.mean == pytest.approx(np.mean(speed.samples))
    assert speed.deviation == pytest.approx(np.std(speed.samples, ddof=1))
    assert bench.Speed(bench.Test("pp", 10), (1.0,)).deviation == 0.0
    assert bench.Test("tg", 128, 2048).name == "tg128 @ d2048"
    assert bench.Test("pp", 512).name == "pp512"


@pytest.mark.slow("compiles several programs")
def test_a_table(run):
    code, out, err = run(FILE, "-p", "8,16", "-n", "4", "-d", "0,16", "-b", "2", "-r", "2")
    assert (code, err) == (0, "")
    tests = re.findall(r"(\w+(?: @ d\d+)?) +[│|] +([\d,.]+) ± ([\d,.]+)", out)
    names = ["pp8", "pp16", "tg4", "pp8 @ d16", "pp16 @ d16", "tg4 @ d16"]
    assert [name for name, _, _ in tests] == names
    assert "llama Q4_K_M" in out


def test_sizes_of_models_in_a_table(run, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda _, test, *rest: bench.Speed(test, (2.0, 2.0)))
    code, out, err = run(FILE, "-p", "8", "-n", "0")
    shapes = [tensor.shape for tensor in models.named_tensors(model("llama-gqa")).values()]
    params = sum(map(math.prod, shapes))
    assert (code, err) == (0, "") and 1e6 < params < 1e9
    assert f"{params / 1e6:.2f} M" in out and "4.00 ± 0.00" in out


def test_json(run):
    code, out, err = run(FILE, "-p", "16", "-n", "4", "-r", "3", "--json", "--cache-dtype", "int8")
    assert (code, err) == (0, "")
    prompt, new = json.loads(out)
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["test"]) == (16, 0, "pp16")
    assert (new["n_prompt"], new["n_gen"], new["test"]) == (0, 4, "tg4")
    for row, tokens in ((prompt, 16), (new, 4)):
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 3
        rates = [tokens / ns * 1e9 for ns in row["samples_ns"]]
        np.testing.assert_allclose(row["samples_ts"], rates, rtol=1e-3)
        assert row["avg_ts"] == pytest.approx(np.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(np.std(row["samples_ts"], ddof=1))
    shapes = [tensor.shape for tensor in models.named_tensors(model("llama-gqa")).values()]
    assert prompt["model_n_params"] == sum(map(np.prod, shapes))
    assert prompt["cache_dtype"] == "int8" and prompt["model_filename"] == FILE


@pytest.mark.slow("compiles several programs")
def test_threads_are_those_of_processes_of_their_own(run, monkeypatch):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    code, out, _ = run(FILE, "-p", "8", "-n", "0", "-r", "1", "-t", "1,2", "--json", "--no-cache")
    assert code == 0 and [row["n_threads"] for row in json.loads(out)] == [1, 2]


def test_an_error_of_another_process(capfd):
    code, printed = cli.main(("bench", "/no/such.gguf", "-t", "1")), capfd.readouterr()
    assert (code, printed.out) == (2, "") and "no such file or folder" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "0", "-n", "0"), "-p 0 and -n 0 leave nothing to measure"),
        (("-p", "9999"), "pp9999 takes 9999 tokens; the context length is"),
        (("-p", "0", "-n", "1", "-d", "9999"), "tg1 @ d9999 takes 10000 tokens; the context"),
        (("-r", "1,2"), "--repetitions takes one number"),
    ],
)
def test_refused(run, arguments, message):
    code, out, err = run(FILE, *arguments)
    assert (code, out) == (2, "") and message in err


@pytest.mark.parametrize("option", ["-p=x", "-p=1,,2", "-n=-1", "-d=1.5", "-b=0", "-r=0", "-t=0"])
def test_options_that_are_no_numbers(run, option, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(FILE, *option.split("="))
    assert "must be" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(run, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    missing = lambda name: None if name == "matplotlib" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    code, _, err = run(FILE, "--plot", tmp_path / "a.png")
    assert code == 2 and "--plot needs matplotlib: pip install matplotlib" in err


@pytest.mark.slow("compiles several programs")
def test_a_plot(run, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is no dependency of jax-q4k")
    matplotlib.use("svg")
    file = tmp_path / "speed.png"
    code, _, _ = run(FILE, "-p", "8", "-n", "4", "-d", "0,8", "-r", "2", "--plot", file)
    assert code == 0 and file.read_bytes().startswith(b"\x89PNG")
    assert matplotlib.get_backend().lower() == "agg"  # a backend that needs no display
