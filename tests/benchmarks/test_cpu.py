"""`python -m benchmarks.cpu`, on a model of two small layers and a peer with made-up figures."""

import dataclasses
import json
import os
import stat
import sys

import numpy as np
import pytest
from implementations import needs_native

from benchmarks import cpu, random_file
from jax_q4k import gguf, models, native
from tools.random_model import LLAMA_1B

SMALL = dataclasses.replace(
    LLAMA_1B,
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)

PEER = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
prompts, depths = given.get("-p", "0").split(","), given.get("-d", "0").split(",")
rows = [(int(p), int(d)) for p in prompts for d in depths]
made = [dict(n_prompt=p, n_depth=d, avg_ts=1000.0 + p + d) for p, d in rows]
print(json.dumps([row | dict(build_commit="abc") for row in made]))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cpu") / "small.gguf"
    random_file.write(path, SMALL)
    return str(path)


def test_a_file_of_random_weights(file):
    tensors = gguf.read(file).tensors
    assert (
        tensors["blk.0.attn_q.weight"].format == "Q4_K"
        and tensors["token_embd.weight"].format == "Q6_K"
    )
    weights = np.asarray(tensors["blk.1.ffn_up.weight"].dequantize())
    assert weights.std() == pytest.approx(256**-0.5, rel=0.02)
    assert models.from_gguf(file).tokenizer.vocab_size == SMALL.vocab_size


@needs_native
def test_both_are_measured_and_compared(file, tmp_path, capsys):
    peer, results = tmp_path / "llama-bench", tmp_path / "cpu.json"
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    mine = os.sched_getaffinity(0)
    assert (
        cpu.main(
            ["--model", file, "--llama-bench", str(peer), "--cores", "1", "--json", str(results)]
        )
        == 0
    )
    assert os.sched_getaffinity(0) == mine
    written = json.loads(results.read_text())
    (row,) = written["results"]
    ours, theirs = row["ours"], row["llama.cpp"]
    assert row["threads"] == 1 and ours["kernels"] == native.kernels() and theirs["build"] == "abc"
    assert theirs["prefill_512"] == 1512 and theirs["decode_2048"] == 3048
    assert set(theirs) - {"build"} <= set(ours) and all(
        value > 0 for value in ours.values() if value != ours["kernels"]
    )
    assert (
        ours["load_seconds"]
        < ours["load_to_first_token_seconds"]
        < ours["process_to_first_token_seconds"]
    )
    assert (
        ours["peak_megabytes_loaded"]
        <= ours["peak_megabytes_first_token"]
        <= ours["peak_megabytes"]
    )
    assert f"llama.cpp, ratio {ours['decode_0'] / 1000:.2f}" in capsys.readouterr().out
