"""`python -m benchmarks.cpu`, with a two-layer model and a peer that reports made-up figures."""

import dataclasses
import json
import os
import stat
import sys

import numpy as np
import pytest
from support.implementations import needs_native

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

#: Stand-in for both programs of a peer; reports made-up rates for prompts, depths and batches.
BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rows, slower = [], 100.0 * (given.get("-rtr") == "0")
for prompt in map(int, given["-p"].split(",")):
    rows.append(dict(n_prompt=prompt, n_depth=int(given.get("-d", 0)), n_gen=int(given["-n"])))
if "-gp" in given:
    rows = [dict(n_prompt=2048, n_depth=0, n_gen=32)]
for row in rows:
    row.update(avg_ts=1000.0 + row["n_prompt"] + row["n_depth"] - slower, build_commit="abc")
print("said before")
print(json.dumps(rows, indent=2))
"""
BATCHED = """#!{python}
import sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("|  PP |  TG |  B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |", file=sys.stderr)
for batch in given["-npl"].split(","):
    print(f"|  16 |  32 | {{batch}} |  48 | 0.728 | 43.96 | 0.778 | {{batch}}0.56 | 1.5 |")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cpu") / "small.gguf"
    random_file.write(path, SMALL)
    return str(path)


@pytest.mark.slow("measures")
def test_a_file_of_random_weights(file):
    tensors = gguf.read(file).tensors
    assert (
        tensors["blk.0.attn_q.weight"].format == "Q4_K"
        and tensors["token_embd.weight"].format == "Q6_K"
    )
    weights = np.asarray(tensors["blk.1.ffn_up.weight"].dequantize())
    assert weights.std() == pytest.approx(256**-0.5, rel=0.02)
    assert models.from_gguf(file).tokenizer.vocab_size == SMALL.vocab_size


@pytest.mark.slow("runs every part of a benchmark")
@needs_native
def test_all_are_measured_and_compared(file, tmp_path, capsys):
    folder, results = tmp_path / "bin", tmp_path / "cpu.json"
    folder.mkdir()
    for name, text in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        program = folder / name
        program.write_text(text.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    mine = os.sched_getaffinity(0)
    peers = ["--llama-cpp", str(folder), "--ik-llama-cpp", str(folder)]
    given = ["--model", file, *peers, "--cores", "1", "--json", str(results)]
    assert cpu.main(given) == 0
    assert os.sched_getaffinity(0) == mine
    written = json.loads(results.read_text())
    (row,) = written["results"]
    ours, theirs = row["ours"], row["llama.cpp"]
    assert row["threads"] == 1 and ours["kernels"] == native.kernels() and theirs["build"] == "abc"
    assert theirs["prefill_512"] == 1512 and theirs["decode_2048"] == 3048
    assert row["ik_llama.cpp"]["decode_2048"] == 3048  # repacked
    assert theirs["batch_4"] == 40.56
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
    ratio = ours["decode_0"] / 1000
    assert row["ratios"]["llama.cpp"]["decode_0"][1] == pytest.approx(ratio, abs=1e-3)
    shown = row["ratios"]["llama.cpp"]["decode_0"][1]  # rounded before
    assert f"llama.cpp, ratio {shown:.2f} (" in capsys.readouterr().out


def test_rounds_are_put_together_by_medians_and_ratios_with_their_spread():
    ours = [{"kernels": "avx2", "decode_0": speed} for speed in (30.0, 10.0, 20.0)]
    theirs = [{"build": "a", "decode_0": speed} for speed in (10.0, 10.0, 10.0)]
    assert cpu.medians(ours) == {"kernels": "avx2", "decode_0": 20.0}
    assert cpu.ratios(ours, theirs) == {"decode_0": [1.0, 2.0, 3.0]}
