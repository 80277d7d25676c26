"""Random damage: a file loads as `gguf`'s reader loads it, or is refused; nothing else happens."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import assert_same_as_ggufs_reader, write_sample
from helpers import GOLDEN

import jax_q4k as jq

SMALL = (0, 1, 2, 7, 9, 12, 31, 32, 255, 256, 65535)
LARGE = (1 << 31, 1 << 32, 1 << 36, 1 << 61, 1 << 63, (1 << 64) - 32)
SPECIAL = (*SMALL, *LARGE, *(value - 1 for value in LARGE), (1 << 64) - 1)
CHANGES = ("byte", "byte", "bit", "bit", "u32", "u64", "truncate", "delete", "insert", "repeat", "overwrite")
BOOKKEEPING = 1 << 17  # bytes of Python objects and read-ahead, whatever the file's size


def damage(data: bytes, header: int, rng: np.random.Generator) -> bytes:
    """One random change, or a few, seven of eight of them in the first `header` bytes."""
    changed = bytearray(data)
    for _ in range(rng.geometric(0.6)):
        end = min(header, len(changed)) if rng.random() < 7 / 8 else len(changed)
        if end == 0:
            break
        at, other, size = (int(rng.integers(n)) for n in (end, end, 40))
        kind = rng.choice(CHANGES)
        if kind == "byte":
            changed[at] = rng.integers(256)
        elif kind == "bit":
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind in ("u32", "u64"):
            number = struct.pack("<Q", SPECIAL[rng.integers(len(SPECIAL))])[: int(kind[1:]) // 8]
            changed[at : at + len(number)] = number
        elif kind == "truncate":
            del changed[at:]
        elif kind == "delete":
            del changed[at : at + size]
        elif kind == "insert":
            changed[at:at] = rng.bytes(size)
        elif kind == "repeat":
            changed[at:at] = changed[other : other + size]
        else:
            changed[at : at + size] = changed[other : other + size]
    return bytes(changed)


def fuzz(data: bytes, count: int, seed: int, path: Path) -> Counter[str]:
    """Load `count` damaged copies; how often each outcome came."""
    header, rng = jq.gguf.parse(data).data_start, np.random.default_rng(seed)
    outcomes: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for _ in range(count):
            changed = damage(data, header, rng)
            source = jq.gguf.source.Source(io.BytesIO(changed), "damaged.gguf")
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                file = jq.gguf.load.load(source)
            except jq.GGUFError as error:
                assert error.file == "damaged.gguf" and error.field and error.problem
                outcomes["refused"] += 1
                file = None
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= 2 * len(changed) + BOOKKEEPING
            if file is not None:
                path.write_bytes(changed)
                assert_same_as_ggufs_reader(file, path)
                outcomes["loaded"] += 1
    finally:
        tracemalloc.stop()
    return outcomes


@pytest.mark.parametrize("part", range(2))
def test_damaged_golden_files(part, tmp_path):
    data = (GOLDEN / "llama-gqa.Q4_K_M.gguf").read_bytes()
    outcomes = fuzz(data, 1000, seed=part, path=tmp_path / "damaged.gguf")
    assert outcomes["refused"] > 400 and outcomes["loaded"] > 100


def test_damaged_files_of_every_type(tmp_path):
    data = write_sample(tmp_path / "sample.gguf", tokens=20).read_bytes()
    outcomes = fuzz(data, 1000, seed=2, path=tmp_path / "damaged.gguf")
    assert outcomes["refused"] > 400 and outcomes["loaded"] > 100
