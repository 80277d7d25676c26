"""What handlers say to operands that don't fit, and what an installation without a library says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import native
from jax_q4k.native import build

needs_library = pytest.mark.skipif(not native.available(), reason=native.problem() or "the library is there")
FLOATS = jax.ShapeDtypeStruct((2, 8), jnp.float32)
PRODUCTS = dict(formats="Q4_K", biases="0", activation="", quantized=True, norm=False, eps=0.0, residual=False)
X, PLANE = np.zeros((2, 256), np.float32), np.zeros((8, 1, 144), np.uint8)


@needs_library
@pytest.mark.parametrize(
    "operands, changes, message",
    [
        ([X], {}, "a plane of the weights is missing"),
        ([X, PLANE, X], {}, "too many operands"),
        ([X, PLANE[:, :, :143]], {}, r"a plane of the weights has shape \(8, 1, 143\); it must be \(-1, -1, 144\)"),
        ([X[:, :128], PLANE], {}, "weights have k=256; x has 128"),
        ([X.astype(np.int8), PLANE], {}, "x has an element type"),
        ([X, PLANE], {"formats": "Q4_X"}, "unknown format Q4_X"),
        ([X, PLANE], {"formats": "Q4_K,Q4_K"}, "is missing"),
        ([X, PLANE], {"biases": "00"}, "biases or residual"),
        ([X, PLANE], {"activation": "silu"}, "gate and up"),
        ([X, PLANE, X], {"residual": True}, r"residual has shape \(2, 256\); it must be \(2, 8\)"),
    ],
)
def test_products_refuse_what_does_not_fit(operands, changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        native.call("products", [FLOATS], *map(jnp.asarray, operands), **PRODUCTS | changes)


@needs_library
def test_a_result_of_another_shape_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"y has shape \(2, 9\); it must be \(2, 8\)"):
        native.call("products", [jax.ShapeDtypeStruct((2, 9), jnp.float32)], X, PLANE, **PRODUCTS)


@needs_library
@pytest.mark.parametrize(
    "heads, page_size, head_dim, message",
    [
        (1, 16, 24, "head_dim must be a multiple of 16"),
        (1, 8, 32, "page_size must be a multiple of 16"),
        (0, 16, 32, "at least one head"),
    ],
)
def test_pages_without_kernels_are_refused(heads, page_size, head_dim, message):
    q, lens = np.zeros((1, 2, head_dim), np.float32), np.ones(1, np.int32)
    pages, tables = np.zeros((3, heads, page_size, head_dim), np.float32), np.zeros((1, 2), np.int32)
    struct = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    options = dict(scale=1.0, soft_cap=0.0, window=0, contiguous=False, sinks=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        native.call("paged_attention", [struct], q, pages, pages, tables, lens, **options)


def test_without_a_library_operations_say_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_load", lambda: (None, f"{build.LIBRARY} was not built; {build.HOW_TO}"))
    w = jq.QuantizedArray("Q4_K", (8, 256), [jnp.asarray(PLANE)])
    with pytest.raises(jq.UnavailableError, match="was not built.*python -m jax_q4k.native.build"):
        jq.matmul(X[:, :256] + 2.5, w, implementation="native")
    assert not native.available() and native.kernels() is None
    assert "was not built" in str(jq.explain(lambda x: jq.matmul(x, w, implementation="native"), X))


def test_without_a_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler.*no-such-compiler"):
        build.compile_library(tmp_path / build.LIBRARY)
    assert not list(tmp_path.iterdir())


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="name='sse9'"):
        native.select("sse9")
