"""JAX's strict modes: no implicit promotion, and no implicit transfer between host and device."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import in_64_bit_mode, nmse
from support.implementations import NATIVE

import jax_q4k as jq
from jax_q4k import native
from jax_q4k.ops.op import OPS

from .cases import CASES, FORMATS, IDS, NORM, WEIGHT, X, derivatives


@contextlib.contextmanager
def strict(transfers="disallow"):
    """All strict modes together."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard(transfers),
    ):
        yield


@pytest.mark.slow("compiles a program for each case", quick=["append_kv-*"])
@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("name", CASES)
def test_operations_and_their_derivatives(name, implementation):
    function, arguments, _ = CASES[name]
    with jq.implementation(implementation), strict():
        for whole, given in [(function, arguments), *derivatives(name)]:
            jax.block_until_ready(jax.jit(whole)(*given))
        jax.block_until_ready(function(*arguments))
    # Eager derivatives of JAX's own `jnp.mean` transfer constants to the device.
    with jq.implementation(implementation), strict(transfers="allow"):
        for whole, given in derivatives(name):
            jax.block_until_ready(whole(*given))


def test_every_operation_is_here():
    found = {
        equation.primitive.name
        for function, arguments, _ in CASES.values()
        for equation in jax.make_jaxpr(function)(*arguments).jaxpr.eqns
        if equation.primitive in OPS
    }
    ours = {op.name for op in OPS.values() if op.reference.__module__.startswith("jax_q4k.")}
    assert found == ours


@pytest.mark.slow("repeats for each format what others do for all of them", quick=["Q4_K", "Q8_0"])
@pytest.mark.parametrize("format", FORMATS)
def test_quantizers(format):
    x = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256) ** 3
    importance = np.linspace(0, 1, 256)
    want = jq.quantize(x, format, importance)
    with strict():
        got = jq.quantize(x, format, importance)
        floats = got.dequantize(), got.dequantize(jnp.bfloat16)
    assert got.to_gguf_bytes() == want.to_gguf_bytes()
    for values in floats:
        np.testing.assert_array_equal(values, want.dequantize(values.dtype))


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_vmap_where_ranks_are_not_promoted(implementation):
    """The vmap rules trace references, too."""
    rows = jnp.stack([X, -X])
    norms = jnp.stack([NORM, NORM])
    function = jax.vmap(lambda x, w: jq.rms_norm(x, w, eps=1e-5))
    with jq.implementation(implementation), jax.numpy_rank_promotion("raise"):
        got = function(rows, norms)
        looked_up = jax.vmap(jq.embedding, in_axes=(0, None))(IDS.reshape(3, 1), WEIGHT)
    np.testing.assert_allclose(got[0], jq.rms_norm(X, NORM, eps=1e-5), rtol=1e-6)
    assert looked_up.shape == (3, 1, 256)


def dtypes():
    """Case -> dtypes of its results and of its derivative's, as lowered."""
    found = {}
    for implementation in ("xla", "native") if native.available() else ("xla",):
        for name, (function, arguments, _) in CASES.items():
            for i, (whole, given) in enumerate([(function, arguments), *derivatives(name)[:1]]):
                with jq.implementation(implementation):
                    results = jax.tree.leaves(jax.jit(whole).lower(*given).out_info)
                found[f"{implementation}, {name}, {i}"] = [str(leaf.dtype) for leaf in results]
    return found


def values():
    """Case -> its results in plain JAX, for cases that compute with integers."""
    with jq.implementation("xla"):
        return {
            name: [
                np.asarray(leaf, np.float32).tolist()
                for leaf in jax.tree.leaves(jax.jit(CASES[name][0])(*CASES[name][1]))
            ]
            for name in ("embedding Q4_K", "top_k", "rope_append", "paged_attention int8")
        }


def dtypes_and_values():
    return dtypes(), values()


@pytest.mark.slow("compiles every operation in a process of its own")
def test_64_bit_mode_gives_the_same_results():
    wide_dtypes, wide = in_64_bit_mode(dtypes_and_values)
    assert wide_dtypes == dtypes()
    for name, results in values().items():
        for got, want in zip(wide[name], results, strict=True):
            assert nmse(got, want) <= 1e-12
