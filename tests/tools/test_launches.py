"""The command that counts kernel launches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ptx_kernels.machine_code.ptxas import Assembly
from tools import aot, launches
from tools.thunks import Array, Thunk

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


@pytest.mark.slow("compiles or simulates whole models")
def test_describes_every_program_and_lists_one(capsys):
    assert launches.main(["--list", "decode", "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    for name in ("prefill", "decode", "generate"):
        assert f"\n{name}: " in printed
    assert printed.count("\n  shared memory of a multiprocessor: ") == 3
    listed = [line for line in printed.splitlines() if "matvec" in line and " * " in line]
    assert len(listed) == 9  # four in each of two layers, and the output


def test_counts_changes_of_shared_memory(monkeypatch):
    """Kernels with 0, 8 and 8 KB per block, two changes: the first runs again."""
    blocks = {"small": 0, "large": 8 << 10}
    monkeypatch.setattr(
        launches, "assemble", lambda text, arch: Assembly(arch, 255, 0, 0, 0, blocks[text], b"")
    )
    texts = ("small", "large", "large", "small")
    each = [Thunk(i, "kCustomCall", text, (1,), (256,), 0) for i, text in enumerate(texts)]
    program = SimpleNamespace(
        ptx_launches=each,
        launches=each,
        loops=[],
        temp_bytes=0,
        rewrites=lambda pages: [],
        ptx_text=lambda launch: launch.name,
    )
    assert launches.shared_splits(program) == [8 << 10, 16 << 10, 16 << 10, 8 << 10]
    text = launches.describe("decode", program, Array("f32", (1,)), 0)
    assert "multiprocessor: 8 KB (2), 16 KB (2); 2 changes" in text


def test_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(aot, "unavailable", lambda: "the plugin is missing")
    assert launches.main([]) == 3
    assert capsys.readouterr().err == "the plugin is missing\n"
