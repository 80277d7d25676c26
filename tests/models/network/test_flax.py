"""Packed weights with Flax, optax, orbax, pickle and jax.export."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from jax import export
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.network.layers import linear

from ..golden_files import model

TOKENS = jnp.array([[1, 5, 7, 2]])
X = np.random.default_rng(0).standard_normal((2, 256), np.float32)


def decoder() -> models.Decoder:
    return model("qwen2-bias").decoder()  # norms and biases


def packed(seed: int = 0) -> jq.QuantizedArray:
    return jq.quantize(jax.random.normal(jax.random.key(seed), (8, 256)), "Q6_K")


def loss(decoder: models.Decoder) -> jax.Array:
    """Mean cross-entropy of TOKENS after the first, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(
        decoder(TOKENS[:, :-1]), TOKENS[:, 1:]
    ).mean()


def test_packed_weights_are_no_params():
    modules = decoder()
    query = modules.layers[0].attention.query
    assert type(query.weight) is models.Packed and type(query.bias) is nnx.Param
    assert type(modules.embedding) is models.Packed and type(modules.norm.weight) is nnx.Param
    params = jax.tree.leaves(nnx.state(modules, nnx.Param))
    assert len(params) == 5 * len(modules.layers) + 1  # two norms and three biases a layer
    assert all(leaf.dtype == jnp.float32 for leaf in params)
    planes = jax.tree.leaves(nnx.state(modules, models.Packed))
    assert planes and all(leaf.dtype == jnp.uint8 for leaf in planes)


def test_float_weights_are_params():
    modules = decoder()
    layer = type(modules.norm)  # any module class other than Linear
    assert layer.__name__ == "RMSNorm"
    linear = type(modules.layers[0].mlp.up)(jnp.ones((4, 8)))
    assert type(linear.weight) is nnx.Param


@pytest.mark.slow("trains several steps")
def test_gradients_and_optimizers_work_as_written():
    modules = decoder()
    before, bytes_before = (
        jax.tree.map(jnp.copy, nnx.state(modules, kind)) for kind in (nnx.Param, models.Packed)
    )
    gradient = nnx.grad(loss)(modules)
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.state(modules, nnx.Param))
    optimizer = nnx.Optimizer(modules, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(modules, optimizer):
        value, gradient = nnx.value_and_grad(loss)(modules)
        optimizer.update(modules, gradient)
        return value

    values = [float(step(modules, optimizer)) for _ in range(5)]
    assert values == sorted(values, reverse=True) and values[-1] < values[0] - 0.1
    moved = [
        bool((old != new).any())
        for old, new in zip(
            jax.tree.leaves(before), jax.tree.leaves(nnx.state(modules, nnx.Param)), strict=True
        )
    ]
    assert all(moved)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(modules, models.Packed), bytes_before)
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim]
    assert not any(leaf.dtype == jnp.uint8 for leaf in moments)


class Product(nnx.Module):
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize("kind", [nnx.Param, models.Packed, nnx.Variable, lambda w: w])
def test_a_module_of_ones_own(kind):
    w = packed()
    module, want = Product(kind(w)), jq.matmul(X, w)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, X), want)
    assert len(jax.tree.leaves(nnx.state(module))) == 4
    np.testing.assert_array_equal(module(X), want)


def test_a_module_beside_packed_ones():
    """Projections of one input, one of which is not the model's own module."""
    mlp = decoder().layers[0].mlp
    n, k = mlp.up.weight.shape
    lora = nnx.LoRA(k, 2, n, base_module=mlp.up, rngs=nnx.Rngs(0))
    lora.lora_b[...] = jnp.ones((2, n))
    x = jnp.asarray(X)
    for modules in ((mlp.gate, lora), (lora, mlp.gate)):
        for got, module in zip(linear(x, *modules, norm=mlp.norm), modules, strict=True):
            assert nmse(got, module(mlp.norm(x))) <= 1e-12
    assert nmse(lora(x), mlp.up(x)) >= 1e-3


def test_operations_take_variables():
    w, weight, bias = packed(), jnp.linspace(1, 2, 256), jnp.arange(8.0)
    variable = models.Packed(w)
    np.testing.assert_array_equal(jq.matmul(X, variable), jq.matmul(X, w))
    np.testing.assert_array_equal(
        jq.rms_norm_matmul(X, nnx.Param(weight), variable, eps=1e-6, bias=nnx.Param(bias)),
        jq.rms_norm_matmul(X, weight, w, eps=1e-6, bias=bias),
    )
    ids = jnp.array([3, 1])
    np.testing.assert_array_equal(jq.embedding(ids, variable), jq.embedding(ids, w))
    table = w.dequantize()
    np.testing.assert_array_equal(jq.embedding(ids, nnx.Param(table)), jq.embedding(ids, table))
    np.testing.assert_array_equal(jq.dequantize(variable), table)
    with pytest.raises(TypeError, match=r"x is a QuantizedArray\(Q6_K.*; it must be a float array"):
        jq.matmul(variable, w)


