"""Random damage: a file loads as with `gguf`'s reader, or is refused; nothing else happens."""

from __future__ import annotations

import io
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.gguf_bytes import assert_same_as_ggufs_reader, damage, parse, write_sample
from support.paths import GOLDEN

import jax_q4k as jq

BOOKKEEPING = 1 << 17  # bytes of Python objects and read-ahead, for any file size
#: Bytes of a text's byte: an invalid one becomes four characters, each of which takes four bytes if
#: random bytes make an emoji, too; Python's decoder allocates a quarter more.
OF_A_BYTE = 20
OF_A_TENSOR = 1 << 12  # bytes of Python objects: arrays of its planes and their metadata


def fuzz(data: bytes, count: int, seed: int, path: Path) -> Counter[str]:
    """Loads `count` damaged copies; counts each outcome."""
    sound, rng = parse(data), np.random.default_rng(seed)
    header, objects = sound.data_start, BOOKKEEPING + OF_A_TENSOR * len(sound.tensors)
    outcomes: Counter[str] = Counter()
    jq.gguf.load.load(jq.gguf.source.Source(io.BytesIO(data), "whole.gguf"))  # imports, caches
    for _ in range(count):
        changed = damage(data, header, rng)
        source = jq.gguf.source.Source(io.BytesIO(changed), "damaged.gguf")
        tracemalloc.start()
        try:
            with warnings.catch_warnings(record=True) as warned:
                file = jq.gguf.load.load(source)
        except jq.GGUFError as error:
            assert error.file == "damaged.gguf" and error.field and error.problem
            outcomes["refused"] += 1
            file = None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= OF_A_BYTE * len(changed) + objects
        if file is not None:
            path.write_bytes(changed)
            if not any("not UTF-8" in str(one.message) for one in warned):  # gguf refuses these
                assert_same_as_ggufs_reader(file, path)
            outcomes["loaded"] += 1
    return outcomes


@pytest.mark.slow("reads hundreds of damaged files", quick=["part=0"])
@pytest.mark.parametrize("part", range(4))
def test_damaged_golden_files(part, tmp_path):
    data = (GOLDEN / "llama-gqa.Q4_K_M.gguf").read_bytes()
    outcomes = fuzz(data, 500, seed=part, path=tmp_path / "damaged.gguf")
    assert outcomes["refused"] > 200 and outcomes["loaded"] > 50


@pytest.mark.slow("reads hundreds of damaged files")
def test_damaged_files_of_every_type(tmp_path):
    data = write_sample(tmp_path / "sample.gguf", tokens=20).read_bytes()
    outcomes = fuzz(data, 1000, seed=2, path=tmp_path / "damaged.gguf")
    assert outcomes["refused"] > 400 and outcomes["loaded"] > 100
