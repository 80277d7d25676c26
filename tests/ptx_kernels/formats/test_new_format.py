"""A block format is three additions: its Python file, a struct in formats.h, a quantizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

PARTS = ROOT / "tests" / "data" / "new_format"

ONE_SET_OF_KERNELS = """
_KERNELS[platform.machine()] = {"portable": []}
_FLAGS.append("-O0")
"""


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow("compiles the library with a new format")
def test_a_format_is_three_additions(tmp_path):
    """Compares decoders, simulates kernels, compiles and runs C++, in a copy of the sources."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for package in ("ptx_kernels", "jax_q4k", "models"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=ignore)
    shutil.copy(PARTS / "q4_x.py", tmp_path / "ptx_kernels" / "formats")
    shutil.copy(PARTS / "quantizer.py", tmp_path / "jax_q4k" / "quantizers" / "q4_x.py")
    header = tmp_path / "jax_q4k" / "native" / "src" / "formats.h"
    text = header.read_text()
    listed, reader = "#define JAX_Q4K_FORMATS(X) ", "// Address of a plane of a row's span."
    assert text.count(listed) == text.count(reader) == 1
    line = text[text.index(listed) :].split("\n")[0]
    text = text.replace(line, f"{line}\n  X(Q4_X, 32, 128, 32) \\")
    header.write_text(text.replace(reader, (PARTS / "q4_x.h").read_text() + reader))
    with (tmp_path / "jax_q4k" / "native" / "build.py").open("a") as build:
        build.write(ONE_SET_OF_KERNELS)
    run(tmp_path, "-m", "jax_q4k.native")
    run(tmp_path, str(PARTS / "run.py"))
