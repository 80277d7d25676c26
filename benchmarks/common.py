"""Command lines of benchmarks, their result files, and processes bound to some cores."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def on_cores(cores: set[int], module: str, function: str, *args: Any) -> Any:
    """`benchmarks.module.function(*args)`, run in a process that may use these cores alone.

    It is bound from its start: JAX sizes its thread pool then. The result must fit JSON, `args`
    must be literals.
    """
    code = (
        f"import json, os; os.sched_setaffinity(0, {sorted(cores)});"
        f" from benchmarks import {module};"
        f" print(json.dumps({module}.{function}(*{args!r})))"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def results_file(arguments: list[str], name: str, description: str | None) -> Path:
    """File that a command line names, or else the repository's results of the benchmark `name`."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = RESULTS / f"{name}.json"
    parser.add_argument(
        "file", nargs="?", type=Path, default=default, metavar="FILE", help="JSON to write"
    )
    return parser.parse_args(arguments).file
