"""`split`, `join`, `merge` and `inspect --diff`: commands from file to file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import nmse
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli

from ...adapters import ALPHA, RANK, random_pairs, write_gguf, write_peft
from ...golden_files import model, path

FILE = path("llama-gqa")


@pytest.fixture
def run(capsys: Any) -> Any:
    """Returns (exit code, standard output, standard error) of a command line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in arguments])
        return code, *capsys.readouterr()

    return run


def values(file: Path) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(t.dequantize() if jq.is_quantized(t) else t, np.float64)
        for name, t in jq.gguf.read(file).tensors.items()
    }


def test_split_generate_and_join(run: Any, tmp_path: Path) -> None:
    code, out, err = run("split", FILE, tmp_path / "part", "--max-size", "1M")
    parts = [Path(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and len(parts) > 1
    assert parts == sorted(tmp_path.glob("part-*.gguf"))
    words = ("--tokens", "1,5,9", "-n", "4", "--temperature", "0", "--implementation", "xla")
    assert run("generate", parts[0], *words)[:2] == run("generate", FILE, *words)[:2]
    whole = tmp_path / "whole.gguf"
    assert run("join", parts[0], whole) == (0, f"{whole}\n", "")
    assert whole.read_bytes() == FILE.read_bytes()
    code, _, err = run("join", parts[0], whole)
    assert (code, err) == (2, f"error: {whole} already exists; --force replaces it\n")
    assert run("join", parts[0], whole, "--force")[0] == 0
    assert run("split", whole, tmp_path / "again.gguf", "--max-tensors", "9")[0] == 0
    code, _, err = run("split", whole, tmp_path / "again.gguf", "--max-tensors", "9")
    assert code == 2 and "already exists" in err
    code, _, err = run("join", parts[1], tmp_path / "x.gguf")
    assert code == 2 and f"give '{parts[0]}'" in err
    code, _, err = run("split", whole, whole, "--max-tensors", "9")
    assert code == 2 and "is the input: choose another name" in err
    code, _, err = run("split", whole, tmp_path / "y", "--max-tensors", "0")
    assert (code, err) == (2, "error: max_tensors=0 must be a positive integer\n")
    code, _, err = run("split", DATA / "none.gguf", tmp_path / "y", "--max-tensors", "1")
    assert code == 2 and "none.gguf: No such file or directory" in err


def test_merge(run: Any, tmp_path: Path) -> None:
    """Adapted matrices become W + scale * B A, in their own types; others keep their bytes."""
    given, out = model("llama-gqa"), tmp_path / "out.gguf"
    pairs = random_pairs(given, ("attn_q", "ffn_down"))
    small = {name: (a, b / 2) for name, (a, b) in pairs.items()}
    adapter = write_gguf(tmp_path / "adapter.gguf", given, small)
    assert run("merge", FILE, "--lora", f"{adapter}=0.5", "-o", out)[:2] == (0, f"{out}\n")
    before, after = jq.gguf.read_header(FILE), jq.gguf.read_header(out)
    assert after.metadata == before.metadata
    assert {n: t.type for n, t in after.tensors.items()} == {
        n: t.type for n, t in before.tensors.items()
    }
    old, new = values(FILE), values(out)
    kept, merged = jq.gguf.read(FILE).tensors, jq.gguf.read(out).tensors
    for name, tensor in kept.items():
        if name not in pairs:
            if jq.is_quantized(tensor):
                assert merged[name].to_gguf_bytes() == tensor.to_gguf_bytes()
            continue
        a, b = small[name]
        want = old[name] + 0.5 * ALPHA / RANK * (b.astype(np.float64) @ a)
        assert nmse(new[name], want) <= 6e-3 < nmse(old[name], want)
    floats = tmp_path / "floats.gguf"
    assert run("merge", FILE, "--lora", adapter, "--type", "f32", "-o", floats)[0] == 0
    with jq.implementation("xla", activations="f32"):
        tokens = [[1, 5, 9, 2]]
        want = models.with_lora(given, adapter).logits(tokens)
        assert nmse(models.load(floats).logits(tokens), want) <= 1e-8


def test_merge_into_a_checkpoint(run: Any, tmp_path: Path) -> None:
    folder, out = DATA / "checkpoints" / "llama", tmp_path / "out.gguf"
    given = models.load(folder)
    adapter = write_peft(tmp_path / "peft", given, random_pairs(given, ("attn_q", "attn_k")))
    assert run("merge", folder, "--lora", adapter, "--lora", f"{adapter}=-1", "-o", out)[0] == 0
    assert {t.type.name for t in jq.gguf.read_header(out).tensors.values()} == {"F32", "BF16"}
    for name, tensor in models.named_tensors(given).items():
        assert nmse(values(out)[name], np.asarray(tensor, np.float64)) <= 1e-5, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no adapter: give --lora FILE"),
        (("--lora", "/no/such"), "/no/such"),
        (("--lora", FILE), "general.type: is missing, expected 'adapter'"),
        (("--lora", "ADAPTER=1e9"), "scale=1000000000.0 must be a number from"),
    ],
)
def test_merge_refused(run: Any, tmp_path: Path, arguments: Any, message: str) -> None:
    given = model("llama-gqa")
    adapter = write_gguf(tmp_path / "adapter.gguf", given, random_pairs(given, ("attn_q",)))
    words = [str(word).replace("ADAPTER", str(adapter)) for word in arguments]
    code, out, err = run("merge", FILE, "-o", tmp_path / "out.gguf", *words)
    assert (code, out) == (2, "") and re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", err)
    assert [file.name for file in tmp_path.iterdir()] == ["adapter.gguf"]


