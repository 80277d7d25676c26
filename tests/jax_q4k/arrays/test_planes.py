"""from_planes: packed weights from mappings of names to planes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from ptx_kernels import formats

from ..ops.random_weights import random_weights


def planes(w: jq.QuantizedArray) -> dict:
    return {path[0].name: plane for path, plane in jax.tree_util.tree_leaves_with_path(w)}


@pytest.mark.parametrize("name", formats.names())
def test_planes_tell_the_format_and_the_shape(name):
    w = random_weights(name, 6, 512)
    (back,) = jq.from_planes([dict(reversed(planes(w).items()))])
    assert (back.format, back.shape) == (name, (6, 512))
    assert back.to_gguf_bytes() == w.to_gguf_bytes()
    stacked = jax.tree.map(lambda plane: jnp.stack([plane] * 3), w)
    assert jq.from_planes(planes(stacked)).shape == (3, 6, 512)


def test_planes_may_be_of_numpy_or_shapes_alone():
    w = random_weights("Q6_K", 4, 256)
    assert jq.from_planes(jax.tree.map(np.asarray, planes(w))).shape == (4, 256)
    abstract = jq.from_planes(jax.eval_shape(lambda: planes(w)))
    assert (abstract.format, abstract.shape) == ("Q6_K", (4, 256))


def test_other_entries_stay():
    w, other = random_weights("Q8_0", 4, 256), np.ones((2, 3), np.uint8)
    found = planes(w)
    tree = {
        "extra": {**found, "step": 3},
        "missing": {"qs": found["qs"]},
        "cast": {name: plane.astype(jnp.float32) for name, plane in found.items()},
        "narrow": {"qs": found["qs"][..., :8], "d": found["d"]},
        "rows": {"qs": found["qs"][:2], "d": found["d"]},
        "one axis": {"block": np.zeros(144, np.uint8)},
        "others": [other, None, {}, "text", ({"block": other},)],
        "already": w,
    }
    kept = jq.from_planes(tree)
    assert jax.tree.structure(kept) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(tree), strict=True))
