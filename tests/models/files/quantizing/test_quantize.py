import math
import os
import struct
import subprocess
import sys
import warnings

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Tensor
from gguf.constants import GGUFValueType as Value
from support.gguf_bytes import ALIGNMENT, build, entry, tensor, text_entry, u32
from support.helpers import nmse
from support.paths import TESTS

import jax_q4k as jq
from jax_q4k import models, quantizers
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.quantizing import recipes
from jax_q4k.models.network.build import build as build_decoder

from ...golden_files import model, path, reference


def floats(name, dtype=jnp.float32):
    """A golden model with float matrices."""
    tensors = {
        key: value.dequantize(dtype) if isinstance(value, jq.QuantizedArray) else value
        for key, value in models.named_tensors(model(name)).items()
    }
    return models.Model(build_decoder(model(name).config, tensors), metadata=model(name).metadata)


def fresh():
    """A model whose weights are on no format's grid."""
    config, rng = model("llama-gqa").config, np.random.default_rng(0)
    tensors = {
        key: jnp.asarray(
            rng.normal(size=value.shape) * 0.05 if value.ndim > 1 else value, jnp.float32
        )
        for key, value in models.named_tensors(model("llama-gqa")).items()
    }
    return models.Model(build_decoder(config, tensors))


def types(tensors):
    return {
        name: value.format if isinstance(value, jq.QuantizedArray) else str(value.dtype)
        for name, value in tensors.items()
    }


def changed(source, name, change):
    """The model with one tensor changed."""
    tensors = models.named_tensors(source)
    tensors[name] = change(tensors[name])
    return models.Model(build_decoder(source.config, tensors), metadata=source.metadata)


@pytest.mark.slow("converts and compiles models", quick=["qwen3-qknorm"])
@pytest.mark.parametrize("name", ["llama3-rope", "qwen2-odd", "qwen3-qknorm"])
def test_matrices_become_what_the_quantizers_make_of_them(name):
    original = floats(name)
    quantized = models.quantize(original, "Q4_K_M")
    got, want = models.named_tensors(quantized), models.named_tensors(model(name))
    assert types(got) == types(want)  # llama.cpp's choice
    for key, value in models.named_tensors(original).items():
        if isinstance(got[key], jq.QuantizedArray):
            blocks = quantizers.quantize(np.asarray(value), got[key].format)
            assert got[key].to_gguf_bytes() == blocks.tobytes(), key
        else:
            np.testing.assert_array_equal(got[key], value)
    assert quantized.config == original.config
    tokens = reference(name).tokens[None, :32]
    assert nmse(quantized.logits(tokens), original.logits(tokens)) <= 1e-2


@pytest.mark.slow("converts and compiles models")
def test_larger_types_are_closer():
    original, tokens = fresh(), reference("llama-gqa").tokens[None, :16]
    want, found = original.logits(tokens), []
    for type in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"):
        quantized = models.quantize(original, type)
        assert quantized.metadata["general.file_type"] == recipes.file_type(type)
        found.append(
            (nmse(quantized.logits(tokens), want), -sum(leaf.nbytes for leaf in quantized.weights))
        )
    assert found == sorted(found) and found[-1][0] <= 0.3, found


def test_packed_weights_are_kept_or_quantized_again():
    original = model("llama-gqa")
    again, before = (
        models.named_tensors(models.quantize(original, "Q4_K_M")),
        models.named_tensors(original),
    )
    for name, value in before.items():
        jax.tree.map(np.testing.assert_array_equal, again[name], value)
    other = models.named_tensors(models.quantize(original, "Q8_0"))
    for name, value in other.items():
        if isinstance(value, jq.QuantizedArray):
            decoded = np.asarray(before[name].dequantize())
            assert value.to_gguf_bytes() == quantizers.quantize(decoded, "Q8_0").tobytes(), name


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_packed_weights_become_floats(type, recwarn):
    before = models.named_tensors(model("llama-gqa"))
    decoded = models.quantize(model("llama-gqa"), type)
    assert not recwarn and decoded.metadata["general.file_type"] == recipes.file_type(type)
    for name, value in models.named_tensors(decoded).items():
        want = before[name]
        if isinstance(want, jq.QuantizedArray):
            want = want.dequantize()
        dtype = {"F16": jnp.float16, "BF16": jnp.bfloat16}.get(type, jnp.float32)
        want = np.asarray(want, dtype if value.ndim > 1 else np.float32)
        assert value.dtype == want.dtype, name
        np.testing.assert_array_equal(value, want, err_msg=name)


