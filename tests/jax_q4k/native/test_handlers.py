"""Errors of handlers for operands that don't fit, and of an installation without the library."""

import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import native
from jax_q4k.native import build, calls

FLOATS = jax.ShapeDtypeStruct((2, 8), jnp.float32)
LINEAR = dict(
    formats="Q4_K", biases="0", activation="", quantized=True, norm=False, eps=0.0, residual=False
)
MLP = LINEAR | dict(formats="Q4_K,Q4_K", down="F32", activation="silu", quantized_down=False)
del MLP["biases"]
X, PLANE, THIN = (
    np.zeros((2, 256), np.float32),
    np.zeros((8, 1, 144), np.uint8),
    np.zeros((256, 8), np.float32),
)


CAUSAL = {"scale": 0.5, "soft_cap": 0.0, "window": 0, "sinks": False}


@needs_native
@pytest.mark.parametrize(
    "operands, changes, message",
    [
        ([X], {}, "a plane of the weights is missing"),
        ([X, PLANE, X], {}, "too many operands"),
        (
            [X, PLANE[:, :, :143]],
            {},
            r"a plane of the weights has shape \(8, 1, 143\); it must be \(-1, -1, 144\)",
        ),
        ([X, PLANE[None]], {}, "index is missing"),
        ([X, PLANE[None], np.float32(0)], {}, "index has an element type"),
        ([X, PLANE[None][:0], np.int32(0)], {}, "a stack of weights is empty"),
        (
            [X, PLANE[None, :, :, :143]],
            {},
            r"a plane of the weights has shape \(1, 8, 1, 143\); it must be \(-1, -1, -1, 144\)",
        ),
        ([X[:, :128], PLANE], {}, "weights have k=256; x has 128"),
        ([X.astype(np.int8), PLANE], {}, "x has an element type"),
        ([X, PLANE], {"formats": "Q4_X"}, "unknown format Q4_X"),
        ([X, PLANE], {"formats": "Q4_K,Q4_K"}, "is missing"),
        ([X, PLANE], {"biases": "00"}, "biases or residual"),
        ([X, PLANE], {"activation": "silu"}, "gate and up must"),
        ([X, PLANE], {"activation": "relu"}, "unknown activation relu"),
        (
            [X, PLANE, PLANE, X[0, :8]],
            {"formats": "Q4_K,Q4_K", "activation": "silu", "biases": "01"},
            "take no bias",
        ),
        ([X, PLANE, X], {"residual": True}, r"residual has shape \(2, 256\); it must be \(2, 8\)"),
    ],
)
def test_linear_refuses_what_does_not_fit(operands, changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        native.call("linear", [FLOATS], *map(jnp.asarray, operands), **LINEAR | changes)


@needs_native
@pytest.mark.parametrize(
    "operands, shapes, message",
    [
        ([X], [(2, 257), (2, 257)], "values must have 1 to 256 columns"),
        ([X], [(3, 5), (3, 5)], r"values has shape \(3, 5\); it must be \(2, -1\)"),
        ([X], [(2, 5), (2, 4)], r"indices has shape \(2, 4\); it must be \(2, 5\)"),
        ([X], [(2, 5)], "indices is missing"),
        ([X[0]], [(2, 5), (2, 5)], "x has shape"),
        ([X, X], [(2, 5), (2, 5)], "too many operands"),
    ],
)
def test_top_k_refuses_what_does_not_fit(operands, shapes, message):
    dtypes = jnp.float32, jnp.int32
    structs = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=False)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(native.call("top_k", structs, *operands))


@needs_native
def test_a_result_of_another_shape_is_refused():
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"y has shape \(2, 9\); it must be \(2, 8\)"
    ):
        native.call("linear", [jax.ShapeDtypeStruct((2, 9), jnp.float32)], X, PLANE, **LINEAR)


@needs_native
@pytest.mark.parametrize(
    "heads, page_size, head_dim, message",
    [
        (1, 16, 24, "head_dim must be a multiple of 16"),
        (1, 16, 592, "head_dim must be a multiple of 16 up to 576"),
        (1, 8, 32, "page_size must be a multiple of 16"),
        (0, 16, 32, "at least one head"),
        (1, 0, 32, "one token"),
    ],
)
def test_pages_without_kernels_are_refused(heads, page_size, head_dim, message):
    q, lens = np.zeros((1, 1, 2, head_dim), np.float32), np.ones(1, np.int32)
    pages, tables = (
        np.zeros((3, heads, page_size, head_dim), np.float32),
        np.zeros((1, 2), np.int32),
    )
    struct = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        (out,) = native.call("paged_attention", [struct], q, pages, pages, tables, lens, **PAGED)
        out.block_until_ready()


