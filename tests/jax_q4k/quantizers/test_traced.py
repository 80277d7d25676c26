"""`quantize` inside jit, vmap and eval_shape, and arrays without values."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_q4k as jq
from jax_q4k import quantizers
from ptx_kernels import formats

W = np.random.default_rng(0).standard_normal((3, 512), np.float32)
FORMATS = [name for name, found in quantizers._found().items() if found.traced is not None]


def different(a: jq.QuantizedArray, b: jq.QuantizedArray) -> float:
    """Returns the share of weights that differ."""
    assert (a.format, a.shape) == (b.format, b.shape)
    return float(np.mean(np.asarray(a.dequantize()) != np.asarray(b.dequantize())))


@pytest.mark.slow("compiles a search for each format", quick=["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_program_quantizes_as_the_host_does(format):
    got = jax.jit(lambda w: jq.quantize(w, format))(W)
    want = jq.quantize(W, format)
    assert different(got, want) <= 0.1
    error, least = (float(np.mean((np.asarray(w.dequantize()) - W) ** 2)) for w in (got, want))
    assert error <= 1.01 * least


def test_one_block_after_another(monkeypatch):
    """More blocks than a chunk has, of which the last is not full."""
    monkeypatch.setattr(quantizers, "CHUNK", 4 * 32)
    importance = np.linspace(
        0, 2, 96, dtype=np.float32
    )  # three blocks, so that chunks begin in rows
    w = W[:, :96]
    got = jax.jit(lambda w, i: jq.quantize(w, "Q4_0", i))(w, importance)
    assert different(got, jq.quantize(w, "Q4_0", importance)) == 0
    assert different(got, jq.quantize(w, "Q4_0")) > 0


def test_vmap():
    stack = np.stack([W, -W])
    for axis, moved in ((0, stack), (1, np.moveaxis(stack, 0, 1))):
        got = jax.vmap(lambda w: jq.quantize(w, "Q8_0"), in_axes=axis)(moved)
        assert different(got, jq.quantize(stack, "Q8_0")) == 0
    importance = np.ones((2, 512), np.float32)
    both = jax.vmap(lambda w, i: jq.quantize(w, "Q8_0", i))(stack, importance)
    assert different(both, jq.quantize(stack, "Q8_0")) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30], ids=["nan", "infinite", "beyond the range"])
def test_blocks_of_bad_values_are_not_finite(bad):
    w = W.copy()
    w[1, 40] = bad
    got = np.asarray(jax.jit(lambda w: jq.quantize(w, "Q8_0"))(w).dequantize())
    assert not np.isfinite(got[1, 32:64]).any()
    assert np.isfinite(got).sum() == got.size - 32


def test_blocks_of_a_bad_importance_are_not_finite():
    importance = np.ones(512, np.float32)
    importance[3] = -1
    got = np.asarray(jax.jit(lambda i: jq.quantize(W, "Q8_0", i))(importance).dequantize())
    assert not np.isfinite(got[:, :32]).any() and np.isfinite(got[:, 32:]).all()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((jnp.ones((2, 32)), "q4_k"), ValueError, "did you mean 'Q4_K'"),
        ((jnp.ones((2, 32)), "Q4_K"), ValueError, "k=32 must be a multiple of 256"),
        ((jnp.ones((2, 32), int), "Q8_0"), TypeError, "w has dtype int32"),
        ((jnp.ones((2, 32)), "Q8_0", jnp.ones(31)), ValueError, r"importance has shape \(31,\)"),
    ],
)
def test_wrong_arguments_are_refused_when_traced(arguments, error, message):
    w, format, *importance = arguments
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda w: jq.quantize(w, format, *importance), w)


def test_there_is_no_derivative():
    with pytest.raises(NotImplementedError, match="quantize has no derivative"):
        jax.grad(lambda w: jq.quantize(w, "Q8_0").dequantize().sum())(W)
    kept = jax.grad(
        lambda w: (w * jq.quantize(jax.lax.stop_gradient(w), "Q8_0").dequantize()).sum()
    )(W)
    np.testing.assert_allclose(kept, W, atol=0.05)


def test_a_format_that_needs_values():
    """It has shapes, but no program."""
    function = jax.jit(lambda w: jq.quantize(w, "IQ2_S"))
    assert jax.eval_shape(function, W).shape == W.shape
    with pytest.raises(TypeError, match="to IQ2_S needs its values: .* IQ4_NL, MXFP4, Q4_0"):
        function(W)


@pytest.mark.parametrize("format", formats.names())
def test_arrays_without_values(format):
    abstract = jq.QuantizedArray.abstract(format, (2, 3, 512))
    zeros = jq.QuantizedArray.zeros(format, (2, 3, 512))
    assert (
        abstract.shape == zeros.shape == (2, 3, 512) and abstract.format == zeros.format == format
    )
    assert not np.asarray(zeros.dequantize()).any()
    shapes = jax.tree.map(lambda plane: (plane.shape, plane.dtype), (abstract, zeros))
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert jax.eval_shape(jq.QuantizedArray.dequantize, abstract).shape == (2, 3, 512)


@pytest.mark.parametrize("make", [jq.QuantizedArray.abstract, jq.QuantizedArray.zeros])
def test_arrays_without_values_check_their_arguments(make):
    with pytest.raises(ValueError, match="format='q4_K_M' must be one of .*; did you mean 'Q4_K'"):
        make("q4_K_M", (2, 256))
    with pytest.raises(ValueError, match="k=32 must be a multiple of 256"):
        make("Q4_K", (2, 32))


def test_an_abstract_array_has_a_sharding():
    mesh = jax.make_mesh((1,), ("tp",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    abstract = jq.QuantizedArray.abstract("Q6_K", (2, 256), sharding=split)
    assert abstract.sharding == split and all(p.sharding == split for p in abstract.planes)


@pytest.mark.parametrize(
    "name, meant",
    [("q4_k", "Q4_K"), ("Q4_K_M", "Q4_K"), ("q8-0", "Q8_0"), ("IQ4-xs", "IQ4_XS"), ("Q4_1", None)],
)
def test_similar_names(name, meant):
    known = [n for n in formats.names() if n != "Q4_1"]
    message = formats.unknown(name, known)
    assert message.startswith(f"format={name!r} must be one of ")
    assert message.endswith(f"; did you mean {meant!r}?" if meant else known[-1])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "blocks"])
def test_shards_stay_in_place(spec, kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    w = jnp.asarray(W[:2])
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        sharding = NamedSharding(mesh, spec)
        got = jax.jit(lambda w: jq.quantize(w, "Q4_0"))(jax.device_put(w, sharding))
    assert all(plane.sharding.is_equivalent_to(sharding, 3) for plane in got.planes)
    assert different(jax.device_get(got), jq.quantize(w, "Q4_0")) == 0


def test_a_block_is_not_split():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    w = jax.device_put(W[:2, :32], NamedSharding(mesh, P(None, "x")))
    got = jax.jit(lambda w: jq.quantize(w, "Q4_0"))(w)
    assert different(jax.device_get(got), jq.quantize(W[:2, :32], "Q4_0")) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_programs_have_no_constant_arrays(format):
    """XLA's partitioner would refuse them."""
    with jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(lambda w: quantizers.traced(w, format))(W)
    assert not program.consts
