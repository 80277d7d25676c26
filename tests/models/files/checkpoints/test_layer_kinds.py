"""Checkpoints with windows in any layers, with layers without rope, and with heads of any size.

tests/data/checkpoints/layers.json and layers.npz hold config.json, shapes and logits of
transformers 5.24.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files.checkpoints import config_json
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.support import json_fields

from ... import checkpoints
from ...engine.engine_runs import exactly, prompts_of, tokens_of

pytestmark = needs_native

DATA = GOLDEN.parent / "checkpoints"
CASES = json.loads((DATA / "layers.json").read_text())
VISION = "ignore:.* tensors are skipped, which text generation does not use. images"


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


@functools.cache
def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens (time,) and transformers' logits (time, vocab_size)."""
    with np.load(DATA / "layers.npz") as arrays:
        return arrays["tokens"], arrays[name]


def tensors(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        key: (rng.integers(-64, 65, shape) / np.float32(128)).astype(np.float32)
        for key, shape in CASES[name]["tensors"].items()
    }


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Returns a function from a case's name to its model."""

    @functools.cache
    def load(name: str) -> models.Model:
        folder = tmp_path_factory.mktemp("model") / name
        checkpoints.write(folder, CASES[name]["config"], tensors(name))
        return models.from_pretrained(folder)

    return load


@pytest.mark.slow("compiles a model", quick=["qwen2", "smollm3", "heads-24-gemma3", "heads-4"])
@pytest.mark.filterwarnings(VISION)
@pytest.mark.parametrize("name", CASES)
def test_logits(name, loaded, tmp_path):
    """Compares the checkpoint with transformers, and the GGUF file made from it."""
    tokens, want = reference(name)
    got = loaded(name)
    logits = got.logits(tokens[None])
    assert nmse(logits[0], want) <= 1e-8
    models.save_gguf(got, tmp_path / "model.gguf")
    again = models.from_gguf(tmp_path / "model.gguf")
    assert again.config == got.config
    np.testing.assert_array_equal(again.logits(tokens[None]), logits)


@pytest.mark.slow("compiles two programs a model", quick=["qwen2", "heads-24-gemma3"])
@pytest.mark.filterwarnings(VISION)
@pytest.mark.parametrize("name", CASES)
def test_tokens_one_by_one(name, loaded):
    """A prompt, then a token at a time: windowed layers overwrite the pages of old tokens."""
    tokens, want = reference(name)
    got, start = loaded(name), 5
    cache = PagedCache.create(got.config, 1, len(tokens))
    prefill = jax.jit(lambda weights, *args: got.decoder(weights).prefill(*args))
    decode = jax.jit(lambda weights, *args: got.decoder(weights).decode(*args))
    lengths = jnp.array([start], jnp.int32)
    logits, cache = prefill(got.weights, jnp.array(tokens[None, :start]), lengths, cache)
    steps = [logits[0]]
    for token in tokens[start:]:
        logits, cache = decode(got.weights, jnp.array([token]), cache)
        steps.append(logits[0])
    assert nmse(np.stack(steps), want[start - 1 :]) <= 1e-8


ENGINE = ["mistral", "qwen2", "smollm3", "gemma3", "cohere2", "heads-8-gpt-oss", "heads-40"]


@pytest.mark.slow("compiles an engine's programs", quick=["qwen2"])
@pytest.mark.parametrize("name", ENGINE)
def test_the_engine(name, loaded):
    """Prompts of several chunks and shared beginnings give the tokens of whole passes."""
    got = loaded(name)
    prompts = prompts_of(got, ((32, 8), (0, 20), (32, 5)))
    samplings = [models.Sampling(temperature=0.0, max_new_tokens=10, ignore_end=True)] * 3
    with exactly(got, few_programs=True, pages=8) as engine:
        runs = [tokens_of(engine.generate(prompts, samplings)) for _ in range(2)]
        reused = engine.stats().reused_tokens
    assert runs[0] == runs[1] and reused > 0
    for prompt, answer in zip(prompts, runs[0], strict=True):
        whole = np.array([*prompt, *answer])
        best = got.logits(whole[None])[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == answer


@pytest.mark.slow("compiles programs of drafts")
@pytest.mark.parametrize("name", ["mistral", "smollm3", "heads-8-gpt-oss"])
def test_drafts(name, loaded):
    """Drafts change no token, beyond the window and over its pages."""
    got = loaded(name)
    prompt = [5, 6, 7, 8] * 5
    sampling = models.Sampling(temperature=0.0, max_new_tokens=40, ignore_end=True)
    want = models.generate(got, prompt, sampling).tokens
    assert models.generate(got, prompt, sampling, draft="lookup").tokens == want


@pytest.mark.slow("compiles programs for several devices")
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["1x2", "2x1"])
@pytest.mark.parametrize("name", ["qwen2", "heads-4"])
def test_several_devices(name, shape, loaded, tmp_path):
    tokens, want = reference(name)
    models.save_gguf(loaded(name), tmp_path / "model.gguf")
    mesh = jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names replicated tensors
        several = models.load(tmp_path / "model.gguf", mesh=mesh)
    logits = several.logits(np.stack([tokens, tokens]))
    assert all(nmse(row, want) <= 1e-8 for row in logits)