def test_a_variable_is_indexed_as_flax_wants_it():
    w = packed()
    variable = nnx.Param(w)
    assert variable[...].to_gguf_bytes() == w.to_gguf_bytes()
    assert variable[None].shape == (1, 8, 256) and variable[2:4].shape == (2, 256)


class Dense(linen.Module):
    weight: jq.QuantizedArray

    @linen.compact
    def __call__(self, x):
        return x @ self.param("w", lambda _: self.weight).T


def test_linen():
    dense = Dense(packed())
    variables = dense.init(jax.random.key(0), X)
    np.testing.assert_array_equal(dense.apply(variables, X), jq.matmul(X, packed()))
    table = dense.tabulate(jax.random.key(0), X, console_kwargs={"width": 120})
    assert "Q6_K:" in table and "scales:" in table and "1,680" in table  # bytes of w


def test_flax_serialization():
    variables = {"params": {"w": packed(), "b": np.arange(3.0)}}
    stored = serialization.to_bytes(variables)
    target = {"params": {"w": packed(seed=1), "b": np.zeros(3)}}
    for like in (target, jax.eval_shape(lambda: target)):
        back = serialization.from_bytes(like, stored)
        assert back["params"]["w"].to_gguf_bytes() == packed().to_gguf_bytes()
    alone = jq.from_planes(serialization.msgpack_restore(stored))
    assert alone["params"]["w"].to_gguf_bytes() == packed().to_gguf_bytes()
    target["params"]["w"] = jq.quantize(jnp.ones((8, 256)), "Q4_K")
    with pytest.raises(ValueError, match="the target is Q4_K; the state holds Q6_K"):
        serialization.from_bytes(target, stored)
    with pytest.raises(ValueError, match=r"the target is Q6_K; the state holds no planes: \['a'\]"):
        serialization.from_bytes({"w": packed()}, serialization.to_bytes({"w": {"a": 1}}))


@pytest.fixture(scope="module")
def ocp():
    return pytest.importorskip("orbax.checkpoint", reason="orbax is no dependency of jax-q4k")


def test_orbax_without_a_target(tmp_path, ocp):
    modules = decoder()
    state = nnx.state(modules)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        stored = checkpointer.restore(tmp_path / "checkpoint")
    restored = nnx.restore_int_paths(jq.from_planes(stored))
    assert jq.is_quantized(restored["embedding"])
    assert restored["embedding"].shape == modules.embedding.get_value().shape
    graph, empty = nnx.split(nnx.eval_shape(decoder))
    nnx.replace_by_pure_dict(empty, restored)
    np.testing.assert_array_equal(nnx.merge(graph, empty)(TOKENS), modules(TOKENS))


def test_orbax_with_a_target(tmp_path, ocp):
    graph, state = nnx.split(decoder())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    np.testing.assert_array_equal(nnx.merge(graph, restored)(TOKENS), decoder()(TOKENS))


@pytest.mark.slow("compiles several programs", quick=["<lambda>"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_is_the_model(copied):
    original = models.load("demo")
    again = copied(original)
    np.testing.assert_array_equal(again.logits(TOKENS), original.logits(TOKENS))
    assert again.tokenizer.encode("My dear") == original.tokenizer.encode("My dear")
    assert repr(again) == repr(original) and list(again.metadata) == list(original.metadata)
    tokens = [models.generate(m, "My dear", max_new_tokens=4).tokens for m in (original, again)]
    assert tokens[0] == tokens[1]


def test_programs_of_a_model_are_exported():
    pytest.importorskip("flatbuffers", reason="jax.export writes by flatbuffers")
    original = model("llama-gqa")
    for name, (program, arguments) in models.abstract_programs(original).items():
        exported = export.export(program, disabled_checks=jq.EXPORT_CHECKS)(*arguments)
        back = export.deserialize(exported.serialize())
        assert back.in_tree == exported.in_tree and back.out_tree == exported.out_tree, name
        if name == "decode":
            cache = models.PagedCache.create(original.config, 1, 64)
            given = original.weights, jnp.array([3], jnp.int32), cache
            (got, after), (want, _) = back.call(*given), original.decoder().decode(*given[1:])
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            assert isinstance(after, models.PagedCache) and after.context_lens.tolist() == [1]
