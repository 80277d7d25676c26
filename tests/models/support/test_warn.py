"""Warnings name the line that called the library, through any call path."""

from __future__ import annotations

import inspect

import jax
import pytest
from support.paths import GOLDEN

from jax_q4k import models


def test_the_line_that_called():
    mesh = jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4])
    with pytest.warns(UserWarning, match="whole on each of 4 devices") as caught:
        line = inspect.currentframe().f_lineno + 1
        models.load(GOLDEN / "llama-gqa.Q4_K_M.gguf", mesh=mesh)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
