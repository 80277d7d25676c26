"""Dataclasses that `jax.export` serializes."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax import export

from jax_q4k.models.kv_cache import PagedCache

from ..golden_files import model


@pytest.mark.parametrize("context", [None, 100])
def test_static_fields_survive_a_file(context: int | None) -> None:
    pytest.importorskip("flatbuffers")
    cache = PagedCache.shapes(model("llama-gqa").config, 2, 64, dtype="float32", ahead=1)
    cache = dataclasses.replace(cache, shared_context=context)
    exported = export.export(jax.jit(lambda cache: cache))(cache)
    back = export.deserialize(exported.serialize())
    assert back.in_tree == exported.in_tree == jax.tree.structure(((cache,), {}))