def odd():
    """A small bfloat16 model whose rows have 48, 64 and 40 weights."""
    config = models.Config("llama", 24, 64, 48, 40, 1, 2, 1, 32, 1e-5)
    rng = np.random.default_rng(1)
    tensors = {
        name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for name, (shape, required, *_) in expected_tensors(config).items()
        if required
    }
    return models.Model(build_decoder(config, tensors))


def test_rows_of_an_odd_length_become_f16():
    tensors = models.named_tensors(odd())
    quantized = models.named_tensors(models.quantize(odd(), "Q4_K_M"))
    assert quantized["blk.0.attn_q.weight"].dtype == jnp.float16  # k is 48
    assert quantized["blk.0.attn_output.weight"].format == "Q5_0"  # k is 64
    np.testing.assert_array_equal(
        quantized["blk.0.attn_q.weight"], tensors["blk.0.attn_q.weight"].astype(jnp.float16)
    )
    assert quantized["blk.0.attn_norm.weight"].dtype == jnp.float32


@pytest.mark.filterwarnings("error", "ignore:.*not a multiple of their type's block:UserWarning")
def test_weights_beyond_f16_are_named(monkeypatch):
    bad = changed(odd(), "blk.0.attn_q.weight", lambda x: x.at[9, 7].set(7e4))
    message = (
        r"tensor 'blk.0.attn_q.weight', rows from {} on: "
        r"w\[{}, 7\] is 70144.0; F16 takes finite values of magnitude up to 65504"
    )
    with pytest.raises(ValueError, match=message.format(0, 9)):
        models.quantize(bad, "Q4_K_M")
    monkeypatch.setattr(sys.modules["jax_q4k.models.files.quantizing.quantize"], "_PIECE", 8 * 48)
    with pytest.raises(ValueError, match=message.format(8, 1)):
        models.quantize(bad, "Q4_K_M")


@pytest.mark.slow("converts and compiles models")
def test_importance_reaches_the_quantizer():
    original = fresh()
    weights = np.random.default_rng(2).uniform(0.01, 10, 256).astype(np.float32)
    name = "blk.0.attn_q.weight"
    with pytest.warns(UserWarning, match=r"importance has no weights for \d+ of \d+ matrices.*blk"):
        got = models.named_tensors(models.quantize(original, "Q4_K_M", {name: weights}))
    rows = np.asarray(models.named_tensors(original)[name])
    assert got[name].to_gguf_bytes() == quantizers.quantize(rows, "Q4_K", weights).tobytes()
    assert got[name].to_gguf_bytes() != quantizers.quantize(rows, "Q4_K").tobytes()


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (
            {"blk.0.attn_q": np.ones(256)},
            "importance names 'blk.0.attn_q', which is not a tensor of the model",
        ),
        (
            {"output.weight": np.ones(255)},
            r"importance of 'output.weight' has shape \(255,\); it must be \(256,\)",
        ),
        ({"output.weight": -np.ones(256)}, "tensor 'output.weight', rows from 0 on: importance"),
        (
            {"output.weight": np.full(256, np.nan)},
            "tensor 'output.weight', rows from 0 on: importance",
        ),
    ],
)
def test_bad_importance_is_named(importance, message):
    with pytest.raises(ValueError, match=message):
        models.quantize(floats("llama-gqa"), "Q4_K_M", importance)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            jnp.nan,
            r"tensor 'blk.1.ffn_up.weight', rows from 0 on: w\[700, 9\] is nan; Q4_K takes finite",
        ),
        (-jnp.inf, r"tensor 'blk.1.ffn_up.weight', rows from 0 on: w\[700, 9\] is -inf"),
        # no f16 scale is large enough
        (
            1e30,
            r"tensor 'blk.1.ffn_up.weight', rows from 0 on: w\[700, 9\] is 1.*e\+30",
        ),
    ],
)
def test_weights_that_no_type_holds_are_named(value, message):
    bad = changed(floats("llama-gqa"), "blk.1.ffn_up.weight", lambda x: x.at[700, 9].set(value))
    with pytest.raises(ValueError, match=message):
        models.quantize(bad, "Q4_K_M")


def test_a_norm_that_is_nan_is_named():
    bad = changed(floats("llama-gqa"), "output_norm.weight", lambda x: x.at[7].set(jnp.nan))
    with pytest.raises(
        ValueError,
        match=r"tensor 'output_norm.weight', rows from 0 on: w\[0, 7\] is nan; F32 takes",
    ):
        models.quantize(bad, "Q8_0")