Q, LENS = np.zeros((1, 2, 32), np.float32), np.ones(1, np.int32)
ONE = Q[None]  # a piece of one token
PAGES, TABLES, IDS = (
    np.zeros((3, 1, 16, 32), np.float32),
    np.zeros((1, 2), np.int32),
    np.zeros(2, np.int32),
)
PAGED = dict(
    scale=1.0, soft_cap=0.0, window=0, value_dim=0, contiguous=False, pieces=False, sinks=False
)
ROPE = dict(rope=False, latent=False, interleaved=False, norms=False, returned=False, eps=0.0)
TURN = ROPE | {"rope": True}
STATE = np.zeros((1, 2, 32, 32), np.float32)
DELTA, STEP = {"scale": 1.0, "tiled": False}, {"eps": 0.0, "tiled": False}
BYTES, ANGLES = PAGES.astype(np.int8), np.zeros((1, 17), np.float32)


@needs_native
@pytest.mark.parametrize(
    "name, operands, attributes, result, message",
    [
        ("embedding", [], {"format": "F32"}, (2, 32), "too few operands: ids is missing"),
        ("embedding", [IDS.astype(np.float32), X], {"format": "F32"}, (2, 256),
         "ids has an element type"),
        ("embedding", [IDS, X], {"format": "BF16"}, (2, 256), "weights has an element type"),
        ("embedding", [IDS, X], {"format": "Q4_K"}, (2, 256),
         "a plane of the weights has an element type"),
        ("embedding", [IDS, X[0]], {"format": "F32"}, (2, 256), "weights has shape"),
        ("embedding", [IDS, X], {"format": ""}, (2, 256), "unknown format"),
        ("embedding", [IDS, X], {"format": "F32"}, (2, 255), "y has shape"),
        ("embedding", [IDS, X], {"format": 3}, (2, 256), "(?i)attribute"),
        ("embedding", [IDS, X], {}, (2, 256), "(?i)attribute"),
        ("linear", [X, PLANE], LINEAR | {"quantized": "yes"}, (2, 8), "(?i)attribute"),
        ("linear", [X, X], LINEAR | {"formats": "F32"}, (2, 2), "floats are multiplied as floats"),
        ("linear", [X, PLANE], LINEAR | {"formats": ""}, (2, 8), "without a matrix"),
        ("linear", [X, PLANE], LINEAR | {"norm": True}, (2, 8), "norm_weight has"),
        ("mlp", [X, PLANE, PLANE, THIN], MLP | {"activation": ""}, X.shape,
         "activation is missing"),
        ("mlp", [X, PLANE, PLANE, THIN], MLP | {"formats": "Q4_K", "activation": "gelu"}, X.shape,
         "gate and up"),
        ("mlp", [X, PLANE, PLANE[:7], THIN], MLP, X.shape, "gate and up must have as many rows"),
        ("mlp", [X, PLANE, PLANE, X], MLP, X.shape, "weights have k=256; x has 8"),
        ("mlp", [X, PLANE, PLANE, THIN], MLP | {"down": "F32,F32"}, X.shape, "weights is missing"),
        ("mlp", [X, PLANE, PLANE], MLP | {"down": ""}, X.shape, "down must be one matrix"),
        ("mlp", [X, PLANE, PLANE, THIN], MLP | {"quantized_down": True}, X.shape,
         "floats are multiplied as floats"),
        ("mlp", [X, PLANE, PLANE, THIN], MLP | {"residual": True}, X.shape, "residual is missing"),
        ("mlp", [X, PLANE, PLANE, THIN, X], MLP, X.shape, "too many operands"),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES], PAGED, ONE.shape,
         "context_lens is missing"),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES, LENS], PAGED | {"sinks": True},
         ONE.shape, "sinks is missing"),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES, LENS], PAGED | {"pieces": True},
         ONE.shape, "lengths is missing"),
        ("paged_attention", [ONE.repeat(2, 1), PAGES, PAGES, TABLES, LENS], PAGED, (1, 2, 2, 32),
         "pieces must have lengths"),
        ("paged_attention", [ONE, PAGES, PAGES, LENS], PAGED | {"contiguous": True}, ONE.shape,
         "one row per sequence"),
        ("paged_attention", [ONE, PAGES, PAGES[:2], TABLES, LENS], PAGED, ONE.shape,
         "v_pages has shape"),
        ("paged_attention", [ONE, BYTES, BYTES, TABLES, LENS], PAGED, ONE.shape, "k_scales has"),
        ("paged_attention", [ONE[..., :16], PAGES, PAGES, TABLES, LENS], PAGED, (1, 1, 2, 16),
         "do not fit the pages"),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES.repeat(2, 0), LENS], PAGED, ONE.shape,
         "block_tables has shape"),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES, LENS], PAGED, (1, 1, 2, 31),
         "out has shape"),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES, LENS], PAGED | {"value_dim": 32}, ONE.shape,
         "block_tables has an element type"),
        ("paged_attention", [ONE, PAGES, TABLES, LENS], PAGED | {"value_dim": 24}, (1, 1, 2, 24),
         "value_dim must be a multiple of 16 up to 32"),
        ("paged_attention", [ONE, PAGES, TABLES, LENS], PAGED | {"value_dim": 48}, (1, 1, 2, 48),
         "value_dim must be a multiple of 16 up to 32"),
        ("paged_attention", [ONE, PAGES, TABLES, LENS], PAGED | {"value_dim": -16}, (1, 1, 2, 16),
         "value_dim must be a multiple of 16 up to 32"),
        ("paged_attention", [ONE, PAGES, TABLES, LENS], PAGED | {"value_dim": 16}, ONE.shape,
         "out has shape"),
        ("paged_attention", [ONE, BYTES, TABLES, LENS], PAGED | {"value_dim": 16}, (1, 1, 2, 16),
         "k_scales has"),
        ("causal_attention", [Q[None], Q[None], Q[None, :, :, :24], LENS], CAUSAL, (1, 1, 2, 24),
         "value_dim must be a multiple of 16"),
        ("causal_attention", [Q[None], Q[None], Q[None, :, :, :16], LENS], CAUSAL, (1, *Q.shape),
         "out has shape"),
        ("causal_attention", [Q[None], Q[None], Q[None, :, :1], LENS], CAUSAL, (1, *Q.shape),
         "v has shape"),
        ("causal_attention", [Q[None], *[Q[None, :, :0]] * 2, LENS], CAUSAL, (1, *Q.shape),
         "num_heads must be"),
        ("causal_attention", [Q[None], Q[None], Q[None], TABLES], CAUSAL, (1, *Q.shape),
         "lengths has shape"),
        ("causal_attention", [Q[None], Q[None], Q[None], LENS], CAUSAL | {"sinks": True},
         (1, *Q.shape), "sinks is missing"),
        ("rope_append", [PAGES, PAGES, Q[:, :1], Q[:, :1], LENS], ROPE, Q.shape,
         "k_pages has shape"),
        ("rope_append", [PAGES, PAGES, Q[:, :1], Q[:, :1], LENS], ROPE, PAGES.shape,
         "v_pages is missing"),
        ("gated_delta_rule", [Q[None]] * 5, DELTA, (1, *Q.shape), r"g has shape.*\(1, 1, 2\)"),
        ("gated_delta_rule", [Q[None, :, :, :20]] * 3, DELTA, (1, *Q.shape),
         "key_dim and value_dim must be multiples of 16"),
        ("gated_delta_rule", [*[Q[None]] * 2, Q[None, :, :1]], DELTA, (1, *Q.shape),
         "num_v_heads must be a multiple"),
        ("gated_delta_rule", [*[Q[None, :, :0]] * 2, Q[None]], DELTA, (1, *Q.shape),
         "num_v_heads must be a multiple"),
        ("gated_delta_step", [*[X] * 4, Q], STEP, X.shape, "columns has shape"),
        ("rope_append", [PAGES, Q[:, :1], LENS], ROPE | {"latent": True}, PAGES.shape,
         "in place"),
        ("rotate", [Q, ANGLES, ANGLES], {"interleaved": False}, Q.shape,
         "more angles than half of head_dim"),
        ("rotate", [Q, ANGLES[:, :9], ANGLES[:, :8]], {"interleaved": False}, Q.shape,
         "sin has shape"),
    ],
)  # fmt: skip
def test_handlers_refuse_what_does_not_fit(name, operands, attributes, result, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        native.call(
            name,
            [jax.ShapeDtypeStruct(result, jnp.float32)],
            *map(jnp.asarray, operands),
            **attributes,
        )


@needs_native
def test_pages_are_updated_in_place_or_not_at_all():
    pages = jax.ShapeDtypeStruct(PAGES.shape, jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="pages must be updated in place"):
        native.call("rope_append", [pages, pages], PAGES, PAGES, Q[:, :1], Q[:, :1], LENS, **ROPE)


@needs_native
def test_q_and_k_must_have_as_many_tokens():
    pages, k = jax.ShapeDtypeStruct(PAGES.shape, jnp.float32), np.zeros((4, 1, 32), np.float32)
    others = Q, k, k, np.zeros(4, np.int32), *[np.zeros((4, 8), np.float32)] * 2
    results = pages, pages, jax.ShapeDtypeStruct((4, 2, 32), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="q has 1 tokens; k has 4"):
        native.call("rope_append", results, PAGES, PAGES, *others, aliases={0: 0, 1: 1}, **TURN)


@needs_native
def test_more_results_than_a_call_has_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="too many results"):
        native.call("rotate", [Q, Q], Q, ANGLES[:, :8], ANGLES[:, :8], interleaved=False)


