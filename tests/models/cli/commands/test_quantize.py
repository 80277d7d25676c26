import re
import shutil
import struct

import numpy as np
import pytest
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import models, quantizers
from jax_q4k.models import cli

from ...golden_files import model, path


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command line: (exit code, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        code = cli.main(tuple(map(str, arguments)))
        return code, *capsys.readouterr()

    return run


def write_imatrix(file, entries, kind="imatrix"):
    """entries: tensor name -> (sums of squares, counts)."""
    tensors = {}
    for name, (sums, counts) in entries.items():
        tensors[f"{name}.in_sum2"] = np.asarray(sums, np.float32)
        tensors[f"{name}.counts"] = np.asarray(counts, np.float32)
    jq.gguf.write(file, {"general.architecture": "", "general.type": kind}, tensors)
    return file


def test_quantize_a_file(run, tmp_path):
    target = tmp_path / "out.gguf"
    code, out, err = run("quantize", path("llama-gqa"), target, "--type", "Q8_0")
    assert (code, out) == (0, "")
    sizes = f"{path('llama-gqa').stat().st_size:,} -> {target.stat().st_size:,} bytes"
    said = r"16 tensors are already quantized \(13 Q4_K, 3 Q6_K\): quantizing [^\n]*\n"
    assert re.fullmatch(rf"{said}{sizes} \(\d+\.\d%\) in \d+\.\d s\n", err)
    want = models.named_tensors(models.quantize(model("llama-gqa"), "Q8_0"))
    got = models.named_tensors(models.from_gguf(target))
    for name, value in want.items():
        if isinstance(value, jq.QuantizedArray):
            assert value.to_gguf_bytes() == got[name].to_gguf_bytes(), name


def test_q4_k_m_is_the_default_and_an_existing_file_is_kept(run, tmp_path):
    target = tmp_path / "out.gguf"
    target.write_bytes(b"old")
    code, _, err = run("quantize", path("llama-gqa"), target)
    assert (code, err) == (2, f"error: {target} already exists; --force replaces it\n")
    assert target.read_bytes() == b"old"
    assert run("quantize", path("llama-gqa"), target, "--force")[0] == 0
    header, golden = jq.gguf.read_header(target), jq.gguf.read_header(path("llama-gqa"))
    assert header.metadata == golden.metadata
    assert {name: info.type for name, info in header.tensors.items()} == {
        name: info.type for name, info in golden.tensors.items()
    }


def test_the_input_is_never_replaced(run, tmp_path):
    source, link = tmp_path / "in.gguf", tmp_path / "link.gguf"
    shutil.copy(path("llama-gqa"), source)
    link.symlink_to(source)
    for target in (source, link, tmp_path / "." / "in.gguf"):
        code, _, err = run("quantize", source, target, "--force")
        assert code == 2 and "is the input: choose another name" in err
    assert source.read_bytes() == path("llama-gqa").read_bytes()


def test_importance_matrix(run, tmp_path):
    name, sums = "blk.0.attn_q.weight", np.arange(256) + 1.0
    imatrix = write_imatrix(
        tmp_path / "i.gguf", {name: (sums, [4]), "blk.0.attn_k.weight": (np.zeros(256), [0])}
    )
    read = models.read_imatrix(imatrix)
    np.testing.assert_array_equal(read[name], (sums / 4).astype(np.float32))
    np.testing.assert_array_equal(read["blk.0.attn_k.weight"], np.ones(256))
    source, target = path("llama-gqa"), tmp_path / "out.gguf"
    assert run("quantize", source, target, "--type", "Q5_K_S", "--imatrix", imatrix)[0] == 0
    want = models.named_tensors(models.quantize(model("llama-gqa"), "Q5_K_S", read))
    assert jq.gguf.read(target).tensors[name].to_gguf_bytes() == want[name].to_gguf_bytes()


@pytest.mark.slow("quantizes a model")
def test_importance_of_experts_and_heads(run, tmp_path):
    """Follows llama-imatrix: counts are per expert, but shared by all heads."""
    rng, experts, heads = np.random.default_rng(0), "blk.1.ffn_down_exps.weight", (4, 64)
    sums, counts = (
        rng.uniform(0.01, 10, (8, 64)),
        np.array([[3], [5], [0], [1], [9], [2], [4], [7]]),
    )
    of_heads = rng.uniform(0.01, 10, heads).astype(np.float32)
    entries = {
        experts: (sums, counts),
        "blk.0.attn_k_b.weight": (of_heads.reshape(-1), [4]),
        "blk.2.ffn_gate_exps.weight": (rng.uniform(0.01, 10, 256), [4]),  # for all experts
    }
    imatrix = write_imatrix(tmp_path / "i.gguf", entries)
    read = models.read_imatrix(imatrix)
    want = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
    np.testing.assert_allclose(read[experts], want, rtol=1e-6)
    np.testing.assert_array_equal(read[experts][2], np.ones(64))
    np.testing.assert_array_equal(read["blk.0.attn_k_b.weight"], of_heads.reshape(-1) / 4)

    packed = jq.gguf.read(path("deepseek2"))
    floats = {
        name: tensor.dequantize() if jq.is_quantized(tensor) else tensor
        for name, tensor in packed.tensors.items()
    }
    source, target = tmp_path / "in.gguf", tmp_path / "out.gguf"
    jq.gguf.write(source, packed.metadata, floats)
    assert run("quantize", source, target, "--type", "Q4_K_S", "--imatrix", imatrix)[0] == 0
    got = jq.gguf.read(target).tensors
    for name in entries:
        for i, matrix in enumerate(np.asarray(floats[name])):
            weights = read[name].reshape(-1, matrix.shape[-1])
            blocks = quantizers.quantize(
                matrix, got[name].format, weights[i if len(weights) > 1 else 0]
            )
            assert got[name][i].to_gguf_bytes() == blocks.tobytes(), (name, i)


@pytest.mark.slow("quantizes a model")
def test_importance_of_what_is_fused(tmp_path):
    """Gate and up are one tensor in the imatrix file; its weights apply to both."""
    weights = np.random.default_rng(0).uniform(0.01, 10, (6, 256)).astype(np.float32)
    names = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up")]
    got, want = (
        models.named_tensors(models.quantize(model("gemma4-moe"), "Q3_K_M", importance))
        for importance in (
            {"blk.0.ffn_gate_up_exps.weight": weights},
            dict.fromkeys(names, weights),
        )
    )
    even = models.named_tensors(models.quantize(model("gemma4-moe"), "Q3_K_M"))
    for name in names:
        assert got[name].to_gguf_bytes() == want[name].to_gguf_bytes()
        assert got[name].to_gguf_bytes() != even[name].to_gguf_bytes()


def test_importance_of_experts_that_does_not_fit():
    for shape in ((6, 255), (5, 256), (2, 3, 256)):
        importance = {"blk.0.ffn_gate_up_exps.weight": np.ones(shape)}
        message = rf"has shape \({', '.join(map(str, shape))}\); it must be \(6, 256\) or \(256,\)"
        with pytest.raises(ValueError, match=message):
            models.quantize(model("gemma4-moe"), "Q5_K_S", importance)


@pytest.mark.parametrize(
    ("entries", "kind", "message"),
    [
        (
            {},
            "model",
            "general.type: must be 'imatrix', not 'model'",
        ),
        (
            {"output.weight": (np.ones(256), [1, 1])},
            "imatrix",
            r"'output.weight.counts': has shape \(2,\), but sums have shape \(256,\)",
        ),
        (
            {"output.weight": (np.full(256, 3e38), [0.1])},
            "imatrix",
            "'output.weight.counts': is so small that means are infinite in float32",
        ),
        (
            {"output.weight": (-np.ones(256), [1])},
            "imatrix",
            "'output.weight.in_sum2': must hold non-negative float32",
        ),
        (
            {"output.weight": (np.ones(32), [1])},
            "imatrix",
            r"importance of 'output.weight' has shape \(32,\)",
        ),
        (
            {"blk.9.ffn_up.weight": (np.ones(256), [1])},
            "imatrix",
            "names 'blk.9.ffn_up.weight', which is not a tensor",
        ),
    ],
)
def test_bad_importance_matrices(run, tmp_path, entries, kind, message):
    imatrix = write_imatrix(tmp_path / "i.gguf", entries, kind)
    code, _, err = run("quantize", path("llama-gqa"), tmp_path / "out.gguf", "--imatrix", imatrix)
    assert code == 2 and re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", err)
    assert not (tmp_path / "out.gguf").exists()


def dat(entries):
    """An importance matrix in llama.cpp's .dat format: name -> (count, means times count)."""
    data = struct.pack("<i", len(entries))
    for name, (rows, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", rows, len(values)) + np.asarray(values, "<f4").tobytes()
    return data + struct.pack("<ii", 7, 4) + b"text"


def test_importance_matrices_in_the_older_format(tmp_path):
    means = np.arange(256, dtype=np.float32)
    file = tmp_path / "i.dat"
    file.write_bytes(dat({"output.weight": (3, means * 3), "blk.0.attn_q.weight": (0, means)}))
    got = models.read_imatrix(file)
    assert list(got) == ["output.weight", "blk.0.attn_q.weight"]
    for values in got.values():
        np.testing.assert_array_equal(values, means)


def test_importance_of_other_models_tensors_is_ignored(run, tmp_path):
    entries = {"output.weight": (np.ones(256), [1])}
    entries |= {f"blk.{i}.nextn.eh_proj.weight": (np.ones(512), [1]) for i in range(4)}
    imatrix = write_imatrix(tmp_path / "i.gguf", entries)
    code, _, err = run("quantize", path("llama-gqa"), tmp_path / "out.gguf", "--imatrix", imatrix)
    said = "4 of 5 entries of importance are ignored, whose tensors the model does not have: "
    assert code == 0 and f"{said}blk.0.nextn.eh_proj.weight, " in err.replace("\n", " ")


def test_importance_matrices_of_other_tensors(tmp_path):
    sums, file = np.ones(256, np.float32), tmp_path / "i.gguf"
    metadata = {"general.architecture": "", "general.type": "imatrix"}
    jq.gguf.write(file, metadata, {"output.weight.in_sum2": sums})
    with pytest.raises(jq.GGUFError, match=r"'output.weight.counts': is missing, but sums"):
        models.read_imatrix(file)
    for wrong in (sums.astype(np.float16), jq.quantize(sums, "Q8_0")):
        jq.gguf.write(
            file, metadata, {"output.weight.in_sum2": wrong, "output.weight.counts": sums[:1]}
        )
        with pytest.raises(
            jq.GGUFError, match=r"'output.weight.in_sum2': must hold non-negative float32 numbers"
        ):
            models.read_imatrix(file)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (
            "/no/such.gguf",
            "out.gguf",
            "/no/such.gguf: no such file or folder; a model",
        ),
        (__file__, "out.gguf", "magic: expected b'GGUF'"),
        (path("llama-gqa"), "none/out.gguf", "none/out.gguf: No such file or directory"),
        (path("llama-gqa").parent, "out.gguf", r"holds \d+ models; name one: \S+\.gguf, "),
        (DATA, "out.gguf", "no model in this folder; a checkpoint folder holds config.json"),
        ("/no/such.safetensors", "out.gguf", "/no/such.safetensors: no such file or folder"),
    ],
)
def test_errors_are_one_line(run, tmp_path, source, target, message):
    code, out, err = run("quantize", source, tmp_path / target)
    assert (code, out) == (2, "") and re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_several_files(run, tmp_path):
    """Writes parts, which every command reads as one model and `quantize` accepts as input."""
    target, source = tmp_path / "out.gguf", path("llama-gqa")
    command = ("quantize", source, target, "--type", "Q8_0", "--split-max-size", "1M")
    code, out, err = run(*command)
    parts = sorted(tmp_path.glob("out-*.gguf"))
    assert (code, out, target.exists()) == (0, "", False) and len(parts) > 1
    assert f" in {len(parts)} files in " in err
    assert f"{sum(part.stat().st_size for part in parts):,} bytes" in err
    code, _, err = run(*command)
    assert (code, err) == (2, f"error: {parts[0]} already exists; --force replaces it\n")
    assert run(*command, "--force")[0] == 0

    [whole] = models.quantize_file(source, tmp_path / "whole.gguf", "Q8_0")
    code, out, _ = run("inspect", parts[0])
    assert code == 0 and f" bytes in {len(parts)} files: " in out and "split.count" not in out
    want, got = (models.named_tensors(models.load(file)) for file in (whole, parts[0]))
    for name, value in want.items():
        if isinstance(value, jq.QuantizedArray):
            assert value.to_gguf_bytes() == got[name].to_gguf_bytes(), name

    code, _, err = run("quantize", parts[0], target, "--split-max-size", "1M", "--force")
    assert (code, err) == (2, f"error: {parts[0]} is the input: choose another name\n")
    code, _, err = run("quantize", parts[0], tmp_path / "merged.gguf", "--type", "Q8_0")
    assert code == 0 and err.startswith(f"{sum(part.stat().st_size for part in parts):,} -> ")
    assert (tmp_path / "merged.gguf").read_bytes() == whole.read_bytes()
    for command in ("inspect", "generate", "perplexity"):
        more = {"inspect": [], "generate": ["-p", "a"], "perplexity": [__file__]}[command]
        code, _, err = run(command, parts[1], *more)
        assert code == 2 and f"this is part 2 of {len(parts)}; give '{parts[0]}'" in err