@pytest.mark.slow("simulates kernels", quick=["heads-24-gemma3-sim-float32"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", ["xla", "sim"])
@pytest.mark.parametrize("name", ["heads-24-gemma3", "heads-4"])
def test_narrow_heads_in_pages(name, implementation, dtype, loaded):
    """Compares a decoded token after a prompt in pages of each dtype with the native kernels."""
    tokens, want = reference(name)
    got, start = loaded(name), 9
    bar = {"float32": 1e-8, "int8": 2e-2, "float8_e4m3fn": 5e-2}[dtype]

    def run(kind: str) -> jax.Array:
        cache = PagedCache.create(got.config, 1, 16, dtype=jnp.dtype(dtype))
        lengths = jnp.array([start], jnp.int32)
        with jq.implementation(kind, activations="f32"):
            prefill = jax.jit(lambda weights, *args: got.decoder(weights).prefill(*args))
            decode = jax.jit(lambda weights, *args: got.decoder(weights).decode(*args))
            _, cache = prefill(got.weights, jnp.array(tokens[None, :start]), lengths, cache)
            return decode(got.weights, jnp.array(tokens[start : start + 1]), cache)[0][0]

    logits = run(implementation)
    assert nmse(logits, want[start]) <= bar
    assert nmse(logits, run("native")) <= 1e-8


def test_pages_of_narrow_heads_are_padded():
    config = describe("heads-24-gemma3").config
    cache = jax.eval_shape(lambda: PagedCache.create(config, 1, 16))
    assert config.head_dim == 24
    assert {pages.shape[-1] for layer in cache.pages for pages in layer} == {32}


def describe(name: str, **changes: Any) -> config_json.Description:
    """Describes a case with changes of config.json; None removes a key."""
    config = CASES[name]["config"] | changes
    config = {key: value for key, value in config.items() if value is not None}
    return config_json.describe(json_fields.JSONFields(config, "config.json"))


W, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 64}, [None] * 3),  # the context
        ("mistral", {"sliding_window": None}, [None] * 3),  # 4096
        ("mistral", {"layer_types": [F, F, F]}, [5] * 3),  # the class does not read it
        ("qwen2", {"use_sliding_window": False}, [None] * 3),
        ("qwen2", {"max_window_layers": None}, [None] * 3),  # 28
        ("qwen2", {"max_window_layers": 0}, [5] * 3),
        ("qwen2", {"layer_types": [W, F, W]}, [5, None, 5]),
        ("qwen2moe", {}, [4, None, None]),
        ("qwen2moe", {"max_window_layers": 3}, [4, None, 4]),
        ("smollm3", {"layer_types": [F, W, F, F]}, [None, 5, None, None]),
        ("smollm3", {"use_sliding_window": False}, [None] * 4),
        ("gemma2", {"layer_types": None}, [5, None, 5]),
        ("gemma3", {"sliding_window_pattern": 1}, [None] * 4),
        ("gemma3", {"sliding_window_pattern": None}, [5] * 4),
        ("gpt-oss", {"layer_types": [F, F, F]}, [None] * 3),
        ("heads-12-gemma4", {"layer_types": [W, W, W]}, [5, 5, None]),
    ],
)
def test_windows(name, changes, windows):
    config = describe(name, **changes).config
    assert [config.window_of(layer) for layer in range(config.num_layers)] == windows
    assert config.context_length == 64


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, [False, True, False, True]),
        ({"no_rope_layers": [1, 1, 0, 0, 1]}, [True, True, False, False]),
        ({"no_rope_layers": None}, [True, True, True, False]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 1}, [False] * 4),
    ],
)
def test_layers_without_rope(changes, rotated):
    described = describe("smollm3", **changes)
    config = described.config
    rates = [config.ropes[config.rope_of(layer)].factor for layer in range(4)]
    assert np.isfinite(rates).tolist() == rotated
    usual = rotated == [True, True, True, False]
    assert ("smollm3.rope.rotated_layers" not in described.metadata) == usual
    assert dataclasses.replace(config, rotated_layers=tuple(rotated)).ropes == config.ropes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"layer_types": [W, F]}, "layer_types: has 2 entries, expected 3"),
        ("qwen3", {"layer_types": [W, F, "chunked"]}, "layer_types: 'chunked' is not supported"),
        ("qwen3", {"use_sliding_window": False}, "layer_types: lists sliding_attention, but there"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern: must be an integer"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: must be 0 or 1 for each of 4"),
        ("smollm3", {"no_rope_layers": [2] * 4}, "no_rope_layers: must be 0 or 1 for each of 4"),
        ("heads-4", {"head_dim": 513}, "head_dim: a head_dim of 513 is not supported; at most 512"),
        ("heads-4", {"head_dim": 7}, "head_dim: 7 must be even"),
    ],
)
def test_what_is_refused(name, changes, message):
    with pytest.raises(jq.CheckpointError, match=message):
        describe(name, **changes)
