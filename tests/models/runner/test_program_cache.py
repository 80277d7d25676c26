"""Cached programs of generation: they give the same tokens, and nothing is traced for them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.cache import program_cache as kept_files
from jax_q4k.cache.program_cache import ProgramCache
from jax_q4k.models.network import build

from .. import golden_files

pytestmark = pytest.mark.cpu_kernels
PROMPT = [1, 5, 9, 2]

CALLS = {
    "greedy": {},
    "sampled, with a penalty": {"temperature": 0.9, "repetition_penalty": 1.3, "seed": 5},
    "int8 pages": {"cache_dtype": jnp.int8},
}


@pytest.fixture
def folder(tmp_path):
    return ProgramCache(tmp_path, 1 << 24)


def tokens(file, kept=None, **options):
    loaded = models.load(file)
    loaded.program_cache = kept
    return models.generate(loaded, PROMPT, max_new_tokens=9, **options).tokens


@pytest.mark.slow("compiles each program twice", quick=["int8 pages"])
@pytest.mark.parametrize("what", CALLS)
def test_the_tokens_are_those_of_compiling(what, folder, monkeypatch):
    file, options = golden_files.path("llama-gqa"), CALLS[what]
    want = tokens(file, **options)
    assert tokens(file, folder, **options) == want
    assert len(list(folder.folder.iterdir())) == 2
    monkeypatch.setattr(build, "build", None)  # tracing would call it
    assert tokens(file, folder, **options) == want


@pytest.mark.slow("compiles programs of three models", quick=["qwen35"])
@pytest.mark.parametrize("name", ["qwen35", "gemma4-e", "deepseek2-noyarn"])
def test_states_and_pages_of_other_kinds(name, folder, monkeypatch):
    file, options = golden_files.path(name), {"ignore_end": True}
    want = tokens(file, **options)
    assert tokens(file, folder, **options) == want
    assert len(list(folder.folder.iterdir())) == 2
    monkeypatch.setattr(build, "build", None)  # tracing would call it
    assert tokens(file, folder, **options) == want


@pytest.mark.slow("compiles several programs")
def test_a_seed_is_no_part_of_a_program(folder):
    file, options = golden_files.path("llama-gqa"), CALLS["sampled, with a penalty"]
    tokens(file, folder, **options)
    options = options | {"seed": 6}
    assert tokens(file, folder, **options) == tokens(file, **options)
    assert len(list(folder.folder.iterdir())) == 2


@pytest.mark.slow("compiles a program a length")
def test_every_length_has_programs_of_its_own(folder):
    """A KV cache of another capacity needs another program, though no argument shows it."""
    file, options = golden_files.path("llama-gqa"), {"ignore_end": True}
    for count in (20, 64, 200, 100, 20):
        out = models.generate(
            with_kept(models.load(file), folder), PROMPT, max_new_tokens=count, **options
        )
        assert len(out.tokens) == count and out.finish_reason == "length"
        assert (
            out.tokens
            == models.generate(
                golden_files.model("llama-gqa"), PROMPT, max_new_tokens=count, **options
            ).tokens
        )


@pytest.mark.slow("compiles several programs")
def test_batches_and_prompts_of_one_model_have_programs_of_their_own(folder):
    """Programs in memory too: an executable for other shapes would read beyond its arguments."""
    loaded = with_kept(models.load(golden_files.path("llama-gqa")), folder)
    batches = [[PROMPT], [PROMPT, PROMPT[::-1]], [PROMPT * 5], [PROMPT]]
    for prompts in batches:
        outs = models.generate(loaded, prompts, max_new_tokens=9)
        alone = models.generate(golden_files.model("llama-gqa"), prompts, max_new_tokens=9)
        assert [out.tokens for out in outs] == [out.tokens for out in alone]


@pytest.mark.slow("compiles several programs")
def test_weights_of_other_types_have_programs_of_their_own(folder):
    """An executable does not check the dtypes of its arguments."""
    loaded, other = (models.load(golden_files.path("llama-gqa")) for _ in range(2))
    with_kept(loaded, folder)
    models.generate(loaded, PROMPT, max_new_tokens=9)
    for model in (loaded, other):
        model.weights = [w.astype("bfloat16") if w.dtype == "float32" else w for w in model.weights]
    again = models.generate(loaded, PROMPT, max_new_tokens=9)
    assert again.tokens == models.generate(other, PROMPT, max_new_tokens=9).tokens
    assert len(list(folder.folder.iterdir())) == 4


@pytest.mark.slow("compiles a program for each setting")
def test_compiling_under_another_setting_is_told_from_running():
    loaded = models.load(golden_files.path("llama-gqa"))
    models.generate(loaded, PROMPT, max_new_tokens=9)
    assert models.generate(loaded, PROMPT, max_new_tokens=9).timings.compile == 0
    for change in (jax.default_matmul_precision("highest"), jq.implementation("xla")):
        with change:
            assert models.generate(loaded, PROMPT, max_new_tokens=9).timings.compile > 0


@pytest.mark.slow("compiles a program for each setting")
def test_settings_that_change_between_calls(folder, monkeypatch):
    """Programs in memory also come from files, so JAX does not check settings for them."""
    loaded = with_kept(models.load(golden_files.path("llama-gqa")), folder)

    def files():
        models.generate(loaded, PROMPT, max_new_tokens=9)
        return len(list(folder.folder.iterdir()))

    before = files()
    for change in (jax.default_matmul_precision("highest"), jq.implementation("xla")):
        with change:
            assert files() == before + 2
        before += 2
    monkeypatch.setenv("JAX_Q4K_OTHER", "1")  # like a tuning table, which tracing reads
    assert files() == before + 2


def test_threads_with_one_new_shape_compile_it_once(folder, monkeypatch):
    loaded, compiled = with_kept(models.load(golden_files.path("llama-gqa")), folder), []
    compile_here = kept_files.compiled_files.compile_here
    monkeypatch.setattr(
        kept_files.compiled_files,
        "compile_here",
        lambda *given: compiled.append(1) or compile_here(*given),
    )
    with ThreadPoolExecutor(8) as pool:
        outputs = list(
            pool.map(lambda _: models.generate(loaded, PROMPT, max_new_tokens=9), range(8))
        )
    files = list(folder.folder.glob("*.program"))
    assert len(compiled) == len(files) > 1 and len({tuple(out.tokens) for out in outputs}) == 1


def with_kept(loaded, folder):
    loaded.program_cache = folder
    return loaded


def saved(path, change):
    """Saves the golden model with changed tensors or config."""
    original = golden_files.model("llama-gqa")
    config, tensors = change(original.config, dict(models.named_tensors(original)))
    metadata = {**original.metadata, **config.to_metadata()}
    models.save_gguf(models.Model(build.build(config, tensors), None, metadata), path)
    return path


def other_weights(config, tensors):
    norm = tensors["output_norm.weight"]
    return config, tensors | {"output_norm.weight": jnp.asarray(np.roll(norm, 3))}


def other_config(config, tensors):
    return dataclasses.replace(config, rope_theta=2 * config.rope_theta), tensors


@pytest.mark.slow("compiles each program twice", quick=["other_weights-*"])
@pytest.mark.parametrize("change, programs", [(other_weights, 2), (other_config, 4)])
def test_a_model_that_changes(change, programs, folder, tmp_path_factory):
    """Weights are arguments of programs; everything else of a model is part of the key."""
    first = tokens(golden_files.path("llama-gqa"), folder)
    file = saved(tmp_path_factory.mktemp("changed") / "model.gguf", change)
    want = tokens(file)
    assert want != first and tokens(file, folder) == want
    assert len(list(folder.folder.iterdir())) == programs


def test_a_model_that_is_loaded_is_as_one_that_is_built():
    loaded = golden_files.model("llama-gqa")
    built = models.Model(build.build(loaded.config, models.named_tensors(loaded)))
    assert np.array_equal(built.logits([PROMPT]), loaded.logits([PROMPT]))
    again = models.load(golden_files.path("llama-gqa"))
    assert loaded.network.fingerprint() == again.network.fingerprint()
    assert loaded.network.fingerprint() != golden_files.model("qwen2-odd").network.fingerprint()
