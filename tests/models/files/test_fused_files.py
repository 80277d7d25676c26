"""Files with fused tensors that hold the rows of several, including biases and experts."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.gguf import TensorPieces

from .. import golden_files

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 7]])


def written(path: Path, metadata: dict, tensors: dict) -> Path:
    """Writes a file of tensors, some of them as TensorPieces."""
    pieces = {
        name: tensor if isinstance(tensor, TensorPieces) else TensorPieces.of(name, tensor)
        for name, tensor in tensors.items()
    }
    jq.gguf.write(path, metadata, pieces)
    return path


def beside_each_other(first: object, second: object) -> object:
    """Concatenates the rows of both, expert by expert."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def test_gate_and_up_of_experts_and_their_biases(tmp_path):
    source = golden_files.path("gpt-oss-mxfp4")
    file = jq.gguf.read(source)
    tensors = dict(file.tensors)
    for layer in range(models.from_gguf(source).config.num_layers):
        for suffix in ("weight", "bias"):
            gate, up = (tensors.pop(f"blk.{layer}.ffn_{w}_exps.{suffix}") for w in ("gate", "up"))
            if jq.is_quantized(gate):
                planes = [
                    beside_each_other(a, b) for a, b in zip(gate.planes, up.planes, strict=True)
                ]
                shape = (gate.shape[0], 2 * gate.shape[1], gate.shape[2])
                both = jq.QuantizedArray(gate.format, shape, planes)
            else:
                both = beside_each_other(gate, up)
            tensors[f"blk.{layer}.ffn_gate_up_exps.{suffix}"] = both
    fused = models.from_gguf(written(tmp_path / "fused.gguf", file.metadata, tensors))
    want = models.from_gguf(source).logits(TOKENS)
    np.testing.assert_array_equal(fused.logits(TOKENS), want)


def of_blocks(values: np.ndarray) -> TensorPieces:
    """A vector in Q8_0."""
    packed = jq.quantize(jnp.asarray(values)[None], "Q8_0")
    return TensorPieces("Q8_0", values.shape, lambda: iter([packed.to_gguf_bytes()]))


def test_a_bias_in_blocks(tmp_path):
    file = jq.gguf.read(golden_files.path("qwen2-fused"))
    floats, blocks = dict(file.tensors), dict(file.tensors)
    for name, bias in file.tensors.items():
        if name.endswith("attn_qkv.bias"):
            blocks[name] = of_blocks(np.asarray(bias, np.float32))
            floats[name] = jq.quantize(bias[None], "Q8_0").dequantize()[0]
    got, want = (
        models.from_gguf(written(tmp_path / name, file.metadata, tensors)).logits(TOKENS)
        for name, tensors in (("blocks", blocks), ("floats", floats))
    )
    np.testing.assert_array_equal(got, want)


def test_blocks_that_hold_elements_of_two_tensors_are_refused(tmp_path):
    file = jq.gguf.read(golden_files.path("qwen2-fused"))
    bias = "blk.0.attn_qkv.bias"
    size = file.tensors[bias].shape[0]
    assert size == 512  # 256 + 128 + 128
    pieces = TensorPieces("Q4_K", (size,), lambda: iter([bytes(size // 256 * 144)]))
    path = written(tmp_path / "q4_k.gguf", file.metadata, file.tensors | {bias: pieces})
    with pytest.raises(jq.GGUFError, match=rf"'{bias}': holds .* elements in blocks of 256"):
        models.from_gguf(path)


def test_a_whole_in_a_layer_that_has_some_of_its_parts_is_refused(tmp_path):
    """The layer has its own queries, but keys and values of another layer."""
    file = jq.gguf.read(golden_files.path("gemma4-e"))
    layer = models.from_gguf(golden_files.path("gemma4-e")).config.num_layers - 1
    names = [f"blk.{layer}.attn_{part}.weight" for part in ("q", "k", "qkv")]
    assert [name in file.tensors for name in names] == [True, False, False]
    tensors = {names[2] if n == names[0] else n: tensor for n, tensor in file.tensors.items()}
    path = written(tmp_path / "extra.gguf", file.metadata, tensors)
    with pytest.raises(jq.GGUFError, match=f"'{names[0]}': is missing"):
        models.from_gguf(path)


@pytest.mark.slow("quantizes a model three times", quick=["qwen2-fused"])
@pytest.mark.parametrize("name", ["qwen2-fused", "phi3"])
@pytest.mark.filterwarnings("ignore:.*(already quantized|no weights)")
def test_importance_by_fused_names_and_by_those_of_parts(name):
    """Importance matrices of llama.cpp name the tensors of the file that they were made from."""
    model = models.from_gguf(golden_files.path(name))
    parts = [f"blk.0.attn_{part}.weight" for part in "qkv"]
    weights = np.random.default_rng(0).random(model.config.hidden_size, np.float32) + 0.01

    def quantized(importance):
        tensors = models.named_tensors(models.quantize(model, "Q4_0", importance))
        return [tensors[part].to_gguf_bytes() for part in parts]

    by_parts = quantized(dict.fromkeys(parts, weights))
    for got, want in zip(quantized({"blk.0.attn_qkv.weight": weights}), by_parts, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, plain in zip(by_parts, quantized(None), strict=True):
        assert not np.array_equal(got, plain)
