"""An architecture is one data file: `fictitious` builds, saves, loads and generates correctly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.network.build import build

from .. import checkpoints, fictitious

pytestmark = pytest.mark.cpu_kernels

SHAPE = {
    "architecture": "fictitious",
    "vocab_size": 96,
    "context_length": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "norm_eps": 2.0**-17,
    "rope_theta": 10000.0,
    "rope_factor": 2.0,
    "window": 5,
    "local_rope_theta": 100.0,
    "attention_soft_cap": 2.0,
    "final_soft_cap": 1.5,
}
TOKENS = np.random.default_rng(3).integers(0, 96, (2, 24)).astype(np.int32)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "fictitious", fictitious.ARCHITECTURE)


@pytest.fixture
def arrays(registered):
    """Maps GGUF names to float32 weights."""
    rng = np.random.default_rng(4)
    weights = {}
    for name, expected in expected_tensors(Config(**SHAPE)).items():
        scale = expected.shape[-1] ** -0.5
        drawn = rng.standard_normal(expected.shape).astype(np.float32)
        if expected.required:
            weights[name] = 1 + 0.3 * drawn if len(expected.shape) == 1 else scale * drawn
    return weights


@pytest.fixture
def model(arrays):
    return models.Model(build(Config(**SHAPE), jax.tree.map(jnp.asarray, arrays)))


def definition(w, tokens):
    """Computes logits of the architecture in float64, from its description."""
    w = {name: np.asarray(array, np.float64) for name, array in w.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 2.0**-17) * w[f"{name}.weight"]

    def rotated(x, local):
        angle = 100.0 ** (-np.arange(16) / 16) if local else 1e4 ** (-np.arange(16) / 16) / 2
        turn = np.exp(1j * np.arange(len(x))[:, None, None] * angle)
        pairs = (x[..., :16] + 1j * x[..., 16:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def attention(x, layer):
        name, local, at = f"blk.{layer}.attn", layer % 2 == 0, np.arange(len(x))
        h = norm(x, f"{name}_norm")
        q, k, v = (
            (h @ w[f"{name}_{part}.weight"].T).reshape(len(x), -1, 32) for part in ("q", "k", "v")
        )
        q, k = rotated(norm(q, f"{name}_q_norm"), local), rotated(norm(k, f"{name}_k_norm"), local)
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * (256 / 4) ** -0.5
        scores = 2 * np.tanh(scores / 2)
        past = at[:, None] - at
        scores[:, (past < 0) | (local & (past >= 5))] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return out.reshape(len(x), -1) @ w[f"{name}_output.weight"].T

    def network(x, layer):
        name = f"blk.{layer}.ffn"
        h = norm(x, f"{name}_norm")
        gate, up = (h @ w[f"{name}_{part}.weight"].T for part in ("gate", "up"))
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return (gelu * up) @ w[f"{name}_down.weight"].T

    x = w["token_embd.weight"][tokens] * 16.0
    for layer in range(3):
        x = x + norm(attention(x, layer), f"blk.{layer}.post_attention_norm")
        x = x + norm(network(x, layer), f"blk.{layer}.post_ffw_norm")
    return 1.5 * np.tanh(norm(x, "output_norm") @ w["token_embd.weight"].T / 1.5)


def decoded(model, implementation, tokens):
    """Logits of a prompt of 9 tokens and of each token after it, with a paged cache."""
    with jq.implementation(implementation, activations="f32"):
        cache = PagedCache.create(model.config, len(tokens), tokens.shape[1])
        prompt = np.zeros((len(tokens), 16), np.int32)
        prompt[:, :9] = tokens[:, :9]
        prefill = jax.jit(lambda weights, *args: model.decoder(weights).prefill(*args))
        step = jax.jit(lambda weights, *args: model.decoder(weights).decode(*args))
        logits, cache = prefill(model.weights, prompt, np.full(len(tokens), 9, np.int32), cache)
        rows = [logits]
        for token in tokens[:, 9:].T:
            logits, cache = step(model.weights, token, cache)
            rows.append(logits)
        return np.stack(rows, axis=1)


@pytest.mark.slow("compiles several programs", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", pytest.param("native", marks=needs_native)])
def test_logits_are_the_definition(arrays, model, implementation):
    want = np.stack([definition(arrays, row) for row in TOKENS])
    with jq.implementation(implementation, activations="f32"):
        assert nmse(model.logits(TOKENS), want) <= 1e-10
    assert nmse(decoded(model, implementation, TOKENS), want[:, 8:]) <= 1e-10


@pytest.mark.slow("compiles a model for each fact", quick=["windowed-*", "final_soft_cap-*"])
@pytest.mark.parametrize(
    "fact, value",
    [
        ("windowed", lambda layer: False),
        ("local_rope_theta", None),
        ("activation", "silu"),
        ("embedding_scale", None),
        ("attention_scale", None),
        ("attention_soft_cap", None),
        ("final_soft_cap", None),
    ],
)
def test_every_fact_moves_the_logits(arrays, monkeypatch, fact, value):
    want = definition(arrays, TOKENS[0])
    other = dataclasses.replace(fictitious.ARCHITECTURE, **{fact: value})
    monkeypatch.setitem(ARCHITECTURES, "fictitious", other)
    shape = SHAPE | ({fact: value} if fact in SHAPE else {})
    config = Config.from_metadata(Config(**shape).to_metadata())
    changed = models.Model(build(config, jax.tree.map(jnp.asarray, arrays)))
    assert nmse(changed.logits(TOKENS[:1])[0, :, :], want) >= 1e-4


@pytest.mark.slow("compiles several programs")
@needs_native
def test_it_is_saved_quantized_loaded_and_generates(model, tmp_path):
    """The CPU kernels generate the same tokens as plain JAX."""
    quantized = models.quantize(model, "Q4_K_M")
    models.save_gguf(quantized, tmp_path / "fictitious.gguf")
    loaded = models.from_gguf(tmp_path / "fictitious.gguf")
    assert loaded.config == model.config
    for name, tensor in models.named_tensors(quantized).items():
        for got, want in zip(
            jax.tree.leaves(models.named_tensors(loaded)[name]),
            jax.tree.leaves(tensor),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)
    outputs, logits = [], []
    for implementation in ("xla", "native"):
        with jq.implementation(implementation, activations="f32"):
            outputs.append(models.generate(loaded, list(TOKENS), max_new_tokens=12))
            logits.append(loaded.logits(TOKENS))
    assert nmse(logits[1], logits[0]) <= 1e-10
    assert [output.tokens for output in outputs[0]] == [output.tokens for output in outputs[1]]
    assert len(outputs[0][0].tokens) == 12


@pytest.mark.slow("compiles several programs")
def test_simulated_kernels_give_the_reference(model):
    loaded, tokens = models.quantize(model, "Q4_K_M"), TOKENS[:1, :11]
    got, want = decoded(loaded, "sim", tokens), decoded(loaded, "xla", tokens)
    assert nmse(got, want) <= 1e-8


def test_it_is_loaded_from_a_checkpoint(arrays, model, tmp_path):
    config = Config(**SHAPE)
    described = checkpoints.config_json(config, "FictitiousForCausalLM")
    described["tie_word_embeddings"] = True
    assert described["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    stored = checkpoints.stored(arrays, config, config.kind.checkpoints[0])
    folder = checkpoints.write(tmp_path / "checkpoint", described, stored)
    loaded = models.from_pretrained(folder)
    assert loaded.config == config
    np.testing.assert_allclose(loaded.logits(TOKENS), model.logits(TOKENS), rtol=1e-4, atol=1e-4)
    described["layer_types"][1] = "sliding_attention"
    checkpoints.write(folder, described, stored)
    assert models.from_pretrained(folder).config.windowed_layers == (True, True, True)
