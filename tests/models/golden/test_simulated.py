"""The golden models, with the simulator running the PTX of every kernel of the CUDA path."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Collection
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.runner.model import Model
from jax_q4k.ops import quantize_q8_1
from jax_q4k.ops.op import Op
from ptx_kernels import simulator, tuning
from ptx_kernels.ptx import Kernel

from ..golden_files import LLAMA_AND_QWEN, path

PROMPT = 8
#: Tokens of a KV cache whose attention a GPU splits over the thread blocks of a cluster.
SPLIT_CAPACITY = 256
#: Options that round products and sums once, like the kernels, so int8 values differ less often.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def prefill_and_decode(
    model: Model, tokens: np.ndarray, prompt: int, capacity: int | None = None
) -> np.ndarray:
    """Logits (2, vocab) of the last prompt token and a step, or of two steps without a prompt.

    It is not jitted, so it runs in the order of the code.
    """
    decoder, steps = model.decoder(), 1 if prompt else 2
    cache = PagedCache.create(model.config, 1, capacity or prompt + steps)
    rows = []
    if prompt:
        logits, cache = decoder.prefill(
            jnp.array(tokens[None, :prompt]), jnp.array([prompt], jnp.int32), cache
        )
        rows.append(logits)
    for token in tokens[prompt : prompt + steps]:
        logits, cache = decoder.decode(jnp.array([token], jnp.int32), cache)
        rows.append(logits)
    return np.concatenate(rows)


@pytest.mark.slow(
    "simulates every launch of a prompt and a step",
    quick=["gpt-oss-mxfp4-*-clusters=False"],
)
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(
    "name, prompt",
    [
        *((name, PROMPT) for name in LLAMA_AND_QWEN),
        ("gemma2", 0),  # windows, soft caps
        ("gpt-oss-mxfp4", 0),  # experts, sinks, YaRN, MXFP4
        ("qwen3moe", 9),  # rows of a prompt sorted by expert
        ("gemma4-e", 4),  # two head sizes, shared keys, per-layer embeddings
        ("gemma4-moe", 0),  # a dense network in parallel with experts
        ("deepseek2-noyarn", 0),  # latent attention, a shared expert
    ],
)
def test_golden_models(
    name: str, prompt: int, clusters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated logits equal plain JAX's for the same quantized activations.

    They roughly equal llama.cpp's f32 logits.
    """
    model = models.from_gguf(path(name))
    golden = np.load(GOLDEN / f"{name}.npz")
    kernels = simulated_kernels(monkeypatch)
    simulated = check_simulated(
        model,
        golden["prompt"],
        monkeypatch,
        prompt=prompt,
        clusters=clusters,
        capacity=SPLIT_CAPACITY,
    )
    assert {max(kernel.cluster) > 1 for kernel in kernels} == {False, clusters}
    assert any(kernel.name == "merge_attention" for kernel in kernels) == (not clusters)
    assert nmse(simulated, golden["logits_f32"][max(prompt - 1, 0) :][:2]) <= 1e-2


