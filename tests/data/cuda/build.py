"""Compiles the CUDA sources of this folder to PTX: `python tests/data/cuda/build.py`.

nvcc must be on the PATH.

The PTX is committed, so that the tests need no nvcc. They run it in the simulator: text that nobody
here wrote.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
#: sources that are not compiled for sm_80 alone
OPTIONS = {
    "bf16": ["-arch=sm_90"],
    "loop_break": ["-arch=sm_80", "-lineinfo"],
    "scan": ["-arch=sm_90"],
}


def build(source: Path) -> str:
    """PTX of one source, without its banner and without paths of the machine that compiled it."""
    options = OPTIONS.get(source.stem, ["-arch=sm_80"])
    command = ["nvcc", "-ptx", "-std=c++17", *options, "-o", "-", source.name]
    text = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"\A(//[^\n]*\n)+", "", text)
    return re.sub(r'(\.file\s+\d+\s+)"[^"]*/([^"/]+)"[^\n]*', r'\1"\2"', text).lstrip("\n")


if __name__ == "__main__":
    for source in sorted(HERE.glob("*.cu")):
        source.with_suffix(".ptx").write_text(build(source))
        print(source.stem)
