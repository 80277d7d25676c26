import gc
import types
import weakref

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.gguf.header import parse_source
from jax_q4k.models.config.tensors import check_tensors, expected_tensors
from jax_q4k.models.files.gguf import describe
from jax_q4k.models.network.build import build
from jax_q4k.models.network.layers import RMSNorm

from ..golden_files import NAMES, model, path


def shapes(name):
    """Maps names of a golden file's tensors to objects with a shape."""
    return {
        tensor.name: types.SimpleNamespace(shape=tuple(tensor.shape[::-1].tolist()))
        for tensor in gguf.GGUFReader(path(name)).tensors
    }


@pytest.mark.parametrize("name", NAMES)
def test_weights_stay_packed(name):
    file = jq.gguf.read(path(name))
    decoder = model(name).decoder()
    weight = decoder.layers[1].attention.value.weight.get_value()
    assert isinstance(weight, jq.QuantizedArray)
    assert weight.to_gguf_bytes() == file.tensors["blk.1.attn_v.weight"].to_gguf_bytes()
    assert decoder.embedding.get_value().format == file.tensors["token_embd.weight"].format
    assert (decoder.output is None) == ("output.weight" not in file.tensors)
    packed = sum(tensor.nbytes for tensor in file.tensors.values())
    assert sum(leaf.nbytes for leaf in model(name).weights) <= packed + 1024  # the rope frequencies


def test_the_decoder_is_an_nnx_module_tree():
    decoder = model("qwen3-qknorm").decoder()
    graph, state = nnx.split(decoder)
    again = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    tokens = jnp.arange(8)[None]
    np.testing.assert_array_equal(
        jax.jit(lambda: decoder(tokens))(), jax.jit(lambda: again(tokens))()
    )
    paths = {"/".join(map(str, entry)) for entry, _ in nnx.to_flat_state(state)}
    assert "layers/0/attention/q_norm/weight" in paths and "layers/1/mlp/down/weight" in paths


def test_progress_and_no_tokenizer():
    calls = []
    loaded = models.from_gguf(
        path("llama-gqa"), progress=lambda done, total: calls.append((done, total))
    )
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] > 1_000_000
    assert loaded.tokenizer is None and loaded.config.vocab_size == 512
    assert "llama, 2 layers" in repr(loaded)


def test_a_model_goes_with_the_last_reference():
    """Frees the model without the garbage collector, since two models may not fit in memory."""
    gc.disable()
    try:
        loaded = models.from_gguf(path("llama-gqa"))
        models.generate(loaded, [1, 2, 3], max_new_tokens=2)
        loaded.logits([[1, 2]])
        weak = weakref.ref(loaded)
        del loaded
        assert weak() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("exact")
def test_float_weights_give_the_logits_of_the_packed_ones():
    file = jq.gguf.read(path("qwen2-odd"))
    tensors = {
        name: tensor.dequantize()
        if isinstance(tensor, jq.QuantizedArray)
        else tensor.astype(jnp.float16)
        for name, tensor in file.tensors.items()
    }
    tensors["blk.0.attn_norm.weight"] = file.tensors["blk.0.attn_norm.weight"]
    tensors = {
        name: file.tensors[name] if tensor.dtype == jnp.float16 else tensor
        for name, tensor in tensors.items()
    }
    config = model("qwen2-odd").config
    got = models.Model(build(config, tensors)).logits([[1, 2, 3]])
    np.testing.assert_allclose(got, model("qwen2-odd").logits([[1, 2, 3]]), rtol=1e-4, atol=1e-4)


def test_every_expected_tensor_that_is_required_is_missed():
    config, tensors = model("qwen2-bias").config, shapes("qwen2-bias")
    check_tensors(config, tensors, "f")
    for name, (_, required, *_) in expected_tensors(config).items():
        rest = {key: value for key, value in tensors.items() if key != name}
        if required:
            with pytest.raises(
                jq.GGUFError, match=f"f: tensor '{name}': is missing, expected with shape"
            ):
                check_tensors(config, rest, "f")
        else:
            check_tensors(config, rest, "f")


@pytest.mark.parametrize("name", list(shapes("qwen3-qknorm")))
def test_every_wrong_shape_is_refused(name):
    config, tensors = model("qwen3-qknorm").config, shapes("qwen3-qknorm")
    shape = tensors[name].shape
    tensors[name] = types.SimpleNamespace(shape=(*shape[:-1], shape[-1] + 256))
    with pytest.raises(jq.GGUFError) as caught:
        check_tensors(config, tensors, "f")
    assert f"tensor '{name}': has shape {tensors[name].shape}, expected {shape}" in str(
        caught.value
    )


def test_unknown_tensors_are_refused():
    config, tensors = model("llama-gqa").config, shapes("llama-gqa")
    with pytest.raises(jq.GGUFError, match="'blk.2.attn_q.weight': is not part of a llama model"):
        check_tensors(
            config, tensors | {"blk.2.attn_q.weight": tensors["blk.1.attn_q.weight"]}, "f"
        )
    tied = {key: value for key, value in tensors.items() if key != "output.weight"}
    with pytest.raises(jq.GGUFError, match="'output.bias': is present without"):
        check_tensors(config, tied | {"output.bias": types.SimpleNamespace(shape=(512,))}, "f")


