"""The text of one kernel per family, under review: `pytest --update-golden` rewrites them.

Review the diff like code.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.format_lists import EIGHTS
from support.paths import DATA, ROOT

from ptx_kernels.kernels import CASES, KERNELS, Case
from ptx_kernels.kernels.gemm import GemmConfig

GOLDEN = DATA / "ptx"
_HALVES = dict(format="Q4_K", n=32, columns=512, m=16, config=GemmConfig(1, 1, 2, 16, 2, "f16"))
#: The first case of each family, and gemm's other products; no code books with thousands of words.
REVIEWED = {
    case.family: case for case in reversed(CASES) if case.arguments.get("format") not in EIGHTS
} | {"gemm_f16": Case("gemm_f16", "gemm", _HALVES)}


@pytest.mark.parametrize("name", sorted(REVIEWED))
def test_text_is_the_reviewed_one(name, update_golden):
    case = REVIEWED[name]
    path = GOLDEN / f"{name}.ptx"
    text = KERNELS[case.family](**case.arguments).text
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing: run pytest --update-golden and review it"
    assert text == path.read_text(), (
        f"{case.label} changed: run pytest --update-golden and review the difference"
    )


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.ptx")} == set(REVIEWED) >= set(KERNELS)


@pytest.mark.slow("builds every kernel in a process of its own")
def test_text_does_not_depend_on_the_process():
    """XLA's compilation cache is keyed by the text, so hash seeds must not affect it."""
    script = (
        "import hashlib; from ptx_kernels.kernels import CASES, KERNELS\n"
        "texts = ''.join(KERNELS[c.family](**c.arguments).text for c in CASES)\n"
        "print(hashlib.sha256(texts.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
