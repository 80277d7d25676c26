"""JAX's strict modes: nothing is promoted or moved between host and device without being asked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import NATIVE

import jax_q4k as jq
from jax_q4k.ops.op import OPS

from .cases import CASES, FORMATS, IDS, NORM, WEIGHT, X, derivatives


@contextlib.contextmanager
def strict(transfers="disallow"):
    """All of them at once."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard(transfers),
    ):
        yield


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("name", CASES)
def test_operations_and_their_derivatives(name, implementation):
    function, arguments, _ = CASES[name]
    with jq.implementation(implementation), strict():
        for whole, given in [(function, arguments), *derivatives(name)]:
            jax.block_until_ready(jax.jit(whole)(*given))
        jax.block_until_ready(function(*arguments))
    # Eager derivatives of JAX's own `jnp.mean` bring constants to the device.
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
    """Rules of vmap trace references, too."""
    rows = jnp.stack([X, -X])
    norms = jnp.stack([NORM, NORM])
    function = jax.vmap(lambda x, w: jq.rms_norm(x, w, eps=1e-5))
    with jq.implementation(implementation), jax.numpy_rank_promotion("raise"):
        got = function(rows, norms)
        looked_up = jax.vmap(jq.embedding, in_axes=(0, None))(IDS.reshape(3, 1), WEIGHT)
    np.testing.assert_allclose(got[0], jq.rms_norm(X, NORM, eps=1e-5), rtol=1e-6)
    assert looked_up.shape == (3, 1, 256)


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_64_bit_mode_gives_the_same_results(implementation, tmp_path):
    """In a process of its own: the mode counts from the start."""
    code = f"""
import sys
sys.path[:0] = [{str(os.getcwd())!r}, {os.path.join(os.getcwd(), "tests")!r}]
import jax, numpy as np
from tests.jax_q4k.test_strict_modes import CASES, derivatives, jq
leaves = []
with jq.implementation({implementation!r}):
    for name, (function, arguments, _) in CASES.items():
        for whole, given in [(function, arguments), *derivatives(name)[:1]]:
            leaves += jax.tree.leaves(jax.jit(whole)(*given))
np.savez(sys.argv[1], **{{str(i): np.asarray(leaf.astype("float32")) for i, leaf in
    enumerate(leaves)}})
print([str(leaf.dtype) for leaf in leaves])
"""
    printed = []
    for wide in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"{wide}.npz")],
            env=os.environ | {"JAX_ENABLE_X64": wide, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    with np.load(tmp_path / "0.npz") as narrow, np.load(tmp_path / "1.npz") as wide_:
        for key in narrow:
            np.testing.assert_allclose(wide_[key], narrow[key], rtol=1e-4, atol=1e-4)
