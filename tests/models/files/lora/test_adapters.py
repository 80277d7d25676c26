"""Adapters on packed weights: W x + scale * B (A x) equals (W + scale * B A) x."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.checkpoints import tensor_locations
from jax_q4k.models.files.lora import adapters
from jax_q4k.models.network.build import build

from ...adapters import ALPHA, CONFIG, RANK, random_pairs, write_gguf, write_peft
from ...checkpoints import halves
from ...golden_files import model, path

TOKENS = np.arange(5, 45, dtype=np.int32)[None]


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


def merged(given, pairs, scale):
    """The model with W replaced by W + scale * B A, in float32."""
    tensors = {
        name: jnp.asarray(t.dequantize() if isinstance(t, jq.QuantizedArray) else t)
        for name, t in models.named_tensors(given).items()
    }
    for name, (a, b) in pairs.items():
        added = b.astype(np.float64) @ a.astype(np.float64)
        tensors[name] = jnp.asarray(np.asarray(tensors[name], np.float64) + scale * added, "f4")
    return models.Model(build(given.config, tensors), given.tokenizer, given.metadata)


@pytest.mark.slow("converts and compiles models", quick=["qwen3-qknorm"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-qknorm", "gemma3", "smollm3"])
def test_logits_are_those_of_the_merged_weights(name, tmp_path):
    """Reads a GGUF file and a PEFT folder.

    They adapt attention, feed-forward networks, and the output matrix if there is one.
    """
    given = model(name)
    pairs = random_pairs(given)
    assert any(".ffn_down." in n for n in pairs) and any(".attn_q." in n for n in pairs)
    want = np.asarray(merged(given, pairs, 0.5 * ALPHA / RANK).logits(TOKENS))
    plain = np.asarray(given.logits(TOKENS))
    assert nmse(plain, want) > 1e-3
    peft = write_peft(tmp_path / "peft", given, pairs)
    for file in (
        write_gguf(tmp_path / "a.gguf", given, pairs),
        peft,
        peft / "adapter_model.safetensors",
    ):
        adapted = models.with_lora(given, file, scale=0.5)
        assert nmse(adapted.logits(TOKENS), want) <= 1e-10
    np.testing.assert_array_equal(given.logits(TOKENS), plain)  # the base model is unchanged


@pytest.mark.slow("converts and compiles models", quick=["phi3"])
@pytest.mark.parametrize(
    "name", ["phi3", "mixtral", "deepseek2-lite", "qwen35", "lfm2", "qwen2moe", "command-r"]
)
def test_other_architectures(name, tmp_path):
    """Adapts every matrix of the model except the experts."""
    given = model(name)
    pairs = random_pairs(given)
    want = merged(given, pairs, ALPHA / RANK).logits(TOKENS)
    adapted = models.with_lora(given, write_gguf(tmp_path / "a.gguf", given, pairs))
    assert nmse(adapted.logits(TOKENS), want) <= 1e-8  # a router may be near a tie


def test_modules_that_hold_several_matrices(tmp_path):
    """Phi 3's qkv_proj and gate_up_proj; GGUF files call them attn_qkv and ffn_up."""
    given, parts = model("phi3"), ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    pairs = random_pairs(given, parts)
    for names in (parts[:3], parts[3:]):  # one a per module
        for layer in range(given.config.num_layers):
            first, *others = (f"blk.{layer}.{name}.weight" for name in names)
            pairs |= {name: (pairs[first][0], pairs[name][1]) for name in others}
    want = merged(given, pairs, ALPHA / RANK).logits(TOKENS)
    peft = models.with_lora(given, write_peft(tmp_path / "peft", given, pairs))
    assert nmse(peft.logits(TOKENS), want) <= 1e-10
    whole = {}
    for layer in range(given.config.num_layers):
        for fused, names in (("attn_qkv", parts[:3]), ("ffn_up", parts[3:])):
            held = [pairs[f"blk.{layer}.{name}.weight"] for name in names]
            both = held[0][0], np.concatenate([b for _, b in held])
            whole[f"blk.{layer}.{fused}.weight"] = both
    adapted = models.with_lora(given, write_gguf(tmp_path / "a.gguf", given, whole))
    assert nmse(adapted.logits(TOKENS), want) <= 1e-10


def test_weights_stay_packed_and_are_shared(tmp_path):
    given = model("llama-gqa")
    pairs = random_pairs(given, ("attn_q",))
    adapted = models.with_lora(given, write_gguf(tmp_path / "a.gguf", given, pairs))
    before = {id(array) for array in given.weights}
    new = [array for array in adapted.weights if id(array) not in before]
    assert len(adapted.weights) == len(given.weights) + len(new)
    assert sum(array.size for array in new) == sum(a.size + b.size + 1 for a, b in pairs.values())


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_adapters_of_16_bits_are_computed_in_float32(dtype, tmp_path):
    given = model("llama-gqa")
    pairs = {
        name: tuple(np.asarray(x.astype(dtype), np.float32) for x in both)
        for name, both in random_pairs(given).items()
    }
    file = write_gguf(tmp_path / "a.gguf", given, pairs, dtype)
    want = merged(given, pairs, ALPHA / RANK).logits(TOKENS)
    assert nmse(models.with_lora(given, file).logits(TOKENS), want) <= 1e-10


