"""Starts the process that renders chat templates, sends it jobs, and restarts it as needed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("worker.py")


class ChatTemplateError(ValueError):
    """A chat template is missing or malformed, rejects the messages, or exceeds its limits."""


class _EndedError(Exception):
    """The process ended before it answered; the message tells how."""


class TemplateProcess:
    """Runs template rendering jobs in a separate process, which is started for the first job.

    Only one job runs at a time, from any thread. A process that exceeds a job's time is killed, and
    the next job starts a new one. If a job runs out of memory or ends a process that has run other
    jobs, it is retried once in a new process, so that a result never depends on earlier jobs.

    The process ends when its parent ends in any way, because its standard input closes. A fork of
    the parent starts its own process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def run(self, job: dict[str, Any], seconds: float) -> dict[str, str]:
        """Runs a job in `worker.py`; returns {"text": ...} or {"error": ...}.

        Raises:
          ChatTemplateError: the job takes longer than `seconds`, including the start of a process,
            or ends the process. TypeError, ValueError: the job is not JSON data.
        """
        try:
            line = json.dumps(job | {"seconds": seconds}, allow_nan=False).encode() + b"\n"
        except RecursionError:
            raise ValueError("messages or variables are nested too deeply") from None
        with self._lock:
            deadline = time.monotonic() + seconds
            for fresh in (self._process is None, True):
                try:
                    answer = self._ask(line, deadline)
                    if "memory" not in answer:
                        return answer
                    self.close()
                    problem = f"chat template: {answer['memory']}"
                except TimeoutError:
                    self.close()
                    raise ChatTemplateError(f"chat template took longer than {seconds} s") from None
                except _EndedError as ended:
                    problem = f"chat template ended its process with {ended}"
                except BaseException:  # the next job must not read this job's answer
                    self.close()
                    raise
                if fresh:
                    break
            raise ChatTemplateError(problem)

    def close(self) -> None:
        """Ends the process, if it runs; the next job starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _close_pipes(process)
            process.wait()

    def _forget(self) -> None:
        """Forgets the process without ending it, in a fork; it belongs to the parent."""
        self._lock = threading.Lock()  # another thread may have held it
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)  # else it would not end with its parent
            process.returncode = 0  # not a child of this process, so it must not wait

    def _ask(self, line: bytes, deadline: float) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            unsent, received = memoryview(line), bytearray()
            while not received.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in ready.select(left):
                    if key.fileobj is process.stdin:
                        try:
                            unsent = unsent[os.write(key.fd, unsent[: 1 << 16]) :]
                        except BrokenPipeError:
                            raise self._ended() from None
                        if not unsent:
                            ready.unregister(process.stdin)
                    elif piece := os.read(key.fd, 1 << 16):
                        received += piece
                    else:
                        raise self._ended()
        return json.loads(received)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P keeps the script's folder off sys.path; the new session protects it from Ctrl-C.
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(_SCRIPT)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._process = process
        return process

    def _ended(self) -> _EndedError:
        """Returns the error of a process that has closed a pipe."""
        process, self._process = self._process, None
        assert process is not None and process.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
        status = process.wait()
        last = (process.stderr.read() or b"")[-500:].decode(errors="replace").strip()
        _close_pipes(process)
        return _EndedError(f"status {status}" + (f": {last}" if last else ""))


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


PROCESS = TemplateProcess()