@needs_native
def test_rotated_keys_need_a_result():
    pages, k = jax.ShapeDtypeStruct(PAGES.shape, jnp.float32), Q[:, :1]
    others, results = (Q, k, k, LENS, *[ANGLES[:, :8]] * 2), (pages, pages, Q)
    given = TURN | {"returned": True, "aliases": {0: 0, 1: 1}}
    with pytest.raises(jax.errors.JaxRuntimeError, match="k is missing"):
        native.call("rope_append", results, PAGES, PAGES, *others, **given)


@needs_native
@pytest.mark.parametrize(
    "name, operands, attributes, results",
    [
        ("linear", [X[:0], PLANE], LINEAR, [(0, 8)]),
        ("linear", [X, PLANE[:0]], LINEAR, [(2, 0)]),
        ("linear", [X[:, :0], X[:, :0]], LINEAR | {"formats": "F32", "quantized": False}, [(2, 2)]),
        ("mlp", [X[:0], PLANE, PLANE, THIN], MLP, [(0, 256)]),
        ("mlp", [X, PLANE[:0], PLANE[:0], THIN[:, :0]], MLP, [(2, 256)]),
        ("embedding", [IDS[:0], X], {"format": "F32"}, [(0, 256)]),
        ("embedding", [IDS, X[:0]], {"format": "F32"}, [(2, 256)]),
        ("paged_attention", [ONE[:0], PAGES, PAGES, TABLES[:0], LENS[:0]], PAGED, [(0, 1, 2, 32)]),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES[:, :0], LENS], PAGED, [(1, 1, 2, 32)]),
        ("paged_attention", [ONE, PAGES, TABLES[:, :0], LENS], PAGED | {"value_dim": 16},
         [(1, 1, 2, 16)]),
        ("causal_attention", [Q[None, :0], Q[None, :0], Q[None, :0], LENS], CAUSAL,
         [(1, 0, 2, 32)]),
        ("rope_append", [PAGES, PAGES, Q[:0, :1], Q[:0, :1], LENS[:0]], ROPE, [PAGES.shape] * 2),
        ("gated_delta_rule", [*[Q[None, :0]] * 3, *[Q[None, :0, :, 0]] * 2, STATE], DELTA,
         [(1, 0, 2, 32), STATE.shape]),
        ("rotate", [Q[:0], ANGLES[:0], ANGLES[:0]], {"interleaved": False}, [(0, 2, 32)]),
        ("rotate", [Q[:, :0], ANGLES[:, :8], ANGLES[:, :8]], {"interleaved": False}, [(1, 0, 32)]),
    ],
)  # fmt: skip
def test_nothing_is_no_fault(name, operands, attributes, results):
    """Empty sums give zeros; rows looked up in an empty table give NaN."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    aliases = {"rope_append": {0: 0, 1: 1}, "gated_delta_rule": {5: 1}}.get(name)
    got = native.call(name, structs, *map(jnp.asarray, operands), aliases=aliases, **attributes)
    for array in map(np.asarray, got):
        assert np.isnan(array).all() if name == "embedding" else not array.any()


@needs_native
@pytest.mark.parametrize(
    "name, operands, attributes, result",
    [
        ("linear", [X, PLANE], LINEAR, (2, 8)),
        ("mlp", [X, PLANE, PLANE, THIN], MLP, (2, 256)),
        ("embedding", [IDS, X], {"format": "F32"}, (2, 256)),
        ("paged_attention", [ONE, PAGES, PAGES, TABLES, LENS], PAGED, ONE.shape),
        ("causal_attention", [Q[None]] * 3 + [LENS], CAUSAL, (1, *Q.shape)),
        ("rotate", [Q, ANGLES[:, :8], ANGLES[:, :8]], {"interleaved": False}, Q.shape),
    ],
)
def test_an_operand_more_is_refused(name, operands, attributes, result):
    struct = jax.ShapeDtypeStruct(result, jnp.float32)
    jax.block_until_ready(native.call(name, [struct], *map(jnp.asarray, operands), **attributes))
    given = [*map(jnp.asarray, operands), jnp.zeros(1)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="too many operands"):
        jax.block_until_ready(native.call(name, [struct], *given, **attributes))


@needs_native
def test_pages_have_no_operand_more():
    pages = jax.ShapeDtypeStruct(PAGES.shape, jnp.float32)
    given = PAGES, PAGES, Q[:, :1], Q[:, :1], LENS, X
    with pytest.raises(jax.errors.JaxRuntimeError, match="too many operands"):
        native.call("rope_append", [pages, pages], *given, aliases={0: 0, 1: 1}, **ROPE)


@needs_native
def test_the_largest_window_is_none():
    """The arithmetic does not overflow, which a sanitizer would report."""
    x = np.random.default_rng(0).normal(size=(1, 40, 2, 32)).astype(np.float32)
    result, lengths = [jax.ShapeDtypeStruct(x.shape, jnp.float32)], np.array([40], np.int32)
    got = [
        native.call("causal_attention", result, x, x, x, lengths, **CAUSAL | {"window": window})[0]
        for window in (0, np.int64(2**63 - 1), 39)
    ]
    np.testing.assert_array_equal(got[0], got[1])
    assert not np.array_equal(got[0], got[2])


@pytest.fixture
def no_library(monkeypatch):
    """An installation without the library, before any warning."""
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(
        native, "_load", lambda: (None, f"{build.LIBRARY} was not built; {build.HOW_TO}")
    )
    native.warn_if_unavailable.cache_clear()
    yield
    native.warn_if_unavailable.cache_clear()


def test_without_a_library_what_asks_for_it_says_what_to_do(no_library):
    w = jq.QuantizedArray("Q4_K", (8, 256), [jnp.asarray(PLANE)])
    with pytest.raises(jq.UnavailableError, match="was not built.*python -m jax_q4k.native"):
        jax.jit(lambda x: jq.implementation("native")(jq.matmul)(x, w)).lower(X)
    assert not native.available() and native.kernels() is None
    assert "was not built" in str(
        jq.explain(lambda x: jq.implementation("native")(jq.matmul)(x, w), X)
    )
    (call,) = jq.explain(lambda x: jq.matmul(x, w), X).calls
    assert any(
        "'native'), and its library: libjax_q4k.so was not built" in line for line in call.otherwise
    )


def test_without_a_library_plain_jax_runs_and_says_so_once(no_library):
    w = jq.QuantizedArray("Q4_K", (8, 256), [jnp.asarray(PLANE)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: jq.implementation("xla")(jq.matmul)(x, w))(X)
        # none of these would have used a CPU kernel
        jax.jit(lambda x: jq.rms_norm(x, X[0], eps=1e-5))(X)
        jax.jit(lambda x: jq.matmul(x, w)).trace(X).lower(lowering_platforms=("cuda",))
    with pytest.warns(
        jq.NativeUnavailableWarning, match="plain JAX.*was not built.*python -m jax_q4k.native"
    ):
        text = jax.jit(lambda x: jq.matmul(x, w)).lower(X).as_text()
    assert "dot_general" in text and "jax_q4k_" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: jq.matmul(x, w) + 1).lower(X)
    for _ in range(2):
        report = jq.explain(lambda x: jq.matmul(jq.rms_norm(x, X[0], eps=1e-5), w), X)
        norm, product = report.calls
        assert (
            product.implementation == norm.implementation == "xla"
            and norm.why == "the default on cpu"
        )
        assert product.why.startswith("the default on cpu, as libjax_q4k.so was not built; ")
        assert str(report).startswith("on cpu (libjax_q4k.so was not built; ")


@needs_native
def test_a_library_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(build, "fingerprint", lambda: "0" * 16)
    library, why = native._load.__wrapped__()
    assert library is None and re.match(
        "libjax_q4k.so was built from other sources.*jax_q4k.native` builds it", why
    )
    # an installation without the sources
    monkeypatch.setattr(build, "fingerprint", lambda: None)
    assert native._load.__wrapped__()[1] == ""


def test_a_file_that_is_no_library_is_not_used(monkeypatch, tmp_path):
    path = tmp_path / build.LIBRARY
    path.write_bytes(b"ELF")
    build.seal(path)
    monkeypatch.setattr(native, "library_path", lambda: path)
    library, why = native._load.__wrapped__()
    assert library is None and re.match(
        r"libjax_q4k.so cannot be used \(.*\); with a C\+\+17 compiler", why
    )


def zeros(data, start, count):
    return data[:start] + bytes(count) + data[start + count :]


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "60 bytes": lambda data: data[:60],
    "empty": lambda data: b"",
    "zeros at the end": lambda data: zeros(data, len(data) // 2, len(data) - len(data) // 2),
    "zeros inside": lambda data: zeros(data, len(data) // 3 & -4096, 4096),
    "a bit": lambda data: data[:5000] + bytes([data[5000] ^ 4]) + data[5001:],
    "more bytes": lambda data: data + bytes(8),
    "without a checksum": lambda data: data[: -len(build._SEAL) - 32],
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_library_is_named_and_not_mapped(what, monkeypatch, tmp_path):
    """Mapped, it would end the process or compute wrong results."""
    if not native.library_path().exists():
        pytest.skip(native.problem())
    path = tmp_path / build.LIBRARY
    data = native.library_path().read_bytes()
    assert build.is_sealed(data)
    path.write_bytes(DAMAGE[what](data))
    monkeypatch.setattr(native, "library_path", lambda: path)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: pytest.fail("the library is mapped"))
    problem = f"{path} is damaged: its checksum differs or is missing; {build.HOW_TO}"
    assert native._load.__wrapped__() == (None, problem)


def test_the_fingerprint_is_of_sources_and_flags(monkeypatch, tmp_path):
    before = build.fingerprint()
    assert re.fullmatch("[0-9a-f]{16}", before) and before == build.fingerprint()
    monkeypatch.setattr(build, "_SOURCES", shutil.copytree(build._SOURCES, tmp_path / "src"))
    assert build.fingerprint() == before
    (tmp_path / "src" / "notes.txt").write_text("not compiled")
    assert build.fingerprint() == before
    with monkeypatch.context() as patched:
        patched.setattr(build, "_FLAGS", [*build._FLAGS, "-g"])
        assert build.fingerprint() != before
    source = tmp_path / "src" / "vectors.h"
    source.write_text(source.read_text() + "// ")
    assert build.fingerprint() != before
    shutil.rmtree(tmp_path / "src")
    assert build.fingerprint() is None


def test_a_library_of_these_sources_need_not_be_built_again(monkeypatch, tmp_path):
    library = tmp_path / build.LIBRARY
    assert not build.is_current(library)
    library.write_bytes(b"ELF" + build.fingerprint().encode() + bytes(8))
    assert not build.is_current(library)  # damaged, or built before libraries had checksums
    build.seal(library)
    assert build.is_current(library)
    monkeypatch.setattr(build, "_FLAGS", [*build._FLAGS, "-g"])
    assert not build.is_current(library)
    monkeypatch.setattr(build, "fingerprint", lambda: None)
    assert not build.is_current(library)


def test_without_a_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler.*no-such-compiler"):
        build.compile_library(tmp_path / build.LIBRARY)
    assert not list(tmp_path.iterdir())


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="name='sse9'"):
        native.select("sse9")


def test_a_matrix_of_no_float_type():
    with pytest.raises(TypeError, match="dtype int8; the CPU's kernels take floats"):
        calls.linear(X, [jnp.zeros((8, 256), jnp.int8)], quantized=False)
