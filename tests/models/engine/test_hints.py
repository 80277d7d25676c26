"""Names and calls of other libraries raise one line with the name that they have here."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import Output, Sampling, Timings
from jax_q4k.models.engine.arguments import refuse_tracing
from jax_q4k.models.sampling.params import _ELSEWHERE

from ..golden_files import model

TEXT = "text-spm"


@pytest.mark.parametrize(
    "name, meant",
    [
        ("max_tokens", "max_new_tokens"),
        ("stop_sequences", "stop"),
        ("do_sample", "temperature"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
    ],
)
def test_fields_of_sampling(name, meant):
    message = f"^Sampling has no field {name}; did you mean {meant}\\?$"
    for call in (
        lambda: Sampling(**{name: 5}),
        lambda: models.generate(model(TEXT), "a", **{name: 5}),
        lambda: models.generate(model(TEXT), "a", Sampling(), **{name: 5}),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_an_unlike_name_lists_the_fields():
    with pytest.raises(TypeError, match="no field wxyz; it has max_new_tokens, min_new_tokens, "):
        Sampling(wxyz=1)


def test_hints_name_fields():
    assert {*_ELSEWHERE.values()} <= {field.name for field in dataclasses.fields(Sampling)}


def test_sampling_is_copied():
    one = Sampling(max_new_tokens=3, temperature=0.5)
    assert copy.copy(one) == pickle.loads(pickle.dumps(one)) == one == Sampling(3, 0, 0.5)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: model(TEXT).generate("a"),
            AttributeError,
            r"write models.generate\(model, ...\)$",
        ),
        (lambda: model(TEXT).stream, AttributeError, r"write models.stream\(model, ...\)$"),
        (lambda: model(TEXT).no_such_name, AttributeError, "no attribute 'no_such_name'$"),
        (lambda: model(TEXT)([[1]]), TypeError, r"models.generate\(model, prompt\) makes text"),
        (lambda: model(TEXT).tokenizer("a"), TypeError, r"tokenizer.encode\(text\)"),
        (lambda: jq.load("demo"), AttributeError, "'load': it is jax_q4k.models.load$"),
        (lambda: jq.generate, AttributeError, "'generate': it is jax_q4k.models.generate$"),
    ],
)
def test_names_of_other_libraries(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_they_name_exists():
    tokens = model(TEXT).tokenizer.encode("a")
    assert model(TEXT).decoder()(np.array([tokens])).ndim == 3
    assert all(hasattr(models, name) for name in ("load", "generate", "stream", "Engine"))


@pytest.mark.parametrize("function", ["generate", "stream"])
def test_inside_jit(function):
    with pytest.raises(TypeError, match=f"^{function} runs programs .* call it outside jit"):
        jax.jit(lambda: getattr(models, function)(model(TEXT), [1, 2], max_new_tokens=1))()
    refuse_tracing(function)  # outside


def test_representations_are_one_line():
    loaded = model(TEXT)
    config = repr(loaded.config)
    assert config.startswith("Config(llama, ") and "vocab_size=" in config and len(config) < 150
    file = jq.gguf.read(models.demo_path())
    nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
    assert repr(file) == f"GGUFFile(llama, {len(file.tensors)} tensors, {nbytes} bytes)"
    output = Output([1, 2], "x" * 100, "length", Timings())
    assert repr(output) == f"Output({'x' * 57 + '...'!r}, 2 tokens, finish_reason='length')"
    short = Output([1], None, "end", Timings())
    assert repr(short) == "Output(None, 1 token, finish_reason='end')"
    vector = Output([], None, "length", Timings(), embedding=np.ones(4, np.float32))
    assert repr(vector) == "Output(embedding of shape (4,))"


def test_models_of_different_configs_have_different_programs():
    """The key of programs has all fields, also those that the config's representation lacks."""
    loaded = model(TEXT)
    other = dataclasses.replace(loaded.config, norm_eps=loaded.config.norm_eps * 2)
    assert repr(other) == repr(loaded.config)
    from jax_q4k.models.runner.model import _fingerprint

    about = None, "", []
    assert _fingerprint(other, *about) != _fingerprint(loaded.config, *about)
