"""Keys of programs: whatever a program depends on is a field, and every field is in its keys."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import json
import os
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_q4k import models
from jax_q4k.cache import program_cache
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.kv_cache.shapes import page_kinds
from jax_q4k.models.runner import engine_steps, programs, prompt_programs
from jax_q4k.models.runner.adapters import Adapter, arrays_for, stacks_for
from jax_q4k.models.runner.engine_state import Sizes
from jax_q4k.models.runner.engine_steps import (
    BeginPieces,
    CopyStates,
    DecodeRows,
    FillHistory,
    ForwardRows,
    PrefillPieces,
    PutAdapter,
    SampleRows,
)
from jax_q4k.models.runner.model import Model
from jax_q4k.models.runner.programs import Decode, Program
from jax_q4k.models.runner.prompt_programs import CompareTokens, PoolTokens, ReadTokens, ScoreTokens
from jax_q4k.models.runner.speculative.drafts import PromptLookup
from jax_q4k.models.sampling import Sampling
from jax_q4k.models.sampling.stages import SamplingStages
from jax_q4k.models.support.lru_cache import LRUCache
from jax_q4k.selection import Selection, current_selection, selected

from .. import golden_files

FILES = programs.__file__, engine_steps.__file__, prompt_programs.__file__
ENGINE = (BeginPieces, PrefillPieces, DecodeRows, ForwardRows, SampleRows)
OF_VECTORS = (ScoreTokens, PoolTokens, ReadTokens)
KINDS = (*ENGINE, *OF_VECTORS, CompareTokens, CopyStates, FillHistory, PutAdapter, Decode)
SIZES = Sizes(
    slots=2,
    kinds=(None,),
    pages=(4,),
    width=4,
    snapshots=0,
    context=64,
    penalizes=True,
    history=True,
)
OTHERS = {
    "draft": PromptLookup(),
    "sizes": SIZES._replace(slots=3),
    "rows": 2,
    "stages": SamplingStages(draws=True),
    "skips": True,
    "deterministic": True,
    "adapters": 2,
    "time": 16,
    "fresh": None,
    "cache_dtype": jnp.dtype("bfloat16"),
    "saves": False,
    "speculates": True,
    "top": 20,
    "normed": False,
}


def made(kind: type[Program], network: programs.Network, **changed: Any) -> Program:
    given: dict[str, Any] = {"network": network}
    if issubclass(kind, ENGINE):
        given |= {"sizes": SIZES, "rows": 1, "stages": SamplingStages()}
    if issubclass(kind, PrefillPieces):
        given |= {"time": 8}
    if kind is BeginPieces:
        given |= {"cache_dtype": jnp.dtype("float32")}
    if issubclass(kind, OF_VECTORS):
        given |= {"rows": 1, "time": 8}
    if kind is ScoreTokens:
        given |= {"top": 0}
    if kind is ReadTokens:
        given |= {"normed": True}
    if kind is CompareTokens:
        given |= {"base": network}
    if kind is CopyStates:
        given |= {"saves": True}
    return kind(**given | changed)


def loop(network: programs.Network, stages: SamplingStages | None = None, **given: Any) -> Program:
    return made(DecodeRows, network, stages=stages or SamplingStages(), **given)


def other(field: str) -> Any:
    if field in ("network", "base"):
        return golden_files.model("qwen2-odd").network
    return OTHERS[field]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_is_in_both_keys(kind: type[Program]) -> None:
    """The key in memory is the program itself; the key of a file is the digest of `about`."""
    program = made(kind, golden_files.model("llama-gqa").network)
    assert made(kind, program.network) == program and hash(made(kind, program.network))
    names = {field.name for field in dataclasses.fields(kind)}
    assert names <= {"network", "base", *OTHERS}
    for name in names:
        value = not getattr(program, name) if name == "fresh" else other(name)
        changed = dataclasses.replace(program, **{name: value})
        assert changed != program and hash(changed) != hash(program), name
        assert json.dumps(changed.about()) != json.dumps(program.about()), name


def test_a_gpus_network_has_another_key() -> None:
    """Its programs have compiler options, and drafts have another length."""
    network = golden_files.model("llama-gqa").network
    other = dataclasses.replace(network, on_gpu=True)
    assert loop(other) != loop(network) and loop(other).about() != loop(network).about()


def test_kinds_have_keys_of_their_own() -> None:
    network = golden_files.model("llama-gqa").network
    all_about = [json.dumps(made(kind, network).about()) for kind in KINDS]
    assert len(set(all_about)) == len(KINDS)
    assert len({made(kind, network) for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("field", SamplingStages._fields)
def test_every_stage_of_sampling_is_in_the_key(field: str) -> None:
    others = {"biases": 8, "ends": 1, "logprobs": 0, "processors": ((len,),)}
    stages = SamplingStages()._replace(**{field: others.get(field, True)})
    network = golden_files.model("llama-gqa").network
    assert loop(network, stages) != loop(network)
    if field == "processors":
        with pytest.raises(TypeError, match="cannot be part of a key"):
            loop(network, stages).about()
    else:
        assert loop(network, stages).about() != loop(network).about()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PromptLookup)])
def test_every_field_of_drafts_is_in_the_key(field: str) -> None:
    network = golden_files.model("llama-gqa").network
    drafts = PromptLookup(), dataclasses.replace(PromptLookup(), **{field: 4})
    one, another = (loop(network, draft=draft) for draft in drafts)
    assert one != another and one.about() != another.about()


def test_nothing_is_closed_over() -> None:
    """A program's functions use only their arguments and its fields."""
    for kind in KINDS:
        program = made(kind, golden_files.model("llama-gqa").network)
        assert set(vars(program)) == {field.name for field in dataclasses.fields(kind)}
        for owner in kind.__mro__[:-1]:
            for name, function in vars(owner).items():
                if inspect.isfunction(function) and function.__code__.co_filename in FILES:
                    assert set(function.__code__.co_freevars) <= {"__class__"}, (owner, name)


