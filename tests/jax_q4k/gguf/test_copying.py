"""`gguf.copy` splits and joins files, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_bytes import write_sample
from support.paths import GOLDEN

import jax_q4k as jq


def test_split_and_join(tmp_path: Path) -> None:
    whole = Path(write_sample(tmp_path / "whole.gguf"))
    seen: list[tuple[int, int]] = []
    parts = jq.gguf.copy(
        whole, tmp_path / "m.gguf", max_tensors=2, progress=lambda *call: seen.append(call)
    )
    names = list(jq.gguf.read_header(whole).tensors)
    assert [path.name for path in parts] == [
        f"m-{i + 1:05d}-of-{len(parts):05d}.gguf" for i in range(-(-len(names) // 2))
    ]
    found = [[tensor.name for tensor in gguf.GGUFReader(path).tensors] for path in parts]
    assert sum(found, []) == names and {len(part) for part in found[:-1]} == {2}
    assert seen[-1][0] == seen[-1][1] > 0
    [joined] = jq.gguf.copy(parts[0], tmp_path / "joined.gguf")
    assert joined.read_bytes() == whole.read_bytes()
    again = jq.gguf.copy(parts[0], tmp_path / "again.gguf", max_bytes=8000)
    [joined] = jq.gguf.copy(again[0], tmp_path / "joined.gguf")
    assert joined.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-oss-mxfp4", "text-spm"])
def test_real_files_stay_as_they_are(name: str, tmp_path: Path) -> None:
    (file,) = GOLDEN.glob(f"{name}.*.gguf")
    parts = jq.gguf.copy(file, tmp_path / "m.gguf", max_bytes=500_000)
    assert len(parts) > 2
    [joined] = jq.gguf.copy(parts[0], tmp_path / "joined.gguf")
    assert joined.read_bytes() == file.read_bytes()


def test_a_tensor_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_q4k.gguf import copying

    monkeypatch.setattr(copying, "_PIECE", 1000)
    whole = Path(write_sample(tmp_path / "whole.gguf"))
    [copied] = jq.gguf.copy(whole, tmp_path / "copied.gguf")
    assert copied.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tensors": 0}, "max_tensors=0 must be a positive integer"),
        ({"max_bytes": True}, "max_bytes=True must be a positive integer"),
    ],
)
def test_limits_that_are_none(limits: Any, message: str, tmp_path: Path) -> None:
    whole = write_sample(tmp_path / "whole.gguf")
    with pytest.raises(ValueError, match=message):
        jq.gguf.copy(whole, tmp_path / "m.gguf", **limits)
    assert len(list(tmp_path.iterdir())) == 1


def test_too_many_parts(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.zeros(1, np.float32) for i in range(513)}
    jq.gguf.write(tmp_path / "whole.gguf", {"general.architecture": "a"}, tensors)
    with pytest.raises(ValueError, match="max_tensors=1 makes 513 parts; the maximum is 512"):
        jq.gguf.copy(tmp_path / "whole.gguf", tmp_path / "m.gguf", max_tensors=1)


def test_malformed_files(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(jq.GGUFError, match="version"):
        jq.gguf.copy(file, tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("t", np.zeros(4, np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(jq.GGUFError, match="tensor 't': of type I32 cannot be written"):
        jq.gguf.copy(file, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]
