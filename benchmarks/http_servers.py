"""Runs `jax-q4k serve` and llama-server, and sends them requests whose tokens they stream."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from .common import part_of

#: Tokens of context per slot. They are shared, so a long prompt may take those of several slots.
CONTEXT = 512


class HttpServer:
    """A server process on the cores of this process.

    Attributes:
      path: of its completions.
      port: where it listens.
    """

    path = ""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the command, with `--port` and a free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([*command, "--port", str(self.port)], **quiet)

    def __enter__(self) -> Self:
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the server has used so far."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resources(self) -> dict[str, float]:
        """Returns the server's resident memory, threads, and open files."""
        lines = (line.partition(":") for line in (self._proc / "status").read_text().splitlines())
        status = {name: value.split()[0] for name, _, value in lines if value.split()}
        files = len(list((self._proc / "fd").iterdir()))
        memory = round(int(status["VmRSS"]) / 1024, 1)
        return {"rss_mb": memory, "threads": int(status["Threads"]), "files": files}

    @property
    def _proc(self) -> Path:
        return Path("/proc", str(self._process.pid))

    def submit(self, prompt: list[int], tokens: int) -> Iterator[Any]:
        """Yields the events of an answer's tokens; the request is sent by the first `next`."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            headers = {"Content-Type": "application/json"}
            body = json.dumps(self._request(prompt, tokens))
            connection.request("POST", self.path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status} {response.read()!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    count = self._count(event)
                    if count is None:
                        if self._has_tokens(event):
                            yield event
                    elif count != tokens:
                        raise RuntimeError(f"the server gave {count} tokens instead of {tokens}")

    def _request(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Returns the body of a request for a greedy answer of `tokens` tokens."""
        raise NotImplementedError

    def _count(self, event: Any) -> int | None:
        """Returns the number of tokens that the last event names; None for other events."""
        raise NotImplementedError

    def _has_tokens(self, event: Any) -> bool:
        """Returns whether an event has tokens of the answer."""
        return True

    def _is_ready(self) -> bool:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as asked:
                asked.request("GET", "/health")
                return asked.getresponse().status == 200
        except OSError:
            return False


class LlamaServer(HttpServer):
    """llama-server in its fastest mode.

    Attributes:
      version: what it says of its build.
    """

    path = "/completion"

    def __init__(self, folder: Path, model: str, slots: int) -> None:
        program = str(folder / "llama-server")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        self.version = (version.stdout + version.stderr).splitlines()[0]
        threads = str(len(os.sched_getaffinity(0)))
        options = ["-m", model, "-np", str(slots), "--kv-unified", "-c", str(slots * CONTEXT)]
        options += ["-fa", "auto", "-t", threads, "-tb", threads, "--no-webui"]
        super().__init__([program, *options])

    def _request(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
        return request | {"ignore_eos": True, "stream": True, "cache_prompt": True}

    def _count(self, event: Any) -> int | None:
        return int(event["tokens_predicted"]) if event["stop"] else None


class OurServer(HttpServer):
    """`jax-q4k serve`, with options of its engine."""

    path = "/v1/completions"

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "jax_q4k", "serve", model, "--log", "json", *options]
        super().__init__(command)

    def metrics(self) -> dict[str, float]:
        """Returns the server's metrics that have no labels."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        pairs = (line.split() for line in lines if not line.startswith("#") and "{" not in line)
        return {name: float(value) for name, value in pairs}

    def _request(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        request = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return request | {"stream": True, "stream_options": {"include_usage": True}}

    def _count(self, event: Any) -> int | None:
        if event["choices"]:
            return None
        return int(event["usage"]["completion_tokens"])

    def _has_tokens(self, event: Any) -> bool:
        return event["choices"][0]["finish_reason"] is None


if __name__ == "__main__":
    part_of("engine", __doc__)