def change_of_layers(model: Model) -> Model:
    """A model whose module has an attribute that differs from the config."""
    decoder = model.decoder()
    assert decoder.layers[0].attention.scale is None
    decoder.layers[0].attention.scale = 0.5
    return models.Model(decoder)


def test_a_module_that_was_changed_has_another_fingerprint() -> None:
    original = golden_files.model("llama-gqa")
    built = models.Model(original.decoder())
    assert models.Model(original.decoder()).network.fingerprint() == built.network.fingerprint()
    assert change_of_layers(original).network.fingerprint() != built.network.fingerprint()


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.2},
    "likeliest tokens": {"logprobs": 3},
    "DRY": {"dry_multiplier": 0.8},
}


@pytest.mark.grid
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_results_are_known_without_tracing(name: str, call: str) -> None:
    """`results` returns the structure, shapes and dtypes that tracing gives."""
    model = golden_files.model(name)
    if call == "DRY":
        CALLS[call]["dry_sequence_breakers"] = ()
    stages = SamplingStages.of([Sampling(**CALLS[call])] * 2)
    kinds = page_kinds(model.config)
    sizes = SIZES._replace(kinds=kinds, pages=(4,) * len(kinds), slots=4, snapshots=2)
    options: Any = {"sizes": sizes, "rows": 2, "stages": stages, "skips": name == "gemma3"}
    begin = made(BeginPieces, model.network, cache_dtype=jnp.dtype("int8"), **options)
    weights = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in model.weights]

    args = weights, *begin.inputs(np.zeros)
    state, sampled = jax.eval_shape(begin, *args)
    assert begin.results(args) == (state, sampled)
    for kind in (PrefillPieces, DecodeRows, ForwardRows, SampleRows):
        program: Any = made(kind, model.network, **options)
        args = state, *program.inputs(np.zeros)
        args = (weights, *args) if program.takes_weights else args
        assert program.results(args) == jax.eval_shape(program, *args)
    vectors, tokens = sampled.vectors, np.zeros((2, 16), np.int32)
    shares, count = np.zeros((2, 8), np.float32), np.int32(3)
    of_vectors: dict[Any, tuple[Any, ...]] = {ScoreTokens: (tokens, count), PoolTokens: (shares,)}
    for kind in OF_VECTORS:
        program = made(kind, model.network, rows=2)
        args = weights, vectors, *of_vectors.get(kind, ())
        assert program.results(args) == jax.eval_shape(program, *args)
    compare: Any = made(CompareTokens, model.network)
    flat = np.zeros((5, model.config.hidden_size), np.float32)
    args = (weights, weights), flat, flat, np.zeros(5, np.int32)
    assert compare.results(args) == jax.eval_shape(compare, *args)
    copy, places = made(CopyStates, model.network), np.zeros(8, np.int32)
    assert copy.results((state, places, places)) == jax.eval_shape(copy, state, places, places)
    fill, tokens = made(FillHistory, model.network), np.zeros(64, np.int32)
    filled = state, np.int32(0), tokens, np.int32(1), np.int32(0)
    assert fill.results(filled) == jax.eval_shape(fill, *filled)
    stacks = stacks_for(model, 2, 4)
    put, entry = made(PutAdapter, model.network), arrays_for(Adapter({}, ""), stacks, 4, 1.0)
    placed = stacks, np.int32(0), entry
    assert put.results(placed) == jax.eval_shape(put, *placed)
    assert PagedCache.shapes(model.config, 2, 64, dtype="int8", ahead=3) == jax.eval_shape(
        lambda: PagedCache.create(model.config, 2, 64, dtype="int8", ahead=3)
    )


