"""Reports name neither the machine nor its user."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

import jax_q4k as jq
import ptx_kernels
from jax_q4k.models.cli.gpu_checks.privacy import impersonal


@pytest.fixture(autouse=True)
def alice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setattr(platform, "node", lambda: "node1.cluster.local")


@pytest.mark.parametrize(
    "text, kept",
    [
        ("/home/alice/models/x.gguf", "PATH"),
        ("open /scratch/alice/run.py:3: no", "open PATH:3: no"),
        ("in /tmp/alice-cache/xyz, too", "in PATH too"),
        ('File "/home/alice b/a c.py", line 3', 'File "PATH", line 3'),
        ("at '/data/my models/x' and ~bob/y", "at 'PATH' and PATH"),
        ("HOME=~/secret", "HOME=PATH"),
        (f"{os.getcwd()}/a.py", "PATH"),
        (f"{Path.home()}/x", "PATH"),
        ("/usr/lib/libcuda.so.1 and /lib64/x", "/usr/lib/libcuda.so.1 and /lib64/x"),
        ("/usrs/alice", "PATH"),
        (f"{sys.prefix}/lib/x.py", "PYTHON/lib/x.py"),
        (f"{Path(jq.__file__).parent}/a.py", "jax_q4k/a.py"),
        (f'"{Path(ptx_kernels.__file__).parent}/driver.py"', '"ptx_kernels/driver.py"'),
        (f"{Path(jq.__file__).resolve().parents[1]}/models/cli/x.py", "jax_q4k/models/cli/x.py"),
        ("66 of 132 and/or 3/4 / x /= 2", "66 of 132 and/or 3/4 / x /= 2"),
        ("https://github.com/jax-ml/jax", "https://github.com/jax-ml/jax"),
        ("on GPU-8d3e1f2a-1111-2222-3333-444455556666", "on GPU-UUID"),
        ("node1: alice and malice, alice's", "HOST: USER and malice, USER's"),
        ("on node1.cluster.local or node1.corp.example.com.", "on HOST or HOST."),
        ("node10 and my_node1", "node10 and my_node1"),
    ],
)
def test_a_line(text, kept):
    assert impersonal(text) == kept


def test_a_host_with_a_common_name(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "gpu")
    assert impersonal("kernel gpu_matvec on gpu") == "kernel gpu_matvec on HOST"
