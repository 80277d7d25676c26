"""Cost of loading: tensors are in memory once, and other processes' shards are not read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import loading
from jax_q4k import gguf
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors

#: 66 million weights of Q4_K, 38 MB; eight devices shard all of them but columns of attn_output.
CONFIG = Config("llama", 4096, 512, 1024, 4096, 4, 16, 8, 64, 1e-5)
BESIDE = 12 << 20  # bytes of buffers, programs and the heap


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {}
    for name, (shape, required, *_) in expected_tensors(CONFIG).items():
        if required:
            kind = "Q4_K" if len(shape) > 1 else "F32"
            nbytes = gguf.TensorPieces(kind, shape, list).nbytes
            pieces = [np.zeros(nbytes, np.uint8)]
            tensors[name] = gguf.TensorPieces(kind, shape, lambda pieces=pieces: pieces)
    path = tmp_path_factory.mktemp("loading") / "model.gguf"
    gguf.write(path, CONFIG.to_metadata(), tensors)
    return path


@pytest.mark.slow("loads a large file in processes of their own")
@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 4)])
def test_a_model_is_held_and_read_once(model: Path, processes: int, devices: int) -> None:
    share = model.stat().st_size / processes
    for found in loading.loaded(model, processes, devices):
        assert 0.99 * share <= found["weights"] <= 1.02 * share
        assert found["peak"] - found["before"] <= share + BESIDE
        assert 0.99 * share <= found["read"] <= 1.05 * share


def test_results_are_written(model: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(loading, "CASES", ((1, 1),))
    assert loading.main(["--model", str(model), str(tmp_path / "loading.json")]) == 0
    written = json.loads((tmp_path / "loading.json").read_text())
    (row,) = written["results"]
    assert written["file_bytes"] == model.stat().st_size <= row["read"] < 1.05 * row["weights"]
    assert "1 x 1" in capsys.readouterr().out
