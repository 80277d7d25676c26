"""Memory of dropped models is returned to the system."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from support.implementations import needs_native

import jax_q4k as jq

MEBIBYTE = 1 << 20

CODE = """
import gc, sys
import jax, numpy as np
import jax_q4k as jq

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

jax.block_until_ready(jax.numpy.zeros(8))
before = resident()
for _ in range(10):
    file = jq.gguf.read(sys.argv[1])
    jax.block_until_ready([t.planes if hasattr(t, "planes") else t for t in file.tensors.values()])
    after = resident()
    del file
gc.collect()
print(after - before, resident() - before)
"""


@pytest.mark.slow("loads a large file three times")
@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_again_takes_no_more_memory(tmp_path):
    """Ten loads, each dropped before the next, take at most one model's memory, finally none."""
    rows = np.zeros((1024, 2048), np.float32)
    packed = jq.quantize(rows, "Q4_K")
    floats = np.ones((64, 4096), np.float32)
    tensors = {f"blk.{i}.w": packed for i in range(48)} | {f"blk.{i}.f": floats for i in range(48)}
    size = sum(len(t.to_gguf_bytes()) if t is packed else t.nbytes for t in tensors.values())
    jq.gguf.write(tmp_path / "model.gguf", {"general.architecture": "none"}, tensors)
    command = [sys.executable, "-c", CODE, str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded, dropped = map(int, done.stdout.split())
    assert size > 100 * MEBIBYTE
    assert loaded < 1.2 * size + 16 * MEBIBYTE and dropped < 0.2 * size + 16 * MEBIBYTE