@pytest.mark.slow("converts and compiles models")
def test_several_adapters_and_load(tmp_path):
    given = model("llama-gqa")
    first, second = (random_pairs(given, names, i) for i, names in enumerate((None, ("attn_v",))))
    files = [
        write_gguf(tmp_path / f"{i}.gguf", given, pairs) for i, pairs in enumerate((first, second))
    ]
    want = merged(merged(given, first, 2.0), second, -0.5 * 2.0).logits(TOKENS)
    loaded = models.load(path("llama-gqa"), lora=[files[0], (files[1], -0.5)])
    assert nmse(loaded.logits(TOKENS), want) <= 1e-10
    one = models.load(path("llama-gqa"), lora=str(files[0]))
    assert nmse(one.logits(TOKENS), merged(given, first, 2.0).logits(TOKENS)) <= 1e-10
    zero = models.load(path("llama-gqa"), lora=(files[0], 0))
    assert nmse(zero.logits(TOKENS), given.logits(TOKENS)) <= 1e-10
    for wrong in (5, (files[0],), [None], (5, 1.0)):
        with pytest.raises(TypeError, match="lora is .*; it must be a path, "):
            models.load(path("llama-gqa"), lora=wrong)


@pytest.mark.slow("converts and compiles models")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "lfm2"])
def test_generation_in_batches(name, tmp_path):
    """Paged decoding, alone and in a batch, gives the tokens of the merged model."""
    given = model(name)
    pairs = random_pairs(given)
    adapted = models.with_lora(given, write_gguf(tmp_path / "a.gguf", given, pairs))
    want = merged(given, pairs, ALPHA / RANK)
    prompts = [[5, 6, 7, 8], [9], list(range(20, 40))]
    got = [out.tokens for out in models.generate(adapted, prompts, max_new_tokens=12)]
    assert got == [out.tokens for out in models.generate(want, prompts, max_new_tokens=12)]
    assert got == [models.generate(adapted, p, max_new_tokens=12).tokens for p in prompts]
    assert got != [out.tokens for out in models.generate(given, prompts, max_new_tokens=12)]


@pytest.mark.slow("converts and compiles models")
def test_cached_programs_tell_adapters_apart(tmp_path):
    """Cached programs are keyed by the adapted matrices, not by the adapter's values."""
    from jax_q4k.cache.program_cache import ProgramCache

    given = models.load(path("llama-gqa"))
    pairs = [random_pairs(given, ("attn_q",), i) for i in range(2)]
    pairs += [random_pairs(given, ("attn_v",)), random_pairs(given)]
    files = [write_gguf(tmp_path / f"{i}.gguf", given, pair) for i, pair in enumerate(pairs)]
    adapted = [given, *(models.with_lora(given, file) for file in files)]
    names = [one.network.fingerprint() for one in adapted]
    assert names[1] == names[2] and len(set(names)) == 4
    kept = ProgramCache(tmp_path / "kept", 1 << 27)
    for one, pair in zip(adapted, [{}, *pairs], strict=True):
        want = models.generate(merged(given, pair, ALPHA / RANK), [5, 6, 7], max_new_tokens=8)
        for _ in range(2):  # compiled, then cached
            again = models.Model(one.parts(), one.tokenizer, one.metadata)
            again.kept = kept
            assert models.generate(again, [5, 6, 7], max_new_tokens=8).tokens == want.tokens


def test_matrices_of_one_shape_make_other_programs(tmp_path):
    given = models.load(path("llama-gqa"))
    files = [
        write_gguf(tmp_path / f"{name}.gguf", given, random_pairs(given, (name,)))
        for name in ("attn_k", "attn_v")
    ]
    keys, values = (models.with_lora(given, file) for file in files)
    assert [w.shape for w in keys.weights] == [w.shape for w in values.weights]
    assert keys.network.fingerprint() != values.network.fingerprint()


