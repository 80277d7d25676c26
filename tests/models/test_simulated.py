"""The golden models with every kernel of the CUDA path run from its PTX text by the simulator."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDEN, nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.cache import PagedCache
from jax_q4k.models.model import Model
from jax_q4k.ops.matmul import takes_q8_1
from ptx_kernels import simulator

PROMPT, STEPS = 8, 4
NAMES = ["llama-gqa", "llama3-rope", "qwen2-bias", "qwen2-odd", "qwen3-qknorm"]


def prefill_and_decode(model: Model, tokens: np.ndarray, implementation: str) -> np.ndarray:
    """Logits of the last prompt token and of each step, (STEPS + 1, vocab); not jitted, so in the order of the code."""
    decoder = model.decoder()
    cache = PagedCache.create(model.config, 1, PROMPT + STEPS)
    with jq.implementation(implementation):
        logits, cache = decoder.prefill(jnp.array(tokens[None, :PROMPT]), jnp.array([PROMPT], jnp.int32), cache)
        rows = [logits]
        for token in tokens[PROMPT : PROMPT + STEPS]:
            logits, cache = decoder.decode(jnp.array([token], jnp.int32), cache)
            rows.append(logits)
    return np.concatenate(rows)


@pytest.mark.parametrize("name", NAMES)
def test_golden_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated logits equal plain JAX's on the same quantized activations, and llama.cpp's f32 ones roughly."""
    model = models.from_gguf(GOLDEN / f"{name}.Q4_K_M.gguf")
    golden = np.load(GOLDEN / f"{name}.npz")
    simulated = check_simulated(model, golden["prompt"], monkeypatch)
    assert nmse(simulated, golden["logits_f32"][PROMPT - 1 : PROMPT + STEPS]) <= 1e-2


def test_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.from_gguf(models.demo_path())
    assert model.tokenizer is not None
    tokens = np.array(model.tokenizer.encode("It is a truth universally acknowledged, that a single man"), np.int32)
    simulated = check_simulated(model, tokens, monkeypatch)
    assert nmse(simulated, np.asarray(model.logits(tokens[None]))[0, PROMPT - 1 : PROMPT + STEPS]) <= 1e-2


def check_simulated(model: Model, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Simulated logits as `prefill_and_decode` gives them, found equal to plain JAX's on the same int8 activations.

    Two runs that differ in the last bit of an activation can round it to neighbouring int8 values, which then is a
    difference of 1e-5 and more in the logits. So the reference replays the int8 values of the simulated run; how
    often its own would have differed is checked as well.
    """
    taken: list[tuple[jax.Array, jax.Array]] = []
    differing, total = 0, 0

    def recording(x: jax.Array, w: Any) -> jax.Array:
        taken.append(jq.quantize_q8_1(x))
        return matmul(x, w)

    def replaying(x: jax.Array, w: Any) -> jax.Array:
        nonlocal differing, total
        values, scale_sum = taken.pop(0)
        own = jq.quantize_q8_1(x)[0].astype(jnp.int32)
        assert jnp.max(jnp.abs(own - values)) <= 1
        differing, total = differing + int(jnp.sum(own != values)), total + values.size
        if not takes_q8_1(w.format, x.size // x.shape[-1], x.shape[-1]):
            return matmul(x, w)
        groups = values.reshape(*values.shape[:-1], -1, 32) * scale_sum[..., :1]
        return matmul(groups.reshape(x.shape), w)

    matmul = jq.matmul
    monkeypatch.setattr(jq, "matmul", recording)
    simulated = prefill_and_decode(model, tokens, "sim")
    monkeypatch.setattr(jq, "matmul", replaying)
    reference = prefill_and_decode(model, tokens, "xla")
    assert not taken
    assert differing <= 1e-3 * total
    monkeypatch.setattr(jq, "matmul", matmul)
    assert nmse(simulated, reference) <= 1e-6
    return simulated


def test_the_simulator_runs_what_a_gpu_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated decode step launches the very texts that the program lowered for CUDA holds."""
    model = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf")
    launched: list[str] = []
    run = simulator.run

    def recording(kernel, *operands):
        launched.append(kernel.text)
        return run(kernel, *operands)

    monkeypatch.setattr(simulator, "run", recording)
    cache = PagedCache.create(model.config, 1, 16)
    arguments = (model.weights, jnp.array([3], jnp.int32), cache)
    decode = jax.jit(lambda weights, *args: model.decoder(weights).decode(*args))
    lowered = decode.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    with jq.implementation("sim"):
        jax.block_until_ready(decode(*arguments))
    on_gpu = {_unescaped(text) for text in re.findall(r'kernel_data = "((?:[^"\\]|\\.)*)"', lowered)}
    assert on_gpu == set(launched)
    names = collections.Counter(re.search(r"\.entry (\w+)", text)[1] for text in launched)
    assert set(names) == {
        "embedding_q4_k",
        "quantize_q8_1",
        "matvec_q4_k_m1",
        "matvec_q6_k_m1",
        "append_kv",
        "paged_attention",
    }
    assert names["matvec_q4_k_m1"] + names["matvec_q6_k_m1"] == 7 * model.config.num_layers + 1
    assert names["append_kv"] == names["paged_attention"] == model.config.num_layers


def _unescaped(text: str) -> str:
    """A string attribute as MLIR prints it -> its characters."""
    return re.sub(r"\\([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)
