"""`jax-q4k serve` as a program: start, answers, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.paths import ROOT

from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli import options as cli_options
from jax_q4k.models.cli.options import NamedAdapter

from ..adapters import random_pairs, write_gguf
from ..engine.engine_runs import wait_until

COMMAND = [sys.executable, str(ROOT / "models" / "cli" / "jax-q4k"), "serve"]
SMALL = ("--demo", "--port", "0", "--rows", "2", "--context", "128")


class Program(NamedTuple):
    """A running command.

    Attributes:
      lines: what it has printed to standard error.
    """

    process: subprocess.Popen[str]
    lines: list[str]

    def url(self) -> str:
        """Waits until requests are served; returns the address."""
        wait_until(lambda: any(" at http" in line for line in self.lines), 120)
        (line,) = (line for line in self.lines if " at http" in line)
        found = re.search(r"http://\S+?:\d+", line)
        assert found is not None
        return found[0]

    def ends(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)


@contextlib.contextmanager
def program(*options: str, command: Sequence[str] = COMMAND) -> Iterator[Program]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        lines.extend(iter(process.stderr.readline, ""))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield Program(process, lines)
    finally:
        process.kill()
        process.wait()
        reader.join()


@pytest.mark.slow("starts a server, which compiles its programs")
def test_a_signal_lets_running_answers_finish() -> None:
    """Starts, answers, and gets SIGTERM in the middle of a stream."""
    with program(*SMALL, "--log", "json", "--name", "tiny", "--api-key", "secret") as served:
        url = served.url()
        assert re.search("tiny at .*: context 128, 2 rows, 16 pages", "".join(served.lines))
        key = {"authorization": "Bearer secret"}
        with httpx.Client(base_url=url, timeout=60, headers=key) as client:
            assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
            body = {"prompt": "The sea", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: {")
                served.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        assert served.ends() == 0
        log = [json.loads(line) for line in served.lines if line.startswith("{")]
        assert [one["message"][:24] for one in log][-1].startswith("POST /v1/completions 200")
        assert all(one["request_id"] for one in log)
        assert not any("secret" in line or "The sea" in line for line in served.lines)


@pytest.mark.slow("starts a server, which compiles its programs")
def test_answers_that_exceed_the_time_to_drain() -> None:
    """They end with an error that the client sees, streamed or not."""
    options = ("--demo", "--port", "0", "--rows", "2", "--deterministic", "--drain", "0")
    body = {"prompt": "The sea", "ignore_eos": True, "max_tokens": 500, "n": 8}
    with program(*options) as served, ThreadPoolExecutor() as pool:
        url = f"{served.url()}/v1/completions"
        whole = pool.submit(httpx.post, url, json=body, timeout=60)
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            served.process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert "the engine is closed" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["type"] == "unavailable_error"
        assert served.ends() == 0


@pytest.mark.slow("starts a server, which compiles its programs")
def test_serving_from_python() -> None:
    """Serves an engine with options of its own, until Ctrl-C."""
    code = (
        "import sys; from jax_q4k import models;"
        "engine = models.Engine(models.load('demo'), max_rows=2, max_context=128);"
        "sys.exit(models.serve(engine, port=0, name='tiny'))"
    )
    with program("-c", code, command=[sys.executable]) as served:
        url = served.url()
        assert "tiny at" in "".join(served.lines)
        found = httpx.post(f"{url}/v1/completions", json={"prompt": "The sea", "max_tokens": 3})
        assert found.json()["model"] == "tiny"
        served.process.send_signal(signal.SIGINT)
        assert served.ends() == 0


def test_a_server_that_cannot_begin() -> None:
    """Refuses to serve other machines without a key; an engine's error is the caller's."""
    model = models.load("demo")
    with pytest.raises(ValueError, match="other machines reach 0.0.0.0"):
        models.serve(model, host="0.0.0.0")
    with models.Engine(model, max_rows=1, warm_up=False) as engine:
        pass
    with pytest.raises(RuntimeError, match="engine"):
        models.serve(engine, port=0)


@pytest.mark.slow("starts a server, which compiles its programs")
def test_a_second_signal_ends_it_at_once() -> None:
    with program(*SMALL) as served:
        url = served.url()
        body = {"prompt": "The sea", "max_tokens": 110, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            assert next(stream.iter_lines()).startswith("data: {")
            for _ in range(2):
                served.process.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert served.ends() in (0, 130)  # 0 if the answer ended in between
            assert time.monotonic() - began < 10


def test_a_signal_while_it_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def status() -> int:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code
        return 0

    with program(*SMALL, "--no-cache", "--port", str(port)) as served:
        wait_until(lambda: status() == 503, 60)
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0
        assert not any("error" in line for line in served.lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--host", "0.0.0.0"),
            "it needs a key (api_keys), or open",
        ),
        (("--api-key", ""), "a key must have ASCII characters"),
        (("--api-key-file", os.devnull), "has no key"),
        (("--api-key-file", "missing"), "No such file"),
        (("--api-key-file", "/dev/zero"), "/dev/zero is longer than 64 MiB"),
        (("--chat-template-file", "/dev/zero"), "/dev/zero is longer than 64 MiB"),
        (("--lora", "a=x", "--lora", "a=y"), "--lora names an adapter twice: a, a"),
        (("--lora", "demo=x"), "--lora demo=: this is the name of the model"),
        (("--lora", "a=x", "--max-adapters", "0"), "--max-adapters 0 is less than the 1 of --lora"),
        (("--lora-folder", "."), "--lora-folder needs --max-adapters"),
        (("--lora-folder", "no", "--max-adapters", "1"), "--lora-folder no is not a folder"),
    ],
)
def test_options(options: tuple[str, ...], message: str, capfd: Any) -> None:
    assert cli.main(["serve", "--demo", *options]) == cli.FAILURE
    assert message in " ".join(capfd.readouterr().err.split())


def test_a_taken_port(capfd: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--demo", "--port", port]) == cli.FAILURE
    assert "Address already in use" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("x.gguf", ("x.gguf", 1.0)),
        ("x.gguf=0.5", ("x.gguf", 0.5)),
        ("a=x.gguf", NamedAdapter("a", "x.gguf", 1.0)),
        ("a=x.gguf=-2", NamedAdapter("a", "x.gguf", -2.0)),
        ("a=b=c", NamedAdapter("a", "b=c", 1.0)),
        ("there=is.gguf", ("there=is.gguf", 1.0)),
        ("there=is.gguf=2", ("there=is.gguf", 2.0)),
        ("=x", ("=x", 1.0)),
    ],
)
def test_adapters_with_and_without_names(
    text: str, parsed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there=is.gguf").touch()
    monkeypatch.chdir(tmp_path)
    found = cli_options._perhaps_named_adapter(text)
    assert found == parsed and type(found) is type(parsed)


@pytest.mark.slow("starts a server, which compiles its programs for a mesh")
def test_several_devices() -> None:
    with program(*SMALL, "--devices", "2") as served:
        url = served.url()
        body = {"prompt": "The sea", "max_tokens": 12, "temperature": 0, "n": 2}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        metrics = httpx.get(f"{url}/metrics").text
    want = models.generate(models.load("demo"), "The sea", max_new_tokens=12).text
    assert [choice["text"] for choice in found] == [want] * 2
    assert "jax_q4k:compilations_after_warmup_total 0.0" in metrics


@pytest.mark.slow("starts a server, which compiles its programs")
def test_named_adapters(tmp_path: Path) -> None:
    demo = models.load("demo")
    for seed, key in enumerate("ab"):
        pairs = random_pairs(demo, ("attn_q", "ffn_up"), seed)
        write_gguf(tmp_path / f"{key}.gguf", demo, pairs)
    named = ("--lora", f"a={tmp_path / 'a.gguf'}=0.5", "--lora", f"{tmp_path / 'b.gguf'}=2")
    with program(*SMALL, *named, "--max-adapters", "2") as served:
        url = served.url()
        assert any("adapters: a" in line for line in served.lines)
        texts = {}
        for name in ("demo", "a"):
            body = {"model": name, "prompt": "The sea", "max_tokens": 8, "temperature": 0}
            (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
            texts[name] = choice["text"]
    base = models.with_lora(demo, tmp_path / "b.gguf", scale=2)
    both = models.with_lora(base, tmp_path / "a.gguf", scale=0.5)
    want = [models.generate(one, "The sea", max_new_tokens=8).text for one in (base, both)]
    assert list(texts.values()) == want and want[0] != want[1]
