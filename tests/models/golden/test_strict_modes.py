"""JAX's strict modes: models never promote implicitly and never transfer implicitly."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import in_64_bit_mode
from support.implementations import NATIVE
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models, native
from jax_q4k.models.runner.speculative.drafts import DraftModel
from jax_q4k.models.tasks import bench

from .. import golden_files

SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "penalized": {"repetition_penalty": 1.3, "temperature": 0.5},
}


#: Models with states, convolutions, shared keys, parallel experts, and latent vectors.
FAMILIES = ("qwen35", "lfm2", "gemma4-e", "gemma4-moe", "deepseek2-noyarn")


@contextlib.contextmanager
def strict():
    """All strict modes together."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard("disallow"),
    ):
        yield


@pytest.mark.slow(
    "compiles two programs a model",
)
@pytest.mark.parametrize(
    "name, implementation",
    [
        ("qwen2-bias", "xla"),
        ("qwen3-qknorm", "xla"),
        ("qwen35", "xla"),
        *(
            pytest.param(name, *NATIVE.values, marks=NATIVE.marks)
            for name in (*golden_files.NAMES, *FAMILIES)
        ),
    ],
)
def test_logits_and_greedy_tokens(name, implementation):
    model, prompt = models.from_gguf(golden_files.path(name)), golden_files.reference(name).prompt
    with jq.implementation(implementation):
        with strict():
            logits = model.logits(prompt[None])
            out = models.generate(model, prompt, max_new_tokens=4)
        np.testing.assert_array_equal(logits, golden_files.model(name).logits(prompt[None]))
        assert (
            out.tokens == models.generate(golden_files.model(name), prompt, max_new_tokens=4).tokens
        )


@pytest.mark.slow("compiles three programs a case")
@pytest.mark.parametrize(
    ("draft", "sampling"),
    [("lookup", "greedy"), ("lookup", "penalized"), ("model", "drawn"), ("layer", "greedy")],
)
def test_drafts(draft, sampling):
    """Drafts for recurrent states, which continue from the accepted tokens, and for pages."""
    name = {"lookup": "qwen35", "model": "llama-gqa", "layer": "qwen35-mtp"}[draft]
    model, prompts = models.from_gguf(golden_files.path(name)), [[1, 5, 9, 2, 1, 5, 9], [7]]
    fields = SAMPLINGS[sampling] | {"max_new_tokens": 8, "ignore_end": True}
    if draft == "model":
        draft = DraftModel(models.from_gguf(golden_files.path(name)))
    if draft == "layer":
        draft = models.load_nextn(golden_files.path(name))
    with strict():
        outs = models.generate(model, prompts, draft=draft, **fields)
    again = models.generate(golden_files.model(name), prompts, **fields)
    assert [out.tokens for out in outs] == [out.tokens for out in again]


