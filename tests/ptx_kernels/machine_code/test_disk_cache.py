"""On-disk cache of machine code: keyed by everything that determines it, and always validated."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ptx_kernels.machine_code import disk_cache
from ptx_kernels.machine_code.disk_cache import VARIABLE, cached, remove_oldest
from ptx_kernels.machine_code.ptxas import AssemblyError, assemble, find_tool
from ptx_kernels.machine_code.sass import disassemble, disassemble_all

TEXT = """.version 7.0
.target sm_61
.address_size 64
.visible .entry nothing()
{
  ret;
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assemble.cache_clear()
    disassemble_all.cache_clear()
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def tool(folder: Path, version: str) -> Path:
    path = folder / f"tool-{version}"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_the_second_time_no_tool_runs(folder, monkeypatch):
    first = assemble(TEXT, "sm_90")
    listing = disassemble(first.cubin)
    assert len(files(folder)) == 2
    assemble.cache_clear()
    disassemble_all.cache_clear()
    monkeypatch.setattr("ptx_kernels.machine_code.ptxas._run_ptxas", None)
    monkeypatch.setattr("ptx_kernels.machine_code.sass._run_nvdisasm", None)
    assert assemble(TEXT, "sm_90") == first
    assert disassemble(first.cubin) == listing


@pytest.mark.parametrize("changed", ["tool", "arguments", "source"])
def test_the_key_holds_all_that_determines_the_result(changed, folder, tmp_path_factory):
    tools = tmp_path_factory.mktemp("tools")
    now = {"tool": tool(tools, "1"), "arguments": "sm_90", "source": b"a"}
    other = {"tool": tool(tools, "2"), "arguments": "sm_80", "source": b"b"}
    assert cached(**now, run=lambda: ("first", b"1")) == ("first", b"1")
    assert cached(**now, run=lambda: ("never", b"2")) == ("first", b"1")
    then = now | {changed: other[changed]}
    assert cached(**then, run=lambda: ("second", b"3")) == ("second", b"3")


def forged(rest: bytes) -> bytes:
    """A file whose hash is right."""
    return hashlib.sha256(rest).digest() + rest


@pytest.mark.parametrize(
    "damage", [b"", b"short", b"x" * 200, forged((2).to_bytes(8, "little") + b"\xff\xfe")]
)
def test_a_damaged_file_is_made_anew(damage, folder):
    whole = assemble(TEXT, "sm_90")
    (file,) = files(folder)
    file.write_bytes(damage)
    assemble.cache_clear()
    assert assemble(TEXT, "sm_90") == whole
    assert file.read_bytes() != damage


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_other_kinds_of_files_are_made_anew(kind, folder):
    """Nothing waits for a pipe's writer or reads an endless file."""
    whole = assemble(TEXT, "sm_90")
    (file,) = files(folder)
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 200 << 30)
    assemble.cache_clear()
    assert assemble(TEXT, "sm_90") == whole
    assert 0 < file.stat().st_size < 1 << 20 and not file.is_symlink()


def test_refusals_are_not_cached(folder):
    with pytest.raises(AssemblyError, match="bogus"):
        assemble(TEXT.replace("ret;", "bogus;"), "sm_90")
    assert files(folder) == []


def test_a_folder_that_cannot_be_written_is_no_failure(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setenv(VARIABLE, str(folder / "file"))
    assert assemble(TEXT, "sm_90").registers > 0


def test_files_used_last_stay(folder):
    for number in range(4):
        path = folder / f"0{number}" / "entry"
        path.parent.mkdir()
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    remove_oldest(folder, 250)
    assert sorted(file.parent.name for file in files(folder)) == ["02", "03"]


def test_tools_are_told_apart_by_their_whole_version():
    assert "Build" in disk_cache._tool_id(find_tool("ptxas"))
