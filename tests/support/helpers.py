"""Helpers shared by several test modules."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .paths import ROOT, TESTS


def nmse(got, want) -> float:
    """Mean squared error over mean square of `want`, in float64; NaN if any value is NaN.

    Compare as `nmse(got, want) <= tolerance`, which a NaN fails. An all-zero `want` gives 0 for an
    all-zero `got` and inf otherwise.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {got.shape}, want {want.shape}")
    error, power = np.sum((got - want) ** 2), np.sum(want**2)
    if power == 0:
        return 0.0 if error == 0 else float("nan") if np.isnan(error) else float("inf")
    return float(error / power)


def free_port() -> int:
    """Returns a port of this machine that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_64_bit_mode(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a test module's function under JAX_ENABLE_X64; arguments and result pass through JSON.

    It runs in a new process, because the mode must be set before modules create arrays.
    """
    call = f"helpers.called({function.__module__!r}, {function.__name__!r}, {arguments!r})"
    program = f"from support import helpers; print({call})"
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", program],
        env=os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def called(module: str, name: str, arguments: tuple[Any, ...]) -> str:
    """Returns the function's result as JSON."""
    return json.dumps(getattr(importlib.import_module(module), name)(*arguments))