def test_inspect_as_json(run: Any) -> None:
    header = jq.gguf.read_header(FILE)
    found = json.loads(run("inspect", FILE, "--json")[1])
    assert found["metadata"]["general.architecture"] == "llama"
    assert [one["name"] for one in found["tensors"]] == list(header.tensors)
    assert found["bytes"] == FILE.stat().st_size and found["version"] == 3
    tensors = json.loads(run("inspect", FILE, "--json", "--tensors")[1])
    assert tensors == {"tensors": found["tensors"]}
    out = run("inspect", FILE, "--tensors")[1]
    assert all(name in out for name in header.tensors) and "general.architecture" not in out


def test_differences(run: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    read = jq.gguf.read(FILE)
    tensors, metadata = dict(read.tensors), jq.gguf.Metadata(read.metadata)
    line = f"Different tensors: 0 of {len(tensors)}; different metadata keys: 0\n"
    jq.gguf.write(other, metadata, dict(reversed(tensors.items())))
    assert run("inspect", FILE, "--diff", other) == (0, line, "")

    wide, name = "blk.0.attn_q.weight", "output_norm.weight"
    tensors[name] = np.asarray(tensors[name]) * 1.5
    tensors[wide] = np.asarray(tensors[wide].dequantize(), np.float32)
    tensors["blk.0.attn_norm.weight"] = np.ones(32, np.float32)
    tensors["new.weight"] = tensors.pop("blk.1.attn_k.weight")
    metadata["general.name"], metadata["x.list"] = "another", [1, 2]
    metadata["llama.rope.freq_base"] = float(metadata["llama.rope.freq_base"]) + 1
    del metadata["general.file_type"]
    jq.gguf.write(other, metadata, tensors)
    code, out, _ = run("inspect", FILE, "--diff", other, "--json")
    found = json.loads(out)
    assert code == 1 and found["metadata"].keys() == {
        "general.name",
        "x.list",
        "llama.rope.freq_base",
        "general.file_type",
    }
    assert found["metadata"]["x.list"] == [None, [1, 2]]
    by_name = {one["name"]: one for one in found["tensors"]}
    assert by_name.keys() == {
        name,
        wide,
        "blk.0.attn_norm.weight",
        "new.weight",
        "blk.1.attn_k.weight",
    }
    assert by_name[name]["nmse"] == pytest.approx(0.25)
    largest = 0.5 * abs(np.asarray(read.tensors[name])).max()
    assert by_name[name]["largest"] == pytest.approx(largest)
    assert by_name[wide]["nmse"] == 0 and by_name[wide]["types"][1] == "F32"
    assert by_name["blk.0.attn_norm.weight"]["nmse"] is None
    assert by_name["new.weight"]["types"][0] is None
    code, out, _ = run("inspect", FILE, "--diff", other)
    assert code == 1 and re.search(r"output_norm.weight +│ F32 +│ +256 │ +0.25 │", out)
    assert f"Different tensors: 5 of {len(tensors) + 1}; different metadata keys: 4" in out
    code, out, _ = run("inspect", FILE, "--diff", other, "--tensors")
    assert code == 1 and "general.name" not in out