def test_unknown_types_list_the_known():
    with pytest.raises(ValueError, match="type='Q2_K_L' must be one of IQ1_S, IQ1_M"):
        models.quantize(model("llama-gqa"), "Q2_K_L")
    with pytest.raises(ValueError, match="type='Q2_K_L' must be one of IQ1_S, IQ1_M"):
        models.quantize_file(path("llama-gqa"), "/no/such/folder/out.gguf", "Q2_K_L")


@pytest.mark.slow("converts and compiles models", quick=["bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_files_are_quantized_like_models(dtype, tmp_path):
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    original = floats("qwen2-odd", dtype)
    models.save_gguf(original, source)
    calls = []
    models.quantize_file(source, target, "Q4_K_M", progress=lambda *call: calls.append(call))
    want = models.quantize(original, "Q4_K_M")
    got = jq.gguf.read(target)
    assert dict(got.metadata) == dict(want.metadata)
    for name, value in models.named_tensors(want).items():
        jax.tree.map(np.testing.assert_array_equal, got.tensors[name], value)
    assert calls[-1][0] == calls[-1][1] == sum(info.nbytes for info in got.header.tensors.values())
    assert [t.name for t in gguf.GGUFReader(target).tensors] == list(got.tensors)


@pytest.mark.slow("quantizes a model several times")
def test_the_result_does_not_depend_on_the_pieces(monkeypatch):
    original = floats("llama-gqa")
    whole = models.named_tensors(models.quantize(original, "Q4_K_M"))
    monkeypatch.setattr(
        sys.modules["jax_q4k.models.files.quantizing.quantize"], "_PIECE", 100 * 256
    )
    for name, value in models.named_tensors(models.quantize(original, "Q4_K_M")).items():
        jax.tree.map(np.testing.assert_array_equal, value, whole[name])


def test_rows_longer_than_a_piece(monkeypatch):
    whole = models.named_tensors(models.quantize(odd(), "Q4_K_M"))
    monkeypatch.setattr(sys.modules["jax_q4k.models.files.quantizing.quantize"], "_PIECE", 10)
    for name, value in models.named_tensors(models.quantize(odd(), "Q4_K_M")).items():
        jax.tree.map(np.testing.assert_array_equal, value, whole[name])


def test_the_tokenizer_stays():
    quantized = models.quantize(model("text-spm"), "Q4_K_M")
    assert quantized.tokenizer is model("text-spm").tokenizer
    assert quantized.metadata == model("text-spm").metadata


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-100], "tensor .*: offset"),
        (
            lambda data: data[:300],
            "tensor count: 21 entries of at least 25 bytes are more than the 276 bytes left",
        ),
        (lambda data: b"GGML" + data[4:], "magic: expected b'GGUF'"),
        (
            lambda data: data.replace(b"llama.block_count", b"llama.block_xount"),
            "llama.block_count: is missing",
        ),
        (
            lambda data: data.replace(b"blk.1.ffn_up", b"blk.7.ffn_up"),
            "'blk.1.ffn_up.weight': is missing",
        ),
        (
            lambda data: data[:-4] + b"\x00\x00\xc0\x7f",
            "tensor 'output.weight': element 131071 is NaN",
        ),
    ],
)
def test_damaged_files_leave_nothing(damage, message, tmp_path):
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    models.save_gguf(floats("llama-gqa"), source)
    source.write_bytes(damage(source.read_bytes()))
    with pytest.raises(jq.GGUFError, match=f"source.gguf: .*{message}"):
        models.quantize_file(source, target, "Q4_K_M")
    assert os.listdir(tmp_path) == ["source.gguf"]


def write_zeros(file, config):
    """Writes a float16 model of zeros as a sparse file; returns its tensor bytes."""
    tensors, size = [], 0
    for name, (shape, required, *_) in expected_tensors(config).items():
        if required:
            kind = Tensor.F32 if len(shape) == 1 else Tensor.F16
            tensors.append(tensor(name, list(reversed(shape)), kind, size))
            nbytes = math.prod(shape) * (4 if len(shape) == 1 else 2)
            size += nbytes + -nbytes % ALIGNMENT
    metadata = config.to_metadata()
    entries = [text_entry(key, value) for key, value in metadata.items() if isinstance(value, str)]
    entries += [
        entry(key, Value.UINT32, u32(value))
        for key, value in metadata.items()
        if isinstance(value, int)
    ]
    reals = {
        key: struct.pack("<f", value) for key, value in metadata.items() if isinstance(value, float)
    }
    header = build(
        entries + [entry(key, Value.FLOAT32, value) for key, value in reals.items()], tensors
    )
    file.write_bytes(header)
    os.truncate(file, len(header) + size)
    return size


