"""Replicas on Ray Serve: routing by prefix, metrics, restarts without a lost request, the end.

Ray is not among the packages of the tests: `pip install 'ray[serve]'`, or the tests are skipped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
from support.paths import EXAMPLES, ROOT

from .test_multihost import free_port

pytest.importorskip("ray.serve", reason="ray is no dependency of jax-q4k: pip install 'ray[serve]'")
pytestmark = pytest.mark.slow("starts Ray and two replicas, and replaces them")

REPLICAS, ROWS, STREAMS = 2, 16, 20
ANSWERS, LENGTH = 4, 480  # of each stream: some seconds of work in all
START, KEY = 240, "a-key"  # seconds


class Fleet(NamedTuple):
    """The example's process, with the demo model.

    Attributes:
      log: file with its output.
    """

    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path

    def wait_for(self, count: int) -> None:
        """Waits until it has said `count` times that it serves."""
        deadline = time.monotonic() + START
        while len(re.findall("^demo at http", self.log.read_text(), re.MULTILINE)) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True} | fields
        return self.client.post("/v1/completions", json=body)

    def replica(self, prompt: str) -> str:
        """Returns the replica that answers."""
        response = self.complete(prompt)
        assert response.status_code == 200, response.text
        return str(response.headers["jax-q4k-replica"])

    def metric(self, name: str) -> dict[str, float]:
        """Returns a metric of each replica."""
        text = self.client.get("/metrics").text
        pattern = rf'^jax_q4k:{re.escape(name)}\S*replica="(\w+)"\S* (\S+)$'
        return {one: float(value) for one, value in re.findall(pattern, text, re.MULTILINE)}

    def requests(self) -> float:
        """Returns the number of requests that run or wait in all engines."""
        names = "num_requests_running", "num_requests_waiting"
        return sum(sum(self.metric(name).values()) for name in names)


class Streamed(NamedTuple):
    """A stream that was read to its end.

    Attributes:
      first, last: times of its first and last bytes.
    """

    replica: str
    events: int
    first: float
    last: float


def stream(fleet: Fleet, prompt: str) -> Streamed:
    body = {
        **{"prompt": prompt, "max_tokens": LENGTH, "n": ANSWERS, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    times, text = [], ""
    with fleet.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for piece in response.iter_text():
            times.append(time.monotonic())
            text += piece
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line[:5] == "data:"]
    assert lines[-1] == "[DONE]", lines[-1]
    replica = response.headers["jax-q4k-replica"]
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["usage"]["completion_tokens"] == ANSWERS * LENGTH
    return Streamed(replica, len(events), times[0], times[-1])


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_PLATFORMS": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder:
        log, keys = Path(folder) / "log", Path(folder) / "keys"
        keys.write_text(f"{KEY}\n")
        options = ["--replicas", REPLICAS, "--rows", ROWS, "--cpus", 0, "--port", port]
        options += ["--api-key-file", keys]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, EXAMPLES / "ray_serve.py", "demo", *map(str, options)],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        address, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {KEY}"}
        try:
            with httpx.Client(base_url=address, headers=headers, timeout=120) as client:
                found = Fleet(process, client, log)
                found.wait_for(1)
                yield found
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            print(log.read_text())


def test_every_route_answers(fleet):
    assert fleet.client.get("/health").json() == {"status": "ok"}
    assert fleet.client.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert "<html" in fleet.client.get("/").text
    response = fleet.complete("The sea")
    assert response.json()["usage"]["completion_tokens"] == 4
    assert fleet.complete("The sea", model="other").status_code == 404
    assert fleet.client.post("/v1/completions", content=b"{").status_code == 415
    headers, large = {"content-type": "application/json"}, iter([b" " * (9 << 20)])
    response = fleet.client.post("/v1/completions", content=large, headers=headers)
    assert response.status_code == 413


def test_no_route_but_health_works_without_a_key(fleet):
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
        response = httpx.request(method, fleet.client.base_url.join(path), timeout=60)
        assert (response.status_code, "jax_q4k:" in response.text) == (401, False), path
    assert httpx.get(fleet.client.base_url.join("/health"), timeout=60).status_code == 200


def test_streams_come_piece_by_piece(fleet):
    found = stream(fleet, "It is a truth")
    assert found.last - found.first > 0.1 and found.events > 10


def test_equal_beginnings_go_to_one_replica_and_others_spread(fleet):
    prompts = [f"Chapter {i}. A dark night, and {i} men went to the sea. " for i in range(16)]
    replicas = {prompt: fleet.replica(prompt * 5) for prompt in prompts}
    assert len(set(replicas.values())) == REPLICAS
    for prompt, replica in replicas.items():
        response = fleet.complete(prompt * 5 + "Then")
        assert response.headers["jax-q4k-replica"] == replica
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_metrics_name_their_replica(fleet):
    fleet.replica("The moon")
    found = fleet.metric("generation_tokens_total")
    assert len(found) == REPLICAS and sum(found.values()) >= 4
    text = fleet.client.get("/metrics").text
    assert text.count("# TYPE jax_q4k:generation_tokens_total ") == 1


def test_a_client_that_leaves_frees_its_work(fleet):
    def cancelled() -> float:
        text = fleet.client.get("/metrics").text
        pattern = r'request_success_total\{finished_reason="cancelled",replica="\w+"\} (\S+)'
        return sum(map(float, re.findall(pattern, text)))

    before = cancelled()
    body = {"prompt": "The sea", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 16}
    with fleet.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())
    deadline = time.monotonic() + 20
    while fleet.requests() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert fleet.requests() == 0 and cancelled() == before + 16


def test_a_replica_that_dies_is_replaced(fleet):
    old = set(fleet.metric("num_requests_running"))
    title = b"ray::ServeReplica:jax-q4k:Replica"
    mine = [pid for pid, command in descendants(fleet.process.pid) if command.startswith(title)]
    assert len(mine) == REPLICAS
    os.kill(mine[0], signal.SIGKILL)
    deadline = time.monotonic() + START
    while len(new := set(fleet.metric("num_requests_running"))) < REPLICAS or new == old:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert len(old & new) == 1
    assert [fleet.complete(f"{i} men").status_code for i in range(8)] == [200] * 8


def test_an_engine_that_has_failed_fails_the_health_check():
    check = example()["Replica"].func_or_class.check_health
    check(SimpleNamespace(engine=SimpleNamespace(is_open=True)))
    with pytest.raises(RuntimeError, match="the engine has failed"):
        check(SimpleNamespace(engine=SimpleNamespace(is_open=False)))


def test_a_restart_loses_no_request(fleet):
    """Replaces both replicas during 20 streams, and while more requests come."""
    old = set(fleet.metric("num_requests_running"))
    ends, answers = threading.Event(), []

    def ask() -> None:
        while not ends.is_set():
            answers.append(fleet.complete(f"Question {len(answers)}"))

    with concurrent.futures.ThreadPoolExecutor(STREAMS + 1) as pool:
        asking = pool.submit(ask)
        try:
            streams = [pool.submit(stream, fleet, f"{i} men") for i in range(STREAMS)]
            while fleet.requests() < ANSWERS * (STREAMS - 2):
                time.sleep(0.02)
            fleet.process.send_signal(signal.SIGHUP)
            began = time.monotonic()
            found = [one.result() for one in streams]
            fleet.wait_for(2)
        finally:
            ends.set()
        asking.result()
    assert {one.replica for one in found} <= old
    assert any(one.last > began + 0.5 for one in found)
    assert [one.status_code for one in answers] == [200] * len(answers) and answers
    new = set(fleet.metric("num_requests_running"))
    assert len(new) == REPLICAS and not new & old
    assert {one.headers["jax-q4k-replica"] for one in answers} & new
    print(f"{len(answers)} answers during the restart")


def test_ctrl_c_ends_it_after_the_running_requests(fleet):
    started = descendants(fleet.process.pid)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, fleet, "The end")
        while not fleet.requests():
            time.sleep(0.01)
        os.killpg(fleet.process.pid, signal.SIGINT)  # as a terminal does
        running.result()
    assert fleet.process.wait(60) == 0
    left = [command for pid, command in started if Path(f"/proc/{pid}").exists()]
    assert len(started) > REPLICAS and not left


def descendants(pid: int) -> list[tuple[int, bytes]]:
    """Returns the processes that a process has started, also indirectly, with their commands."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()
    found, more = set[int](), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        found |= more
    return [(one, commands[one]) for one in found]


def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "ray_serve.py"))


def test_numbers_of_replicas():
    bounds = example()["bounds"]
    assert (bounds("2"), bounds("2-8")) == ((2, 2), (2, 8))
    for text in ("0", "3-2", "-1"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            bounds(text)