@pytest.mark.slow("simulates every launch of a prompt and a step")
@pytest.mark.parametrize(
    "name, prompt", [("llama-gqa", 0), ("qwen2-bias", PROMPT), ("qwen3moe", 9)]
)
def test_kernels_for_turing(name: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4's kernels, which must run on sm_75."""
    golden, kernels = np.load(path(name).parent / f"{name}.npz"), simulated_kernels(monkeypatch)
    jax.clear_caches()  # programs of the same operations may have another device's kernels
    with tuning.on_device(tuning.target("Tesla T4")):
        simulated = check_simulated(
            models.from_gguf(path(name)), golden["prompt"], monkeypatch, prompt=prompt
        )
    jax.clear_caches()
    assert len(kernels) > 10
    assert {kernel.arguments.get("oldest") for kernel in kernels} == {75}
    assert nmse(simulated, golden["logits_f32"][max(prompt - 1, 0) :][:2]) <= 1e-2


@pytest.mark.slow("simulates the launches of the demo model")
def test_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest case: two rows of pages, and a matrix of each type in its recipe."""
    model = models.from_gguf(models.demo_path())
    assert model.tokenizer is not None
    tokens = np.array(
        model.tokenizer.encode("It is a truth universally acknowledged, that a single man"),
        np.int32,
    )
    simulated = check_simulated(model, tokens, monkeypatch)
    plain = np.asarray(model.logits(tokens[None]))[0, PROMPT - 1 : PROMPT + 1]
    assert nmse(simulated, plain) <= 1e-2


@pytest.mark.slow("simulates every launch of two steps")
@pytest.mark.parametrize("name, fused", [("qwen2-bias", ()), ("qwen3-qknorm", ("gated_matmul",))])
def test_fused_paths_switched_off(
    name: str, fused: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps without a prompt, with only these fused paths.

    Qwen 3 normalizes per head, Qwen 2 has biases.
    """
    golden = np.load(GOLDEN / f"{name}.npz")
    model = models.from_gguf(GOLDEN / f"{name}.Q4_K_M.gguf")
    simulated = check_simulated(model, golden["prompt"], monkeypatch, prompt=0, fused=fused)
    assert nmse(simulated, golden["logits_f32"][:2]) <= 1e-2


@pytest.mark.slow("simulates every launch of two steps")
@pytest.mark.parametrize(
    "name, prompt",
    [
        ("llama-gqa", 0),
        ("qwen35", 5),  # gated delta nets, attention with a gate
        ("deepseek2-noyarn", 3),  # latent attention
    ],
)
def test_f32_activations(name: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mat-vecs multiply packed weights by unquantized activations."""
    golden = np.load(path(name).parent / f"{name}.npz")
    model = models.from_gguf(path(name))
    simulated = check_simulated(
        model, golden["prompt"], monkeypatch, prompt=prompt, activations="f32"
    )
    assert nmse(simulated, golden["logits_f32"][max(prompt - 1, 0) :][:2]) <= 1e-8


def simulated_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """Returns a list to which the simulator appends each kernel that it runs."""
    found: list[Kernel] = []
    run = simulator.run

    def running(kernel: Kernel, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        found.append(kernel)
        return run(kernel, *operands)

    monkeypatch.setattr(simulator, "run", running)
    return found


@functools.cache
def reference(op: Op, params: tuple[tuple[str, Any], ...]) -> Any:
    """Reference of an operation with int8 activations, jitted.

    Maps (arrays, given) to the results and the values that it quantized.

    given: (values, scale_sum) for each of its quantizations, which replace its own; None keeps its
    own. One program serves both, because compiling takes longest.
    """
    with_q8_1 = {
        name: "q8_1" if name == "activations" and value is None else value for name, value in params
    }
    quantize = quantize_q8_1.reference

    def run(arrays: Any, take: Any) -> Any:
        """Returns the results and the quantized values; `take(number, own)` replaces each."""
        own: list[Any] = []

        def quantized(x: jax.Array) -> Any:
            own.append(quantize(x))
            return take(len(own) - 1, own[-1])

        with mock.patch.object(quantize_q8_1, "reference", quantized):
            return op.reference(*arrays, **with_q8_1), own

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def program(arrays: Any, given: Any, replay: Any) -> Any:
        def take(number: int, own: Any) -> Any:
            pairs = zip(given[number], own, strict=True)
            return tuple(jnp.where(replay, theirs, mine) for theirs, mine in pairs)

        return run(arrays, take)

    def call(arrays: Any, given: Any) -> Any:
        if given is not None:
            return program(arrays, [list(pair) for pair in given], True)
        own = jax.eval_shape(lambda arrays: run(arrays, lambda _, own: own)[1], arrays)
        zeros = [[np.zeros(part.shape, part.dtype) for part in pair] for pair in own]
        return program(arrays, zeros, False)

    return call


def check_simulated(
    model: Model,
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    *,
    prompt: int = PROMPT,
    fused: Collection[str] | None = None,
    activations: Literal["f32"] | None = None,
    clusters: bool = True,
    capacity: int | None = None,
) -> np.ndarray:
    """Returns simulated logits like `prefill_and_decode`, after comparing them with plain JAX.

    Both use the same int8 activations.

    The kernels of each operation are compared with its reference on the same operands, and so are
    the logits of complete runs. Two runs that differ in the last bit of an activation can round it
    to neighboring int8 values, which changes the logits by 1e-5 or more. So the reference run
    replays the int8 values of the simulated run. The test also checks how often its own would have
    differed.
    """
    taken: list[Any] = []
    differing, total = 0, 0
    bind = Op.bind

    def simulating(op: Op, *arrays: Any, prefetch: Any = (), **params: Any) -> Any:
        with jq.implementation("sim", clusters=clusters):
            got = bind(op, *arrays, prefetch=prefetch, **params)
        want, quantized = reference(op, tuple(sorted(params.items())))(arrays, None)
        for result, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert nmse(result, expected) <= 1e-6, op.name
        taken.append(quantized)
        return got

    def replaying(op: Op, *arrays: Any, prefetch: Any = (), **params: Any) -> Any:
        nonlocal differing, total
        given = taken.pop(0)
        results, quantized = reference(op, tuple(sorted(params.items())))(arrays, given)
        for (own, _), (values, _) in zip(quantized, given, strict=True):
            assert jnp.max(jnp.abs(own.astype(jnp.int32) - values)) <= 1
            differing, total = differing + int(jnp.sum(own != values)), total + values.size
        return results

    def run(operation: Any) -> np.ndarray:
        with (
            monkeypatch.context() as patched,
            jq.implementation(fused=fused, activations=activations),
        ):
            patched.setattr(Op, "bind", operation)
            return prefill_and_decode(model, tokens, prompt, capacity)

    simulated = run(simulating)
    plain = run(replaying)
    assert not taken
    assert differing <= 1e-3 * total
    assert nmse(simulated, plain) <= 1e-6
    return simulated


def test_the_simulator_runs_what_a_gpu_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated decode step launches exactly the texts in the program lowered for CUDA."""
    model = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf")
    kernels = simulated_kernels(monkeypatch)
    cache = PagedCache.create(model.config, 1, 16)
    arguments = (model.weights, jnp.array([3], jnp.int32), cache)
    decode = jax.jit(lambda weights, *args: model.decoder(weights).decode(*args))
    lowered = decode.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    with jq.implementation("sim"):
        jax.block_until_ready(decode(*arguments))
    launched = [kernel.text for kernel in kernels]
    on_gpu = {
        _unescaped(text) for text in re.findall(r'kernel_data = "((?:[^"\\]|\\.)*)"', lowered)
    }
    assert on_gpu == set(launched)
    names = collections.Counter(re.search(r"\.entry (\w+)", text)[1] for text in launched)
    layers = model.config.num_layers
    assert names == {
        "embedding_q4_k": 1,
        "qkv_append_matvec_q4_k_m1": 1,
        "qkv_append_matvec_q4_k_q6_k_m1": 1,
        "paged_attention": layers,
        "matvec_q4_k_m1": layers + 1,  # down is Q6_K in one of two layers
        "gated_matvec_q4_k_m1": layers,
        "matvec_q6_k_m1": 2,
    }


def _unescaped(text: str) -> str:
    """Decodes a string attribute that MLIR printed."""
    return re.sub(r"\\([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)
