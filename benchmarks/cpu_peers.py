"""Measures llama.cpp and ik_llama.cpp on a CPU with their own benchmarks and fastest options."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import part_of

#: A row of `llama-batched-bench`: tokens of prompts, tokens decoded, sequences, ..., speeds.
_BATCH_ROW = re.compile(r"^\|\s*\d+ \|\s*\d+ \|\s*(\d+) \|" + r"[^|]*\|" * 4 + r"\s*([\d.]+) \|")
_BATCH_PROMPT = 16  # tokens of each sequence of a batch before the first decoded token


@dataclass(frozen=True)
class Peer:
    """A build of llama.cpp, or of ik_llama.cpp, which can repack weights while loading.

    Attributes:
      name: name in results.
      folder: contains `llama-bench` and, for batches, `llama-batched-bench`.
      repacks: whether its programs support `-rtr`; each figure is then the better with or without
        it.
    """

    name: str
    folder: Path
    repacks: bool = False

    def measure(
        self,
        path: str,
        cores: set[int],
        *,
        prompts: Sequence[int],
        contexts: Sequence[int],
        batches: Sequence[int],
        tokens: int,
        repeats: int,
    ) -> dict[str, Any]:
        """Returns tokens per second, with the names of `benchmarks.cpu.measure`.

        It measures prompts, `tokens` decoded after contexts, batches of sequences, and decoding
        with other processes computing on the same cores.
        """
        rows = self._bench(path, cores, repeats, "-p", _joined(prompts), "-n", "0")
        found = [(f"prefill_{row['n_prompt']}", row["avg_ts"]) for row in rows]
        for context in contexts:
            args = ["-n", str(tokens)]
            if context:  # ik_llama.cpp has no depth option, but decodes after a prompt
                after = ["-n", "0", "-gp", f"{context},{tokens}"]
                args = after if self.repacks else [*args, "-d", str(context)]
            made = self._bench(path, cores, repeats, "-p", "0", *args)
            found += [(f"decode_{context}", row["avg_ts"]) for row in made]
        found += self._batches(path, cores, batches, tokens)
        with competing(cores):
            shared = self._bench(path, cores, 1, "-p", "0", "-n", str(tokens))
        found += [("decode_shared", row["avg_ts"]) for row in shared]
        return _best(found) | {"build": rows[0]["build_commit"]}

    def first_token(
        self, path: str, cores: set[int], prompt: int, repeats: int = 1
    ) -> dict[str, float]:
        """Runs a process that reads a prompt: seconds from start to end, and MiB of memory."""
        args = ["-p", str(prompt), "-n", "0", "-r", "1", "-o", "json"]
        args += ["-w", "0"] if self.repacks else ["--no-warmup"]
        runs = [self._run("llama-bench", path, cores, *args) for _ in range(repeats)]
        return {
            "seconds": statistics.median(seconds for _, seconds, _ in runs),
            "megabytes": max(peak for _, _, peak in runs),
        }

    def command(self, program: str, path: str, threads: int, *arguments: str) -> list[str]:
        """Returns a program of the folder with its arguments."""
        args = ["-m", os.path.abspath(path), "-t", str(threads), *arguments]
        return [str(self.folder.absolute() / program), *args]

    def _batches(
        self, path: str, cores: set[int], batches: Sequence[int], tokens: int
    ) -> list[tuple[str, float]]:
        if not batches or not (self.folder / "llama-batched-bench").exists():
            return []
        room = max(batches) * (tokens + _BATCH_PROMPT)
        args = ["-c", str(room), "-npp", str(_BATCH_PROMPT), "-ntg", str(tokens)]
        found = []
        for flags in [[], ["-rtr"]] if self.repacks else [[]]:
            arguments = [*args, "-npl", _joined(batches), *flags]
            printed, _, _ = self._run("llama-batched-bench", path, cores, *arguments)
            rows = filter(None, map(_BATCH_ROW.match, printed.splitlines()))
            found += [(f"batch_{row[1]}", float(row[2])) for row in rows]
        return found

    def _bench(self, path: str, cores: set[int], repeats: int, *arguments: str) -> list[Any]:
        """Returns rows of llama-bench, with and without fused attention, and repacking."""
        rows = []
        for flags in [["-rtr", "0"], ["-rtr", "1"]] if self.repacks else [[]]:
            args = ["-r", str(repeats), "-fa", "0,1", "-o", "json", *arguments, *flags]
            printed, _, _ = self._run("llama-bench", path, cores, *args)
            rows += json.loads(printed[printed.index("[\n") :])
        return rows

    def _run(
        self, program: str, path: str, cores: set[int], *arguments: str
    ) -> tuple[str, float, float]:
        """Runs a program; returns its output, seconds, and peak resident memory in MiB."""
        command = self.command(program, path, len(cores), *arguments)
        # llama-bench prints only rows to stdout; llama-batched-bench may print them to stderr
        messages = subprocess.DEVNULL if program == "llama-bench" else subprocess.STDOUT
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # inherited by processes
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=messages, text=True, cwd=tempfile.gettempdir()
        )  # llama-batched-bench leaves a log in its working directory
        os.sched_setaffinity(0, ours)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
        return printed, time.perf_counter() - begin, usage.ru_maxrss / 1024


@contextlib.contextmanager
def competing(cores: Iterable[int]) -> Iterator[None]:
    """Keeps one process busy on each of these cores inside the block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = []
    try:
        for core in cores:
            processes.append(subprocess.Popen(command))
            os.sched_setaffinity(processes[-1].pid, {core})
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _best(figures: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Returns the highest figure of each name."""
    best: dict[str, Any] = {}
    for name, figure in figures:
        best[name] = max(figure, best.get(name, 0.0))
    return best


if __name__ == "__main__":
    part_of("cpu", __doc__)
