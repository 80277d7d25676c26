"""Operands with unsupported shardings: errors are raised before anything runs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_q4k as jq

from ..ops.random_weights import random_weights

W, X = random_weights("Q4_K", 8, 1024), jnp.ones((8, 1024))  # four blocks of columns
SIX = random_weights("Q6_K", 8, 1024)


def mesh(kind=AxisType.Explicit, shape=(2, 4), names=("dp", "tp")):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def put(array, spec, on=None):
    return jax.device_put(array, NamedSharding(on or mesh(), spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("nope"), "axis: nope of P.*not found in mesh: .'dp', 'tp'"),
        (P(None, ("dp", "tp")), "axis 1 is partitioned 8 times.*size 4"),
    ],
    ids=["unknown axis", "blocks that do not divide"],
)
def test_packed_weights_are_not_put_there(spec, message):
    """Uses JAX's error message, for the planes."""
    with pytest.raises(ValueError, match=message):
        put(W, spec)


OTHERS = {
    "other axes": lambda a: put(a, P("x"), mesh(shape=(8,), names=("x",))),
    "fewer devices": lambda a: put(a, P("tp"), mesh(shape=(4,), names=("tp",))),
    "whole on other axes": lambda a: put(a, P(), mesh(shape=(8,), names=("x",))),
    "automatic axes": lambda a: put(a, P("dp"), mesh(AxisType.Auto)),
    "one device": lambda a: jax.device_put(a, jax.devices()[3]),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("other", OTHERS)
def test_operands_on_different_meshes(other, compiled):
    x, w = OTHERS[other](X), put(W, P("tp"))
    message = "different meshes|mesh should be the same|incompatible devices"
    with pytest.raises(ValueError, match=message):
        (jax.jit(jq.matmul) if compiled else jq.matmul)(x, w)


def test_planes_on_different_meshes():
    planes = list(SIX.planes)
    planes[1] = put(planes[1], P("x"), mesh(shape=(8,), names=("x",)))
    planes[0] = put(planes[0], P("tp"))
    with pytest.raises(ValueError, match="dequantize: operands lie on different meshes"):
        jq.dequantize(jq.QuantizedArray("Q6_K", SIX.shape, planes))


SPLIT_BYTES = re.escape(
    'w: plane "block" of Q4_K has shape (8, 4, 36), not (8, 4, 144): split rows or whole blocks'
)
IN_SHARD_MAP = {
    "matmul": lambda x, w: jq.matmul(x, w),
    "dequantize": lambda x, w: jq.dequantize(w),
    "embedding": lambda x, w: jq.embedding(jnp.arange(2), w),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("call", IN_SHARD_MAP)
def test_a_block_is_never_split(call, check):
    """Inside `jax.shard_map`, 36 of 144 bytes would be decoded as if they were a block."""
    mapped = jax.shard_map(
        IN_SHARD_MAP[call],
        mesh=mesh(AxisType.Auto),
        in_specs=(P(), P(None, None, "tp")),
        out_specs=P(),
        check_vma=check,
    )
    with pytest.raises(TypeError, match=SPLIT_BYTES):
        jax.eval_shape(mapped, X, W)


def test_planes_that_are_split_otherwise_than_each_other():
    specs = jq.QuantizedArray.__new__(jq.QuantizedArray)
    specs.format, specs.planes = "Q6_K", (P("tp"), P("tp"), P(), P("tp"))
    mapped = jax.shard_map(
        jq.dequantize,
        mesh=mesh(AxisType.Auto),
        in_specs=(specs,),
        out_specs=P("tp"),
        check_vma=False,
    )
    with pytest.raises(TypeError, match=r'plane "\w+" of Q6_K has shape \(8, 4, \d+\), not \(2, 4'):
        jax.eval_shape(mapped, SIX)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_bytes_that_lie_split_are_gathered(kind):
    """XLA gathers the bytes of a block that only a sharding splits, so the result is right."""
    w = put(W, P(None, None, "tp"), mesh(kind))
    np.testing.assert_array_equal(jax.jit(jq.dequantize)(w), jq.dequantize(W))


def test_an_unknown_axis_of_shard_map():
    with pytest.raises(ValueError, match="in_specs.1. refers to 'nope'"):
        jax.shard_map(jq.matmul, mesh=mesh(), in_specs=(P(), P("nope")), out_specs=P())(X, W)
