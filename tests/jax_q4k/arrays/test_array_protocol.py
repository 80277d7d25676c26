"""QuantizedArray next to arrays: operators, conversions, array properties, bad planes."""

from __future__ import annotations

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.format_lists import PRODUCTS

import jax_q4k as jq

from ..ops.random_weights import random_weights

W = random_weights("Q6_K", 24, 512)
X = np.random.default_rng(1).standard_normal((3, 512), np.float32)


@pytest.mark.parametrize(
    "kind", [np.asarray, jnp.asarray, np.ndarray.tolist], ids=["numpy", "jax", "list"]
)
def test_x_times_the_transposed_view_is_matmul(kind):
    want = jq.matmul(X, W)
    np.testing.assert_array_equal(kind(X) @ W.T, want)


def test_the_view_is_an_argument_of_programs():
    want = jq.matmul(X, W)
    np.testing.assert_array_equal(jax.jit(lambda x, w: x @ w.T)(X, W), want)
    np.testing.assert_array_equal(jax.jit(lambda x, v: x @ v)(X, W.T), want)
    stacked = jax.tree.map(lambda plane: jnp.stack([plane, plane[::-1]]), W)
    got = jax.vmap(lambda w: X @ w.T)(stacked)
    np.testing.assert_array_equal(got, [want, want[:, ::-1]])
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(W.T)] == [
        ".T.ql",
        ".T.qh",
        ".T.scales",
        ".T.d",
    ]


def test_the_view_is_differentiable_in_x():
    with jq.implementation("xla"):
        got = jax.grad(lambda x: jnp.sum(jnp.sin(x @ W.T)))(X)
        want = jax.grad(lambda x: jnp.sum(jnp.sin(jq.matmul(x, W))))(X)
    np.testing.assert_array_equal(got, want)


def test_the_view_says_its_shape():
    view = W.T
    assert (view.shape, view.ndim, view.dtype) == ((512, 24), 2, np.float32)
    assert view.T is W
    assert repr(view) == repr(W) + ".T"
    np.testing.assert_array_equal(view.dequantize(), W.dequantize().T)
    assert view.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


def test_only_two_axes_have_a_view():
    with pytest.raises(ValueError, match=r"w has shape \(1, 24, 512\); w.T needs two axes"):
        W[None].T  # noqa: B018
    with pytest.raises(ValueError, match=r"w has shape \(512,\)"):
        W[0].T  # noqa: B018


@pytest.mark.parametrize(
    "function",
    [
        lambda: X @ W,
        lambda: jnp.asarray(X) @ W,
        lambda: jax.jit(lambda x, w: x @ w)(X, W),
        lambda: X + W,
        lambda: jnp.asarray(X) + W,
        lambda: jnp.dot(X, W),
        lambda: jnp.einsum("mk,nk->mn", X, W),
        lambda: jnp.asarray(W),
        lambda: jnp.stack([W, W]),
        lambda: np.asarray(W),
        lambda: np.array(W),
        lambda: np.asarray(W, np.float32),
        lambda: np.dot(X, W),
        lambda: jax.lax.dot_general(X, W, (((1,), (1,)), ((), ()))),
        lambda: jnp.concatenate([W, W]),
        lambda: jnp.zeros_like(W),
        lambda: jnp.full_like(W, 2),
        lambda: X * W,
        lambda: W - X,
        lambda: 2 * W,
        lambda: -W,
        lambda: W @ W,
        lambda: W < X,
        lambda: bool(W),
        lambda: bool(W.T),
        lambda: jnp.dot(X, W.T),
        lambda: jnp.matmul(X, W.T),
        lambda: jax.lax.dot_general(X, W.T, (((1,), (0,)), ((), ()))),
        lambda: jnp.zeros_like(W.T),
        lambda: jnp.asarray(W.T),
        lambda: X + W.T,
        lambda: jnp.asarray(X) * W.T,
        lambda: W.T @ X.T,
        lambda: np.asarray(W.T),
    ],
)
def test_conversions_say_what_to_use(function):
    with pytest.raises(TypeError) as error:
        function()
    message = str(error.value.__cause__ or error.value)
    assert "w.dequantize()" in message and "packed" in message and len(message) < 270


def test_numpy_multiplies_by_the_view():
    x = np.asarray(X)
    for got in (x @ W.T, np.matmul(x, W.T)):
        np.testing.assert_array_equal(got, jq.matmul(X, W))
    for refused in (lambda: np.add(x, W.T), lambda: np.matmul(W.T, x), lambda: x * W.T):
        with pytest.raises(TypeError, match="use x @ w.T or jq.matmul"):
            refused()


def test_einsum_of_the_view_says_what_to_use():
    with pytest.raises(TypeError, match=r"packed.*: use x @ w.T or jq.matmul\(x, w\)"):
        jnp.einsum("mk,kn->mn", X, W.T)


def test_stacking_is_explained():
    with pytest.raises(TypeError) as error:
        jnp.stack([W, W])
    (code,) = re.findall(r"jax.tree.map\(.*\)(?= stacks)", str(error.value))
    stack = eval(code, {"jax": jax, "jnp": jnp, "w": W, "v": W})
    assert stack.shape == (2, *W.shape)


def test_numpys_functions_refuse_packed_weights():
    with pytest.raises(TypeError, match="__array_ufunc__=None"):
        np.add(X, W)