def test_metadata_that_disagrees_is_found_before_tensors_are_read(tmp_path, monkeypatch):
    data = bytearray(path("llama-gqa").read_bytes())
    key = b"llama.feed_forward_length"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (512).to_bytes(4, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    monkeypatch.setattr(jq.gguf.load.Source, "read_into", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(
        jq.GGUFError, match=r"bad.gguf: tensor 'blk.0.ffn_gate.weight': has shape \(768, 256\)"
    ):
        models.from_gguf(bad)


def test_vocabulary_of_another_size(tmp_path):
    data = bytearray(path("text-spm").read_bytes())
    key = b"llama.vocab_size"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (32001).to_bytes(4, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(jq.GGUFError, match="32000"):
        models.from_gguf(bad)


def test_tokenizer_of_another_model():
    header, other = (jq.gguf.read_header(path(name)) for name in ("llama-gqa", "text-spm"))
    vocabulary = {
        key: value for key, value in other.metadata.items() if key.startswith("tokenizer.")
    }
    with pytest.raises(
        jq.GGUFError, match="f: tokenizer.ggml.tokens: has 32000 tokens, but .* vocab_size is 512"
    ):
        describe({**header.metadata, **vocabulary}, header.tensors, "f")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        models.from_gguf(tmp_path / "none.gguf")


def test_the_header_is_parsed_once(monkeypatch):
    """The file that is loaded is the one that was checked, and a vocabulary is decoded once."""
    calls = []
    monkeypatch.setattr(
        jq.gguf.parts, "parse_source", lambda source: calls.append(source) or parse_source(source)
    )
    models.from_gguf(path("llama-gqa"))
    assert len(calls) == 1


@pytest.mark.parametrize("name", NAMES)
def test_named_tensors_are_the_files(name):
    file, named = jq.gguf.read(path(name)), models.named_tensors(model(name))
    assert set(named) == set(file.tensors)
    for key, tensor in file.tensors.items():
        assert jax.tree.structure(named[key]) == jax.tree.structure(tensor), key
        jax.tree.map(np.testing.assert_array_equal, named[key], tensor)


def test_an_adapter_has_no_place_in_a_file():
    decoder = model("llama-gqa").decoder()
    attention = decoder.layers[1].attention
    attention.query = nnx.LoRA(256, 2, 256, base_module=attention.query, rngs=nnx.Rngs(0))
    adapted = models.Model(decoder)
    for use in (models.named_tensors, lambda model: models.quantize(model, "Q8_0")):
        with pytest.raises(
            TypeError,
            match="blk.1.attn_q is a LoRA; a GGUF file holds what Linear and RMSNorm hold",
        ):
            use(adapted)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("attention.q_norm", "attn_q_norm"),
        ("attention.k_norm", "attn_k_norm"),
        ("attention.post_norm", "post_attention_norm"),
        ("mlp.post_norm", "post_ffw_norm"),
    ],
)
def test_a_norm_that_the_architecture_has_not_is_not_left_out(tmp_path, place, name):
    """A file without it would describe another decoder."""
    decoder = model("llama-gqa").decoder()
    owner, _, attribute = place.partition(".")
    norm = RMSNorm(jnp.ones(32 if name in ("attn_q_norm", "attn_k_norm") else 256), 1e-5)
    setattr(getattr(decoder.layers[0], owner), attribute, nnx.data(norm))
    changed = models.Model(decoder)
    assert f"blk.0.{name}.weight" in models.named_tensors(changed)
    for use in (
        lambda: models.save_gguf(changed, tmp_path / "saved.gguf"),
        lambda: models.quantize(changed, "Q8_0"),
    ):
        with pytest.raises(
            jq.GGUFError, match=f"tensor 'blk.0.{name}.weight': is not part of a llama model"
        ):
            use()
    assert not (tmp_path / "saved.gguf").exists()


@pytest.mark.parametrize("check_scales", [True, False])
def test_scales_are_checked_unless_told_not_to(tmp_path, check_scales):
    """A NaN scale is refused, or reaches the weights if the check is off."""
    raw = jq.gguf.read(path("llama-gqa")).tensors["blk.0.ffn_up.weight"].to_gguf_bytes()
    data = path("llama-gqa").read_bytes()
    at = data.index(raw[:144])
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data[:at] + b"\x00\x7e" + data[at + 2 :])
    if check_scales:
        with pytest.raises(jq.GGUFError, match="blk.0.ffn_up.weight"):
            models.from_gguf(bad)
    else:
        loaded = models.from_gguf(bad, check_scales=False)
        assert np.isnan(loaded.decoder().layers[0].mlp.up.weight.get_value().dequantize()).any()