def device() -> jax.Device:
    return jax.devices("cpu")[0]


@pytest.mark.parametrize("field", Selection._fields)
def test_every_field_of_a_selection_is_a_setting(field: str) -> None:
    values = {"implementation": "xla", "activations": "f32", "fused": frozenset(["mlp"])}
    values |= {"prefetch": False, "batch_invariant": True, "clusters": False}
    values |= {"decoded_products": False, "graphs": False}
    before = program_cache.settings(device()), program_cache.trace_context()
    with selected(Selection(**{field: values[field]})):
        after = program_cache.settings(device()), program_cache.trace_context()
    assert json.dumps(before[0]) != json.dumps(after[0]) and before[1] != after[1]
    assert (program_cache.settings(device()), program_cache.trace_context()) == before


def test_functions_of_a_model_are_compiled_anew_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = golden_files.model("llama-gqa")
    made: list[bool] = []
    full_pass = model._full_pass
    monkeypatch.setattr(
        model, "_full_pass", lambda: made.append(current_selection().graphs) or full_pass()
    )
    monkeypatch.setattr(model, "ready", LRUCache(8))
    steps = []
    for graphs in (True, False, True, False):
        with selected(Selection(graphs=graphs)):
            model.logits(np.zeros((1, 3), np.int32))
            steps.append(model.decode_step)
    assert made == [True, False]
    assert steps[0] is steps[2] is not steps[1] is steps[3]


VARIABLES = ("XLA_FLAGS", "JAX_Q4K_TUNING", "JAX_Q4K_KERNELS", "TF_XLA_FLAGS", "PJRT_NPROC")


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_are_settings(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_cache.settings(device())
    monkeypatch.setenv(variable, f"{os.environ.get(variable, '')} --other")
    assert program_cache.settings(device()) != before


@pytest.mark.parametrize(
    "change",
    [{"jax_default_matmul_precision": "highest"}, {"jax_enable_x64": True}],
    ids=str,
)
def test_options_of_jax_are_settings(change: dict[str, Any]) -> None:
    before = program_cache.settings(device()), program_cache.trace_context()
    (name, value), old = *change.items(), None
    old = getattr(jax.config, name)
    try:
        jax.config.update(name, value)
        after = program_cache.settings(device()), program_cache.trace_context()
    finally:
        jax.config.update(name, old)
    assert after[0] != before[0] and after[1] != before[1]


def test_cores_platform_and_packages_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before, runtime = (
        program_cache.settings(device()),
        types.SimpleNamespace(platform_version="other"),
    )
    assert program_cache.settings(types.SimpleNamespace(client=runtime)) != before
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda _: range(999))
        assert program_cache.settings(device()) != before
    program_cache._packages.cache_clear()
    for package in ("flax", "numpy"):
        with monkeypatch.context() as patched:
            version = importlib.metadata.version
            other = functools.partial(_other_version, version, package)
            patched.setattr(importlib.metadata, "version", other)
            assert program_cache.settings(device()) != before
        program_cache._packages.cache_clear()
    assert program_cache.settings(device()) == before


def _other_version(version: Callable[[str], str], changed: str, name: str) -> str:
    return "0.0" if name == changed else version(name)


def test_types_of_arguments_tell_structure_shape_and_dtype() -> None:
    one = program_cache.Types(({"a": np.zeros(3, np.int32)}, np.float32(1)))
    assert one == program_cache.Types(({"a": jnp.ones(3, jnp.int32)}, np.float32(2)))
    for changed in (
        ({"b": np.zeros(3, np.int32)}, np.float32(1)),
        ({"a": np.zeros(4, np.int32)}, np.float32(1)),
        ({"a": np.zeros(3, np.int8)}, np.float32(1)),
        ([np.zeros(3, np.int32)], np.float32(1)),
    ):
        assert program_cache.Types(changed) != one
