"""Runs llama-server, and sends it requests whose tokens it streams."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .common import part_of

#: Tokens of context per slot. They are shared, so a long prompt may take those of several slots.
CONTEXT = 512


class LlamaServer:
    """A llama-server process in its fastest mode, on the cores of this process.

    Attributes:
      version: what it says of its build.
    """

    def __init__(self, folder: Path, model: str, slots: int) -> None:
        program = str(folder / "llama-server")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        self.version = (version.stdout + version.stderr).splitlines()[0]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        threads = str(len(os.sched_getaffinity(0)))
        options = ["-m", model, "--port", str(self._port), "-np", str(slots), "--kv-unified"]
        options += ["-c", str(slots * CONTEXT), "-fa", "auto", "-t", threads, "-tb", threads]
        self._process = subprocess.Popen(
            [program, *options, "--no-webui"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> LlamaServer:
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def submit(self, prompt: list[int], tokens: int) -> Iterator[Any]:
        """Yields an event per token of the answer; the request is sent by the first `next`."""
        request = {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
        }
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(request), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server: {response.status} {response.read()!r}")
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if not event["stop"]:
                        yield event
                    elif event["tokens_predicted"] != tokens:
                        raise RuntimeError(f"llama-server gave {event['tokens_predicted']} tokens")

    def _is_ready(self) -> bool:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port)) as asked:
                asked.request("GET", "/health")
                return asked.getresponse().status == 200
        except OSError:
            return False


if __name__ == "__main__":
    part_of("engine", __doc__)
