"""`examples/multihost_serve.py`: a model over two processes answers as on one device; the ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.helpers import free_port, nmse
from support.paths import ROOT

import jax_q4k as jq
from jax_q4k import models

PROCESSES, DEVICES = 2, 4  # per process
TIMEOUT = 120  # seconds

#: Runs the example with float32 activations and few programs.
CODE = """
import runpy, sys
import jax_q4k as jq
from jax_q4k.models.engine import engine, sizing
sizing.CPU_SHAPES = ((1, 16), (1, 64))
engine.row_buckets = lambda slots, *_: (slots,)
sys.argv[0] = "examples/multihost_serve.py"
with jq.implementation(activations="f32"):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

OPTIONS = ("demo", "--port", "0", "--rows", "4", "--pages", "32", "--context", "128")


class Job:
    """The processes of the example, and what each has printed."""

    def __init__(self, *options: str, cache: Path) -> None:
        address = f"127.0.0.1:{free_port()}"
        count = f"--xla_force_host_platform_device_count={DEVICES}"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {count}",
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
        }
        self.lines: list[list[str]] = [[] for _ in range(PROCESSES)]
        self.processes = []
        self._readers = []
        for i in range(PROCESSES):
            place = ("--coordinator", address, "--processes", str(PROCESSES), "--process", str(i))
            process = subprocess.Popen(
                [sys.executable, "-c", CODE, *OPTIONS, *options, *place],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.processes.append(process)
            reader = threading.Thread(target=self._read, args=(i,))
            reader.start()
            self._readers.append(reader)

    def _read(self, process: int) -> None:
        output = self.processes[process].stdout
        assert output is not None
        self.lines[process].extend(iter(output.readline, ""))

    def text(self, process: int) -> str:
        return "".join(self.lines[process])

    def url(self) -> str:
        """Waits until process 0 serves; returns its address."""
        for _ in range(10 * TIMEOUT):
            if (found := re.search(r"http://\S+?:\d+", self.text(0))) is not None:
                return found[0]
            assert all(p.poll() is None for p in self.processes), self.text(0) + self.text(1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(0.1)
        raise AssertionError(self.text(0))

    def codes(self, seconds: float) -> list[int]:
        """Waits until all have ended; returns their exit codes."""
        found = [process.wait(seconds) for process in self.processes]
        for reader in self._readers:
            reader.join()
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of JAX's compilation cache, so that the second job compiles less."""
    return tmp_path_factory.mktemp("cache")


@contextlib.contextmanager
def job(*options: str, cache: Path) -> Iterator[Job]:
    started = Job(*options, cache=cache)
    try:
        yield started
    finally:
        started.end()


def bodies(vocab: int) -> list[dict[str, Any]]:
    """Returns 50 completions: greedy and sampled, many with a common beginning."""
    draw = random.Random(0)
    bases = [[draw.randrange(3, vocab) for _ in range(40)] for _ in range(2)]
    found = []
    for i in range(50):
        own = [draw.randrange(3, vocab) for _ in range(draw.randint(1, 30))]
        body: dict[str, Any] = {
            "prompt": draw.choice(bases)[: draw.choice([0, 16, 33, 40])] + own,
            "max_tokens": draw.choice([1, 5, 20, 40]),
            "seed": i,
            "temperature": draw.choice([0, 0, 0.7, 1.2]),
            "stream": i % 3 == 1,
            "top_p": 1.0,  # not the server's defaults
            "top_k": 0,
            "min_p": 0.0,
        }
        if i % 5 == 2:
            body |= {"top_k": 20, "repetition_penalty": 1.2}
        if i % 7 == 3:
            body |= {"logit_bias": {str(draw.randrange(vocab)): 3.0 for _ in range(200)}}
        if i % 11 == 4:
            body |= {"structured_outputs": {"regex": "[1-9][0-9]{5,20}"}}
        if i % 10 == 7:
            body |= {"stream": True, "cancel": True, "max_tokens": 40}
        found.append(body)
    return found


def sampling_of(body: dict[str, Any]) -> models.Sampling:
    """Returns the sampling parameters that the server makes of a body."""
    fields = {name: body[name] for name in ("seed", "temperature", "top_k") if name in body}
    if "structured_outputs" in body:
        pattern = body["structured_outputs"]["regex"]
        fields["constraint"] = models.Constraint.regex(pattern)
    if "repetition_penalty" in body:
        fields["repetition_penalty"] = body["repetition_penalty"]
    if "logit_bias" in body:
        fields["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
    return models.Sampling(max_new_tokens=body["max_tokens"], **fields)


def answer(client: httpx.Client, body: dict[str, Any]) -> str | None:
    """Returns the text of a completion; None if it was left after a few tokens."""
    body = dict(body)
    cancel = body.pop("cancel", False)
    if not body["stream"]:
        found = client.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        text: str = found.json()["choices"][0]["text"]
        return text
    parts = []
    with client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                parts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            if cancel and len(parts) >= 2:
                return None
        assert line == "data: [DONE]" or not line
    return "".join(parts)


@pytest.mark.slow("starts two processes, each with programs to compile")
def test_answers_are_those_of_one_device(cache: Path) -> None:
    """Ends by SIGTERM to all, as cluster managers send it, after the running answer."""
    demo = models.load("demo")
    all_bodies = bodies(demo.config.vocab_size)
    with job("--data", "2", cache=cache) as started:
        with jq.implementation(activations="f32"):  # meanwhile
            samplings = [sampling_of(body) for body in all_bodies]
            with models.Engine(demo, max_context=128, warm_up=False) as engine:
                outputs = engine.generate([body["prompt"] for body in all_bodies], samplings)
                wanted = engine.embed("The sea", normalize=True)
        url = started.url()
        with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
            with ThreadPoolExecutor(12) as pool:
                found = list(pool.map(lambda body: answer(client, body), all_bodies))
            metrics = client.get("/metrics").text
            vector = client.post("/v1/embeddings", json={"input": "The sea"}).json()["data"][0]
            assert nmse(np.array(vector["embedding"]), wanted.astype(np.float64)) <= 1e-10
            body = {"prompt": "The sea", "max_tokens": 1, "echo": True, "logprobs": 1}
            echoed = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
            assert len(echoed["tokens"]) > 2 and min(map(len, echoed["top_logprobs"][1:])) == 1
            body = {"prompt": "The sea", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: {")
                for process in started.processes:
                    process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert started.codes(60) == [0, 0], started.text(0) + started.text(1)
    wrong = [
        (body, got, want.text)
        for body, got, want in zip(all_bodies, found, outputs, strict=True)
        if got is not None and got != want.text
    ]
    assert not wrong, (len(wrong), wrong[:3])
    assert sum(got is None for got in found) == 5
    values = {line.split()[0]: line.split()[-1] for line in metrics.splitlines() if line[0] != "#"}
    assert float(values["jax_q4k:compilations_after_warmup_total"]) == 0
    assert float(values["jax_q4k:prefix_cache_hits_total"]) > 0
    assert not re.search("error|traceback", started.text(1), re.I), started.text(1)


@pytest.mark.slow("starts two processes, each with programs to compile")
@pytest.mark.parametrize("killed", range(PROCESSES))
def test_a_process_dies(cache: Path, killed: int) -> None:
    """The other one ends, and says why; process 0 in order, before JAX aborts it."""
    with job("--heartbeat-timeout", "24", cache=cache) as started:
        url = started.url()
        body = {"prompt": "The sea", "max_tokens": 100, "ignore_eos": True, "n": 8}
        url = f"{url}/v1/completions"
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(httpx.post, url, json=body, timeout=60)
            streamed = body | {"stream": True}
            with httpx.stream("POST", url, json=streamed, timeout=60) as stream:
                lines = stream.iter_lines()
                last = next(lines)
                started.processes[killed].kill()
                with contextlib.suppress(httpx.TransportError):
                    for line in lines:
                        last = line or last
            error = running.exception(60)
        code, text = started.codes(60)[1 - killed], started.text(1 - killed)
        if killed:
            assert code == 1, text
            assert "another process has not done its part of a step for 8 s" in last, last + text
            assert error is None and running.result().status_code in (200, 503)
            assert "RuntimeError: the engine has failed" in text
        else:
            assert code == -signal.SIGABRT and "another task died" in text
            assert isinstance(error, httpx.TransportError | None)