@pytest.mark.slow("compiles a program a case", quick=["penalized"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampling_parameters(sampling):
    model, prompts = models.from_gguf(golden_files.path("llama-gqa")), [[1, 5, 9], [7]]
    fields = SAMPLINGS[sampling] | {"max_new_tokens": 5, "cache_dtype": "int8"}
    with strict():
        outs = models.generate(model, prompts, **fields)
    again = models.generate(golden_files.model("llama-gqa"), prompts, **fields)
    assert [out.tokens for out in outs] == [out.tokens for out in again]


@pytest.mark.slow("compiles four programs")
def test_streams_stop_strings_and_scores():
    model = models.from_gguf(GOLDEN / "text-spm.Q4_K_M.gguf")
    with strict():
        pieces = list(models.stream(model, "The sea", max_new_tokens=6))
        whole = models.generate(model, ["The sea", "Once"], max_new_tokens=20, stop="e")
        score = models.score(model, "The sea was calm, and so was the sky above.")
    assert [p.token for p in pieces if p.token is not None] == pieces[-1].output.tokens
    assert {out.finish_reason for out in whole} <= {"stop", "length", "end"}
    assert score == models.score(model, "The sea was calm, and so was the sky above.")


def test_loading_quantizing_and_saving(tmp_path):
    with strict():
        model = models.from_gguf(golden_files.path("llama-gqa"))
        models.save_gguf(models.quantize(model, "Q8_0"), tmp_path / "saved.gguf")
        saved = models.load(tmp_path / "saved.gguf")
        tokens = models.generate(saved, [1, 2, 3], max_new_tokens=3).tokens
    assert len(tokens) == 3


@pytest.mark.slow("runs a model step by step")
def test_without_jit():
    model, prompt = golden_files.model("llama-gqa"), [1, 5, 9]
    want = models.generate(model, prompt, max_new_tokens=2).tokens
    with jax.disable_jit():
        assert models.generate(model, prompt, max_new_tokens=2).tokens == want


def test_nan_is_reported_by_the_primitive():
    model, prompt = models.from_gguf(golden_files.path("llama-gqa")), [1, 5, 9]
    with jax.debug_nans(True):
        models.generate(model, prompt, max_new_tokens=2)
        size = (model.config.hidden_size,)
        norm = next(i for i, weight in enumerate(model.weights) if weight.shape == size)
        model.weights[norm] = jnp.full(size, np.inf)
        with pytest.raises(
            FloatingPointError, match=r"\(nan\) encountered in \w*(linear|mlp|norm)"
        ):
            models.generate(model, prompt, max_new_tokens=2)


def dtypes_and_tokens(name):
    """Returns dtypes of a model's lowered programs, and tokens of two samplings."""
    model = models.load(golden_files.path(name))
    dtypes = {}
    for implementation in ("xla", "native") if native.available() else ("xla",):
        for name, (function, arguments) in models.abstract_programs(model).items():
            with jq.implementation(implementation):
                results = jax.tree.leaves(function.trace(*arguments).lower().out_info)
            dtypes[f"{implementation}, {name}"] = [str(leaf.dtype) for leaf in results]
    outs = [
        models.generate(model, [[1, 2, 3], [4]], max_new_tokens=4, draft=draft, **SAMPLINGS[name])
        for name, draft in (("greedy", None), ("drawn", None), ("penalized", "lookup"))
    ]
    return [dtypes, [[one.tokens for one in out] for out in outs]]


@pytest.mark.slow("compiles in a process of its own")
@pytest.mark.parametrize("name", ["qwen3-qknorm", "qwen35"])
def test_64_bit_mode_gives_the_same_tokens(name):
    assert in_64_bit_mode(dtypes_and_tokens, name) == dtypes_and_tokens(name)


def adapted_vectors(folder, pooling):
    """Embeddings of two texts from a model with an adapter."""
    given, texts = models.from_gguf(golden_files.path("qwen3-qknorm")), [[5, 6, 7], [8]]
    k, n = given.config.hidden_size, given.config.intermediate_size
    tensors = {
        "blk.0.ffn_gate.weight.lora_a": np.ones((2, k), np.float32) / k,
        "blk.0.ffn_gate.weight.lora_b": np.ones((n, 2), np.float32),
    }
    described = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0}
    described |= {"general.architecture": "qwen3"}
    jq.gguf.write(f"{folder}/a.gguf", described, tensors)
    adapted = models.with_lora(given, f"{folder}/a.gguf", scale=0.5)
    vectors = models.embed(adapted, texts, pooling=pooling, normalize=True)
    for kind in ("tg", "pp"):
        bench.measure(adapted, bench.Test(kind, 9, depth=4), 1)
    assert all(vector.dtype == np.float32 for vector in vectors)
    return np.concatenate([np.ravel(vector) for vector in vectors]).tolist()


@pytest.mark.slow("compiles programs of three commands")
@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_vectors_adapters_and_measuring(pooling, tmp_path):
    """The numbers are the same without these modes and in 64-bit mode."""
    want = adapted_vectors(tmp_path, pooling)
    with strict():
        assert adapted_vectors(tmp_path, pooling) == want
    in_wide = in_64_bit_mode(adapted_vectors, str(tmp_path), pooling)
    np.testing.assert_allclose(in_wide, want, atol=1e-5)
