"""Starts the processes that render chat templates, sends them jobs, and restarts them as needed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("worker.py")

#: Number of processes: a slow template holds up no other one.
_PROCESSES = 2


class ChatTemplateError(ValueError):
    """A chat template is missing or malformed, rejects the messages, or exceeds its limits."""


class ChatTemplateTimeoutError(ChatTemplateError):
    """A chat template took longer than its limit."""


class _EndedError(Exception):
    """The process ended before it answered; the message tells how."""


class Deadline:
    """Time until which the jobs of one prompt must be done.

    Attributes:
      seconds: duration, from the creation of this object.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds; 0 or less after the deadline."""
        return self._end - time.monotonic()

    def error(self) -> ChatTemplateError:
        return ChatTemplateTimeoutError(f"chat template took longer than {self.seconds} s")


class TemplateProcesses:
    """Runs template rendering jobs in separate processes, each started for its first job.

    Jobs come from any thread; each process runs one at a time, and a further job waits for one. A
    fork of this process starts its own.
    """

    def __init__(self, count: int) -> None:
        self._all = [TemplateProcess() for _ in range(count)]
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)
        self._refill()

    @property
    def running(self) -> list[int]:
        """Process ids, the one that gets the next job first."""
        return [one.pid for one in self._idle.queue[::-1] if one.pid is not None]

    def run(self, job: dict[str, Any], deadline: Deadline) -> dict[str, str]:
        """Runs a job in `worker.py`; returns {"text": ...} or {"error": ...}.

        Raises:
          ChatTemplateError: the job is not done at the deadline, or ends its process. TypeError,
            ValueError: the job is not JSON data.
        """
        try:
            line = json.dumps(job | {"seconds": deadline.seconds}, allow_nan=False).encode() + b"\n"
        except RecursionError:
            raise ValueError("messages or variables are nested too deeply") from None
        idle = self._idle
        try:
            process = idle.get(timeout=max(deadline.left, 0))
        except queue.Empty:
            raise deadline.error() from None
        try:
            return process.run(line, deadline)
        finally:
            idle.put(process)

    def close(self) -> None:
        """Ends the processes; the next jobs start new ones."""
        for process in self._all:
            process.close()

    def _forget(self) -> None:
        for process in self._all:
            process.forget()
        self._refill()

    def _refill(self) -> None:
        # Last in, first out: with one job at a time, one process runs.
        self._idle: queue.LifoQueue[TemplateProcess] = queue.LifoQueue()
        for process in self._all:
            self._idle.put(process)


class TemplateProcess:
    """A process that runs one job after the other.

    A process that exceeds a job's time is killed, and the next job starts a new one. If a job runs
    out of memory or ends a process that has run other jobs, it is retried once in a new process, so
    that a result never depends on earlier jobs.

    The process ends when its parent ends in any way, because its standard input closes.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if the process does not run."""
        return None if self._process is None else self._process.pid

    def run(self, line: bytes, deadline: Deadline) -> dict[str, str]:
        """Runs a job, a line of JSON; returns {"text": ...} or {"error": ...}.

        Raises ChatTemplateError if the job is not done at the deadline, or ends the process.
        """
        for fresh in (self._process is None, True):
            try:
                answer = self._ask(line, deadline)
                if "memory" not in answer:
                    return answer
                self.close()
                problem = f"chat template: {answer['memory']}"
            except TimeoutError:
                self.close()
                raise deadline.error() from None
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

    def forget(self) -> None:
        """Forgets the process without ending it, in a fork; it belongs to the parent."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)  # else it would not end with its parent
            process.returncode = 0  # not a child of this process, so it must not wait

    def _ask(self, line: bytes, deadline: Deadline) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            unsent, received = memoryview(line), bytearray()
            while not received.endswith(b"\n"):
                if (left := deadline.left) <= 0:
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


PROCESSES = TemplateProcesses(_PROCESSES)