@pytest.mark.parametrize("size", ["0", "-1", "1.5G", "4K", "G", "", "9" * 13])
def test_a_size_of_parts_that_is_none(size, run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("quantize", path("llama-gqa"), tmp_path / "out.gguf", f"--split-max-size={size}")
    assert f"{size!r} must be a positive integer, with or without M or G" in capsys.readouterr().err


def test_types_of_tensors(run, tmp_path):
    target = tmp_path / "out.gguf"
    options = (
        "--output-type",
        "q8_0",
        "--embedding-type",
        "Q5_K",
        "--tensor-type",
        "attn_[kv]=q6_k",
    )
    assert run("quantize", path("llama-gqa"), target, *options)[0] == 0
    types = {n: info.type.name for n, info in jq.gguf.read_header(target).tensors.items()}
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q8_0", "Q5_K")
    assert types["blk.0.attn_k.weight"] == types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["blk.0.attn_q.weight"] == "Q4_K"


def test_a_dry_run_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("quantize", path("llama-gqa"), "--dry-run", "--type", "Q8_0")
    assert code == 0 and not list(tmp_path.iterdir())
    assert re.search(r"Q8_0 +│ +16 │ +[\d,]{7,} │", out)
    before = path("llama-gqa").stat().st_size
    assert re.fullmatch(
        rf"{before:,} bytes of files -> [\d,]+ bytes of weights, 8\.5\d bits per weight; "
        r"nothing was written\n",
        err.splitlines(keepends=True)[-1],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "the file to write is missing"),
        (("out", "--tensor-type", "attn_v=Q9"), "has type 'Q9'"),
        (("out", "--tensor-type", "nothing=Q8_0"), "'nothing' is found in no name"),
    ],
)
def test_bad_types(run, tmp_path, options, message):
    options = [tmp_path / option if option == "out" else option for option in options]
    code, _, err = run("quantize", path("llama-gqa"), *options)
    assert code == 2 and message in err


def test_a_type_needs_a_pattern(run, capsys):
    with pytest.raises(SystemExit):
        run("quantize", path("llama-gqa"), "out", "--tensor-type", "attn_v")
    assert "must be PATTERN=TYPE" in capsys.readouterr().err