@pytest.mark.slow("converts and compiles models")
def test_gradients_and_saving(tmp_path):
    given = model("llama-gqa")
    adapted = models.with_lora(given, write_gguf(tmp_path / "a.gguf", given, random_pairs(given)))
    with pytest.raises(TypeError, match="is a AdaptedLinear; a GGUF file holds"):
        models.save_gguf(adapted, tmp_path / "m.gguf")
    weights = [w for w in adapted.weights if w.dtype == jnp.float32 and w.ndim == 2]

    def total(x):
        decoder = adapted.decoder()
        query = decoder.layers[0].attention.query
        query.a.set_value(x)
        return decoder(jnp.asarray(TOKENS)).sum()

    gradient = jax.grad(total)(adapted.decoder().layers[0].attention.query.a.get_value())
    assert weights and np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_adapters_of_the_example(tmp_path):
    """Named by paths in the decoder, transposed, with rows in the decoder's order."""
    given = model("llama-gqa")
    places = adapters.named_linears(given.config)
    pairs = random_pairs(given, ("attn_q", "attn_k", "attn_v", "attn_output"))
    tensors = {}
    for name, (a, b) in pairs.items():
        layer, place = places[name]
        tensors[f"layers.{layer}.{place}.lora_a"] = np.ascontiguousarray(a.T)
        tensors[f"layers.{layer}.{place}.lora_b"] = np.ascontiguousarray(b.T)
    save_file(tensors, tmp_path / "lora.safetensors")
    want = merged(given, pairs, 1.0).logits(TOKENS)
    adapted = models.with_lora(given, tmp_path / "lora.safetensors")
    assert nmse(adapted.logits(TOKENS), want) <= 1e-10
    for names, message in (
        ({"layers.0.attention.query.lora_a": (256, 2)}, "is present without its lora_b"),
        ({"layers.9.attention.query.lora_a": (256, 2)}, "matches no matrix of the model"),
        ({f"layers.{'9' * 5000}.attention.query.lora_a": (1, 1)}, "matches no matrix of the model"),
        ({"layers.0.attention.norm.lora_b": (256, 2)}, "matches no matrix of the model"),
    ):
        bad = {name: np.zeros(shape, np.float32) for name, shape in names.items()}
        save_file(bad, tmp_path / "bad.safetensors")
        with pytest.raises(jq.CheckpointError, match=message):
            models.with_lora(given, tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj": ALPHA, "x.q_proj": 9}}, ALPHA / RANK),
        ({"lora_alpha": 1, "alpha_pattern": {"roj": ALPHA}}, 1 / RANK),
        ({"r": 99, "rank_pattern": {"q_proj": RANK}}, ALPHA / RANK),  # the tensor sets the rank
    ],
)
def test_scales_of_peft(settings, scale, tmp_path):
    given = model("qwen3-qknorm")
    pairs = random_pairs(given, ("attn_q",))
    file = write_peft(tmp_path / "peft", given, pairs, CONFIG | settings)
    want = merged(given, pairs, scale).logits(TOKENS)
    assert nmse(models.with_lora(given, file).logits(TOKENS), want) <= 1e-10


def test_an_alpha_of_0_in_a_gguf_file_is_none(tmp_path):
    """llama.cpp treats 0 as missing."""
    given = model("llama-gqa")
    pairs = random_pairs(given, ("attn_q",))
    want = merged(given, pairs, 1.0).logits(TOKENS)
    for alpha in (np.float32(0), None):
        file = write_gguf(tmp_path / "a.gguf", given, pairs, adapter__lora__alpha=alpha)
        assert nmse(models.with_lora(given, file).logits(TOKENS), want) <= 1e-10


def test_adapters_of_mlx_lm(tmp_path):
    """Named by the checkpoint's modules, transposed, with one scale.

    The model is a llama, whose rows are permuted for rope.
    """
    given = model("llama-gqa")
    pairs = random_pairs(given)
    places = tensor_locations.locations(given.config, given.config.kind.checkpoints[0])
    expected, tensors = expected_tensors(given.config), {}
    for name, (a, b) in pairs.items():
        module, entry = places[name].names[0].removesuffix(".weight"), expected[name].entry
        b = halves(b, getattr(given.config, entry.rotated)) if entry.rotated else b
        tensors[f"{module}.lora_a"] = np.ascontiguousarray(a.T)
        tensors[f"{module}.lora_b"] = np.ascontiguousarray(b.T)
    save_file(tensors, tmp_path / "adapters.safetensors")
    described = tmp_path / "adapter_config.json"
    settings = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": 2.5}}
    described.write_text(json.dumps(settings))
    want = merged(given, pairs, 2.5).logits(TOKENS)
    assert nmse(models.with_lora(given, tmp_path).logits(TOKENS), want) <= 1e-10
    for bad, message in (
        ({"fine_tune_type": "dora"}, "fine_tune_type: must be 'lora', not 'dora'"),
        ({"lora_parameters": {}}, "lora_parameters.scale: is missing"),
        ({"lora_parameters": 3}, "lora_parameters: must be an object"),
        ({"lora_parameters": None}, "peft_type|lora_parameters"),
        ({"use_dora": True}, "use_dora: is True, which is not supported"),
        (
            {"lora_parameters": {"rank": RANK, "alpha": 2 * RANK, "scale": 1.0}},
            "lora_parameters.alpha: is 6 with rank=3: versions of mlx-lm differ",
        ),
        ({"lora_parameters": {"scale": "x"}}, "lora_parameters.scale: must be a number"),
    ):
        described.write_text(json.dumps(settings | bad))
        with pytest.raises(jq.CheckpointError, match=message):
            models.with_lora(given, tmp_path)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e7, True, "1"])
def test_scales_that_are_none(scale, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"scale={scale!r} must be a number")):
        models.with_lora(model("llama-gqa"), tmp_path / "a.gguf", scale=scale)
