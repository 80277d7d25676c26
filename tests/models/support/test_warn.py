"""Warnings name the line that called the library, through any call path."""

from __future__ import annotations

import inspect

import jax
import pytest
from support.paths import GOLDEN

import jax_q4k
from jax_q4k import models


def test_the_line_that_called():
    mesh = jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4])
    with pytest.warns(UserWarning, match="replicated on each of 4 devices") as caught:
        line = inspect.currentframe().f_lineno + 1
        models.load(GOLDEN / "llama-gqa.Q4_K_M.gguf", mesh=mesh)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_renamed_names_warn_and_work():
    model = models.load("demo")
    with pytest.warns(DeprecationWarning, match="Model.kept is now Model.program_cache") as caught:
        model.kept = folder = object()
    with pytest.warns(DeprecationWarning):
        assert model.kept is model.program_cache is folder
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="jax_q4k.kept is now jax_q4k.cache.program_cache"):
        assert jax_q4k.kept is jax_q4k.cache.program_cache