@pytest.mark.slow("converts a model of 340 MB")
def test_memory_is_one_tensors_not_the_models(tmp_path, record_property):
    """Peak memory stays below 12 bytes per weight of the largest tensor plus 300 MB.

    The 300 MB cover the interpreter and XLA. Flax, whose import takes as long as many a
    conversion, is not imported.

    Pages of library files (about 170 to 220 MB, mostly XLA's code) are not counted, since the
    system can drop them any time.
    """
    config = models.Config("llama", 16384, 512, 1024, 16384, 3, 16, 4, 64, 1e-5)
    size = write_zeros(tmp_path / "in.gguf", config)
    program = """
import sys
from jax_q4k.models import cli
code = cli.main(["quantize", "in.gguf", "out.gguf", "--type", "Q4_K_M"])
status = dict(line.split(":") for line in open("/proc/self/status"))
print(code, *(int(status[key].split()[0]) for key in ("VmHWM", "RssFile")))
assert "flax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    code, peak, libraries = (int(part) for part in done.stdout.split())
    limit = 12 * config.hidden_size * config.intermediate_size + 300e6
    total, mapped = (f"{kilobytes * 1024 / 1e6:.0f} MB" for kilobytes in (peak, libraries))
    figures = f"{total}, of it {mapped} libraries, limit {limit / 1e6:.0f} MB"
    record_property("figure", f"quantize to Q4_K_M: peak memory {figures}")
    assert code == 0 and size > 340e6  # loading all of it would be visible
    assert (peak - libraries) * 1024 <= limit
    written = jq.gguf.read_header(tmp_path / "out.gguf").tensors
    assert written["blk.2.ffn_up.weight"].type is Tensor.Q4_K


@pytest.mark.slow("converts and compiles models", quick=["Q4_K_M"])
@pytest.mark.parametrize("type", ["Q4_K_M", "MXFP4_MOE"])
def test_experts_are_quantized_one_after_another(type, monkeypatch):
    """Quantizing one expert at a time gives the same model, close to the original."""
    whole = models.quantize(model("granitemoe"), type)
    monkeypatch.setattr("jax_q4k.models.files.quantizing.quantize._PIECE", 1)
    pieces = models.quantize(model("granitemoe"), type)
    for name, expected in models.named_tensors(whole).items():
        leaves = jax.tree.leaves(models.named_tensors(pieces)[name])
        for got, want in zip(leaves, jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(got, want)
    kinds = {t.format for n, t in models.named_tensors(whole).items() if "_exps" in n}
    assert kinds == ({"MXFP4"} if type == "MXFP4_MOE" else {"Q4_K", "Q6_K"})
    prompt = reference("granitemoe").prompt[None]
    assert nmse(whole.logits(prompt), model("granitemoe").logits(prompt)) <= 0.2


def test_warnings_about_other_types(tmp_path):
    """Warns about rows that no block divides and about quantized tensors, but not about floats."""
    odd = path("qwen2-odd")
    with pytest.warns(UserWarning) as caught:
        models.quantize_file(odd, tmp_path / "odd.gguf", "Q6_K")
    assert [str(warning.message) for warning in caught] == [
        "13 of 26 tensors have rows that are not a multiple of their type's block, and get another "
        "type: 13 Q6_K -> Q8_0",
        "12 tensors are already quantized (1 Q4_K, 11 Q5_0): quantizing them again adds "
        "error; start from a float model if there is one",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.warns(UserWarning, match=r"43 tensors are already quantized \(38 Q4_K, 5 Q6_K\)"):
        models.quantize(models.load("demo"), "Q8_0")
    folder, file = TESTS / "data" / "checkpoints" / "llama", tmp_path / "floats.gguf"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.quantize_file(folder, file, "Q8_0")
    with pytest.warns(UserWarning, match=r"^importance has no weights for \d+ of \d+ ma") as caught:
        models.quantize_file(folder, file, "Q8_0", {"blk.0.attn_q.weight": np.ones(32)})
    assert caught[0].filename == __file__