def test_a_view_is_no_array_and_no_weight():
    with pytest.raises(TypeError, match=r"\.T is packed, .* or w.dequantize\(\).T"):
        np.asarray(W.T)
    with pytest.raises(TypeError, match="w is a transposed view, .*; it must be the array itself"):
        jq.matmul(X, W.T)
    with pytest.raises(TypeError, match="w is a transposed view"):
        jq.dequantize(W.T)


def test_a_stack_of_matrices_is_vmaps():
    with pytest.raises(
        ValueError, match=r"w has shape \(1, 24, 512\); .* \(n, k\); .*by index=, or use jax.vmap"
    ):
        jq.matmul(X, W[None])


def test_properties_of_an_array():
    assert W.dtype == np.float32 == W.dequantize().dtype
    assert W.sharding == W.planes[0].sharding
    assert W.devices() == {jax.devices()[0]}
    assert W.block_until_ready() is W
    assert W.nbytes == 24 * 2 * 210


@pytest.mark.parametrize("name", PRODUCTS)
def test_planes_are_attributes_as_key_paths_name_them(name):
    w = random_weights(name, 4, 256)
    for path, plane in jax.tree_util.tree_leaves_with_path(w):
        assert getattr(w, path[0].name) is plane
        assert not hasattr(jq.QuantizedArray, path[0].name)  # it would hide the attribute


@pytest.mark.parametrize("w, kind", [(W, "QuantizedArray"), (W.T, "TransposedArray")])
def test_attributes_of_arrays_have_a_hint(w, kind):
    with pytest.raises(AttributeError) as error:
        w.astype  # noqa: B018
    assert str(error.value) == (
        f"{kind!r} object has no attribute 'astype': it is packed; w.dequantize(dtype) is an array "
        "of numbers"
    )
    with pytest.raises(AttributeError, match=r"'reshape': it is packed; w.dequantize\(\) is"):
        w.reshape(-1)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'$"):
        w.no_such_name  # noqa: B018
    assert not hasattr(w, "reshape") and getattr(w, "sum", None) is None


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_copies(copied):
    assert copied(W).to_gguf_bytes() == W.to_gguf_bytes()
    assert copied(W.T).T.to_gguf_bytes() == W.to_gguf_bytes()


def test_is_quantized():
    assert jq.is_quantized(W) and not jq.is_quantized(X) and not jq.is_quantized(W.T)
    params = {"w": W, "b": jnp.ones(3)}
    half = jax.tree.map(
        lambda a: a if jq.is_quantized(a) else a.astype(jnp.bfloat16),
        params,
        is_leaf=jq.is_quantized,
    )
    assert half["w"] is W and half["b"].dtype == jnp.bfloat16


def cast(w, dtype):
    """Casts planes like a `tree.map` over all leaves of params."""
    return jax.tree.map(lambda plane: plane.astype(dtype), w)


OPERATIONS = {
    "matmul": lambda w: jq.matmul(X, w),
    "linear": lambda w: jq.linear(X, [w]),
    "embedding": lambda w: jq.embedding(jnp.array([1]), w),
    "dequantize": jq.dequantize,
    "view": lambda w: X @ w.T,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_operations_refuse_cast_planes_when_traced(operation, dtype):
    expected = (
        f'w: plane "block" of Q4_K is {dtype}, not uint8: was params mapped leaf by leaf\\? '
        "use is_leaf=jq.is_quantized"
    )
    w = cast(random_weights("Q4_K", 512, 512), dtype)
    with pytest.raises(TypeError, match=expected):
        jax.eval_shape(operation, w)


def test_the_refused_plane_is_named():
    w = random_weights("Q8_0", 8, 512)
    mixed = jax.tree.unflatten(jax.tree.structure(w), [w.qs, w.d.astype(jnp.float32)])
    with pytest.raises(TypeError, match='up: plane "d" of Q8_0 is float32, not uint8'):
        jq.gated_matmul(X, w, mixed)
    assert repr(mixed) == "QuantizedArray(Q8_0, shape=(8, 512), not uint8: d is float32)"
    without = jax.tree.map(lambda _: None, w)
    with pytest.raises(TypeError, match='w: plane "qs" of Q8_0 is None, not uint8'):
        jq.matmul(X, without)
    with pytest.raises(AttributeError, match="has no shape: its planes have none"):
        without.shape  # noqa: B018


def test_cast_planes_are_no_weights_and_no_bytes(tmp_path):
    w = cast(W, jnp.float32)
    for use in (w.to_gguf_bytes, w.dequantize, lambda: jax.jit(type(w).dequantize)(w)):
        with pytest.raises(TypeError, match='^plane "ql" of Q6_K is float32, not uint8'):
            use()
    with pytest.raises(TypeError, match="tensor 'a.weight': plane \"ql\" of Q6_K is float32"):
        jq.gguf.write(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"a.weight": w})
    assert not list(tmp_path.iterdir())


def test_programs_of_packed_weights_are_exported():
    pytest.importorskip("flatbuffers", reason="jax.export writes by flatbuffers")
    jitted = jax.jit(lambda x, w, view: (jq.matmul(x, w), x @ view, w[1:3]))
    program = export.export(jitted, disabled_checks=jq.EXPORT_CHECKS)(X, W, W.T)
    y, z, part = export.deserialize(program.serialize()).call(X, W, W.T)
    np.testing.assert_array_equal(y, jq.matmul(X, W))
    np.testing.assert_array_equal(z, y)
    assert part.to_gguf_bytes() == W[1:3].to_gguf_bytes()
