"""Modules of a user as Flax's documentation writes them, with packed weights."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx, serialization

import jax_q4k as jq
from jax_q4k import models

SIZE, LAYERS = 32, 3
X = np.random.default_rng(0).standard_normal((2, SIZE), np.float32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        w = rngs.params.normal((SIZE, SIZE)) / SIZE**0.5
        self.weight = models.Packed(jq.quantize(w, "Q8_0"))
        self.scale = nnx.Param(jnp.ones(SIZE))

    def __call__(self, x):
        return x + self.scale * jnp.tanh(x @ self.weight.T)


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap
def stacked(rngs):
    return Block(rngs)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def through(x, block):
    return block(x)


def raw(module) -> list[bytes]:
    """Returns the bytes of all packed weights."""
    leaves = jax.tree.leaves(nnx.state(module, models.Packed), is_leaf=jq.is_quantized)
    return [leaf.to_gguf_bytes() for leaf in leaves]


def test_restoring_without_building(tmp_path):
    built = Block(nnx.Rngs(0))
    abstract = nnx.eval_shape(lambda: Block(nnx.Rngs(1)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    graph, target = nnx.split(abstract)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(built))
        checkpointer.wait_until_finished()
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "state", target))
    assert raw(restored) == raw(built) and raw(built) != raw(Block(nnx.Rngs(1)))


def test_a_target_by_hand(tmp_path):
    w = jq.quantize(X, "Q8_0")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "w", {"w": w})
        checkpointer.wait_until_finished()
        target = {"w": jq.QuantizedArray.abstract("Q8_0", w.shape)}
        restored = checkpointer.restore(tmp_path / "w", target)
    assert restored["w"].to_gguf_bytes() == w.to_gguf_bytes()


def test_layers_made_by_vmap_run_in_a_scan():
    layers = stacked(nnx.Rngs(0))
    assert layers.weight.get_value().shape == (LAYERS, SIZE, SIZE)
    want = X
    graph, state = nnx.split(layers)
    for i in range(LAYERS):
        want = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(want)
    np.testing.assert_allclose(through(X, layers), want, rtol=1e-5, atol=1e-5)
    gradient = nnx.grad(lambda layers: through(X, layers).sum())(layers)
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [(LAYERS, SIZE)]


def test_states_move_between_modules():
    first, second = Block(nnx.Rngs(0)), Block(nnx.Rngs(1))
    graph, packed, rest = nnx.split(first, models.Packed, ...)
    assert len(jax.tree.leaves(packed)) == 2 and len(jax.tree.leaves(rest)) == 1
    assert raw(nnx.merge(graph, packed, rest)) == raw(first) != raw(second)
    nnx.update(second, packed)
    assert raw(second) == raw(first)
    assert raw(nnx.clone(first)) == raw(first)


def test_a_constructor_inside_jit():
    made, built = nnx.jit(lambda: Block(nnx.Rngs(0)))(), Block(nnx.Rngs(0))
    np.testing.assert_allclose(made(X), built(X), atol=1e-2)


def test_linen_parameters_are_serialized():
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", lambda key: jq.quantize(jax.random.normal(key, (8, SIZE)), "Q8_0"))
            return x @ w.T

    variables = jax.jit(Dense().init)(jax.random.key(0), X)
    zeros = jax.tree.map(jnp.zeros_like, variables)
    restored = serialization.from_bytes(zeros, serialization.to_bytes(variables))
    w, same = (v["params"]["w"] for v in (variables, restored))
    assert w.to_gguf_bytes() == same.to_gguf_bytes() != zeros["params"]["w"].to_gguf_bytes()


ALONE = """
import numpy as np
{imports}
w = jq.quantize(np.ones((2, 32)), "Q8_0")
stored = serialization.to_bytes({{"w": w}})
assert serialization.from_bytes({{"w": w}}, stored)["w"].to_gguf_bytes() == w.to_gguf_bytes()
assert nnx.is_data(w)
"""


@pytest.mark.slow("imports Flax in a process of its own", quick=["*after"])
@pytest.mark.parametrize(
    "imports",
    [
        "import jax_q4k as jq\nfrom flax import nnx, serialization",
        "from flax import nnx, serialization\nimport jax_q4k as jq",
    ],
    ids=["flax after", "flax before"],
)
def test_registration_needs_no_import(imports):
    subprocess.run([sys.executable, "-c", ALONE.format(imports=imports)], check=True)
