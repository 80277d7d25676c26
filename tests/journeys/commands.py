"""Calls as command lines, run in this process or in a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax_q4k

from .calls import SAMPLINGS, Call, Result
from .files import path

PACKAGE = Path(jax_q4k.__file__).parents[1]
#: Time limit of a command in seconds; generous, because the machine may be busy.
PATIENCE = 60


def arguments(call: Call) -> list[str]:
    """Arguments of `jax-q4k generate` for a call; it then writes JSON."""
    fields = {"temperature": 0, "min_p": 0} | SAMPLINGS[call.sampling]
    fields |= {"max_new_tokens": call.new_tokens, "seed": call.seed}
    given = ["generate", str(path(call.model)), "--json", "--cache-dtype", call.cache_dtype]
    for ids in call.prompts:
        given += ["--tokens", ",".join(map(str, ids))]
    for name, value in fields.items():
        given += [f"--{name.replace('_', '-')}", str(value)]
    given += [] if call.implementation is None else ["--implementation", call.implementation]
    given += [] if call.draft is None else ["--draft", call.draft]
    given += [] if call.lora is None else ["--lora", f"{path(call.lora[0])}={call.lora[1]}"]
    given += ["--ignore-end"] * call.ignore_end
    given += ["--context-shift", "--keep", "2"] * (call.model == "short")
    return given


def results(written: str) -> tuple[Result, ...]:
    """Parses the outputs that a command with `arguments` writes."""
    return tuple(
        Result(tuple(row["tokens"]), row["text"], row["finish_reason"], _logprobs(row))
        for row in json.loads(written)["outputs"]
    )


def _logprobs(row: dict[str, Any]) -> tuple[float, ...]:
    found = [*row.get("prompt_logprobs", [None])[1:], *row.get("logprobs", [])]
    return tuple(x for one in found for x in (one["logprob"], *(t["logprob"] for t in one["top"])))


def start(
    folder: Path, *given: str, package: Path = PACKAGE, memory: int | None = None
) -> subprocess.Popen[str]:
    """Starts a command in a new process whose program cache is below `folder`.

    package: the folder that holds the packages. memory: limit of the address space in bytes.
    """
    ours = ("JAX_COMPIL", "JAX_PERSIST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = {"PYTHONPATH": str(package), "XDG_CACHE_HOME": str(folder)}
    main = "import sys; from jax_q4k.models.cli import main; sys.exit(main())"
    if memory is not None:
        limit = f"resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))"
        main = f"import resource; {limit}; {main}"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", main, *given],
        env={**kept, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1", **paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a command that must succeed; returns its output."""
    try:
        out, notes = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0 and "Traceback" not in notes, notes
    return out
