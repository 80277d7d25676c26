"""`paged_attention` of prompt chunks: several tokens of each sequence at a time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq
from ptx_kernels.kernels.attention import rules

from .random_weights import random_weights

BATCH, TIME, HEADS, KV_HEADS, DIM = 3, 5, 4, 2, 32
LENGTHS, LENS = np.array([5, 0, 2]), np.array([40, 17, 2])
TABLES = np.array([[4, 0, 7], [2, 6, 5], [1, 8, 3]])
#: Tables so long that reading the contexts token by token would be 64 MB. They name no page beyond
#: the contexts.
LONG, LONGER = (
    np.concatenate([TABLES, np.full((BATCH, n), -1)], axis=1) for n in (1200, 4400)
)  # for elements of two or four bytes, and of one

rng = np.random.default_rng(0)
normal = rng.standard_normal


def operands(dtype: Any = jnp.float32) -> tuple[Any, dict[str, Any], Any, Any]:
    """Returns queries, pages by name with NaN in unseen slots, and decoded keys and values."""
    q = normal((BATCH, TIME, HEADS, DIM), np.float32)
    exact = normal((2, 9, KV_HEADS, 16, DIM), np.float32)
    seen = np.zeros((9, 16), bool)
    for table, length in zip(TABLES, LENS, strict=True):
        for t in range(length):
            seen[table[t // 16], t % 16] = True
    hidden = np.broadcast_to(~seen[:, None], exact.shape[1:-1])
    if dtype == jnp.int8:
        (k, k_scales), (v, v_scales) = (oracles.int8_vectors(x) for x in exact)
        held = [x * s[..., None].astype(np.float64) for x, s in ((k, k_scales), (v, v_scales))]
        k_scales[hidden] = v_scales[hidden] = np.nan
        scales = {"k_scales": jnp.asarray(k_scales), "v_scales": jnp.asarray(v_scales)}
        return q, {"k_pages": jnp.asarray(k), "v_pages": jnp.asarray(v)} | scales, *held
    rows = [jnp.asarray(x).astype(dtype) for x in exact]
    held = [np.asarray(x.astype(jnp.float32)) for x in rows]
    k, v = (
        jnp.where(hidden[..., None], jnp.nan, x.astype(jnp.float32)).astype(dtype) for x in rows
    )
    return q, {"k_pages": k, "v_pages": v}, *held


def wanted(q: Any, k: Any, v: Any, lengths: Any = LENGTHS, **options: Any) -> np.ndarray:
    """Computes attention token by token in float64, with zeros for padding."""
    batch, time = q.shape[:2]
    steps = np.arange(time)
    lens = np.where(steps < lengths[:, None], (LENS - lengths)[:, None] + steps + 1, 0)
    flat = q.reshape(-1, *q.shape[2:]), k, v, np.repeat(TABLES, time, axis=0), lens.reshape(-1)
    out = oracles.attention(*flat, q.shape[-1] ** -0.5, **options)
    return out.reshape(batch, time, *out.shape[1:])


def room(dtype: Any) -> np.ndarray:
    """Tables long enough for the prompt kernel to take pages of this dtype."""
    return LONG if jnp.dtype(dtype).itemsize > 1 else LONGER


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", jq.PAGE_DTYPES, ids=str)
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_equals_the_definition(long: bool, dtype: Any, implementation: str) -> None:
    tables = room(dtype) if long else TABLES
    q, pages, k, v = operands(dtype)
    attend = jax.jit(functools.partial(jq.paged_attention, **pages))
    with jq.implementation(implementation):
        got = attend(q, block_tables=tables, context_lens=LENS, lengths=LENGTHS)
    assert got.shape == q.shape and got.dtype == jnp.float32
    assert nmse(got, wanted(q, k, v)) <= 1e-10
    assert not np.asarray(got)[1].any() and not np.asarray(got)[2, 2:].any()


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_options(window: int | None, dtype: Any, implementation: str) -> None:
    q, pages, k, v = operands(dtype)
    options: dict[str, Any] = {"soft_cap": 1.5, "sinks": np.float32([0.5, -1, -np.inf, 3])}
    options |= {"window": window} if window else {}
    half = jnp.asarray(q, jnp.bfloat16)
    attend = jax.jit(functools.partial(jq.paged_attention, **pages, **options))
    with jq.implementation(implementation):
        got = attend(half, block_tables=room(dtype), context_lens=LENS, lengths=LENGTHS)
    assert got.dtype == jnp.bfloat16
    assert nmse(got, wanted(np.asarray(half, np.float32), k, v, **options)) <= 1e-5


def launched(dtype: Any, tables: Any, *, time: int = TIME, **options: Any) -> list[str]:
    """Names of the kernels that one call launches."""
    q, pages, *_ = operands(dtype)
    call = functools.partial(jq.paged_attention, **pages, **options)
    found = jq.explain(call, q[:, :time], block_tables=tables, context_lens=LENS, platform="cuda")
    return [kernel.name for kernel in found.calls[0].kernels]


def test_kernels_that_attend() -> None:
    """The prompt kernel runs if it saves reads and supports the pages, else the decode kernel."""
    for dtype in (jnp.bfloat16, jnp.float16):
        assert launched(dtype, LONG) == ["causal_attention", "merge_attention"]
        assert "causal_attention" not in launched(dtype, TABLES)
        assert "causal_attention" not in launched(dtype, LONG, time=1)
        assert "causal_attention" not in launched(dtype, LONG, window=64)
    for dtype in (jnp.float32, jnp.float8_e4m3fn, jnp.int8):
        assert launched(dtype, room(dtype)) == ["split_keys", "causal_attention", "merge_attention"]
        assert "causal_attention" not in launched(dtype, TABLES)


def test_lengths_are_those_of_time_if_not_given() -> None:
    q, pages, k, v = operands()
    lens = np.array([40, 17, 5])
    got = jq.paged_attention(q, **pages, block_tables=TABLES, context_lens=lens)
    whole = jq.paged_attention(
        q, **pages, block_tables=TABLES, context_lens=lens, lengths=np.full(3, TIME)
    )
    np.testing.assert_array_equal(got, whole)


def test_one_token_is_a_step_of_decoding() -> None:
    q, pages, *_ = operands()
    rest = pages | {"block_tables": TABLES, "context_lens": LENS}
    got = jq.paged_attention(q[:, :1], **rest)
    np.testing.assert_array_equal(got[:, 0], jq.paged_attention(q[:, 0], **rest))


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tables", [TABLES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("n", [40, 256])
def test_with_the_projection(tables: Any, n: int, implementation: str) -> None:
    """15 rows, with and without splits, compared with attention and product as separate calls."""
    q, pages, k, v = operands(jnp.bfloat16)
    w = random_weights("Q8_0", n, HEADS * DIM)
    residual, bias = normal((BATCH, TIME, n), np.float32), normal(n, np.float32)
    rest = pages | {"block_tables": tables, "context_lens": LENS, "lengths": LENGTHS}
    options: dict[str, Any] = {"residual": residual, "bias": bias}
    with jq.implementation(implementation):
        got = jax.jit(lambda q: jq.paged_attention_matmul(q, w=w, **rest, **options))(q)
        exact = jq.paged_attention_matmul(q, w=w, **rest, **options, activations="f32")
    product = wanted(q, k, v).reshape(-1, HEADS * DIM) @ np.asarray(w.dequantize()).T
    want = residual + product.reshape(residual.shape) + bias
    assert got.shape == want.shape
    assert nmse(exact, want) <= 1e-10 and nmse(got, want) <= 1e-4


def test_examples_and_groups() -> None:
    """`vmap` over queries and lengths; groups of sequences with ids of their own pages."""
    q, pages, k, v = operands()
    rest = pages | {"block_tables": TABLES, "context_lens": LENS}
    many = jax.vmap(lambda q, n: jq.paged_attention(q, **rest, lengths=n))(
        jnp.stack([q, -q]), jnp.stack([LENGTHS, np.array([1, 5, 2])])
    )
    for got, sign, lengths in zip(many, (1, -1), (LENGTHS, np.array([1, 5, 2])), strict=True):
        assert nmse(got, wanted(sign * q, k, v, lengths)) <= 1e-11
    pages = {name: jnp.nan_to_num(x) for name, x in pages.items()}
    own = np.array([[[0, 1]], [[2, 0]], [[1, 2]]])  # three pages each
    lens = np.array([32, 20, 9])
    of_all = own[:, 0] + 3 * np.arange(3)[:, None]
    got, want = (
        jq.paged_attention(q, **pages, block_tables=ids, context_lens=lens) for ids in (own, of_all)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_latent_pages(implementation: str) -> None:
    q = normal((BATCH, TIME, HEADS, 64), np.float32)
    pages = jnp.asarray(normal((9, 1, 16, 64)), jnp.bfloat16)
    held = np.asarray(pages.astype(jnp.float32))
    with jq.implementation(implementation):
        got = jq.paged_attention(q, pages, None, TABLES, LENS, lengths=LENGTHS, value_dim=32)
    assert nmse(got, wanted(q, held, held[..., :32])) <= 1e-11


def test_nothing_to_attend() -> None:
    q, pages, *_ = operands()
    tables = {"block_tables": TABLES, "context_lens": LENS}
    assert jq.paged_attention(q[:, :0], **pages, **tables).shape == (BATCH, 0, HEADS, DIM)
    none = {"block_tables": TABLES[:0], "context_lens": LENS[:0]}
    assert jq.paged_attention(q[:0], **pages, **none).shape == (0, TIME, HEADS, DIM)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": np.array([5, 6, 2])}, ValueError, r"lengths=\[5, 6, 2\] must be 0 to time=5"),
        ({"lengths": np.array([5, 0, 3])}, ValueError, r"at most context_lens=\[40, 17, 2\]"),
        ({"lengths": np.array([-1, 0, 0])}, ValueError, "must be 0 to time=5"),
        ({"lengths": np.array([5, 0])}, ValueError, r"lengths has shape \(2,\); it must be"),
        ({"lengths": np.array([0.5, 0, 1])}, TypeError, "lengths has dtype float64"),
        ({"q": np.zeros((3, 4, 32), np.float32)}, TypeError, "lengths belongs to a q with an axis"),
        ({"q": np.zeros((3, 5, 4, 48), np.float32)}, ValueError, "head_dim=32"),
        ({"q": np.zeros((3, 5, 0, 32), np.float32)}, ValueError, "num_heads=0 must be positive"),
        ({"q": np.zeros((1, 3, 5, 4, 32), np.float32)}, ValueError, "q has shape"),
    ],
)
def test_arguments_that_do_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, pages, *_ = operands()
    given = {"q": q, "block_tables": TABLES, "context_lens": LENS, "lengths": LENGTHS}
    with pytest.raises(error, match=message):
        jq.paged_attention(**(given | pages | change))


@pytest.mark.slow("compiles a program for each case", quick=["batch=32-Q4_K-*"])
@pytest.mark.parametrize(
    "batch, format, quantizes, tolerance",
    [(34, "Q8_0", "quantize_q8_1", 1e-4), (32, "Q4_K", "quantize_f16", 1e-6)],
)
def test_pieces_that_fill_the_device_are_quantized_for_the_projection(
    batch: int, format: str, quantizes: str, tolerance: float
) -> None:
    """They have no splits, whose merge would quantize them."""
    heads, rng = 8, np.random.default_rng(1)
    q = rng.standard_normal((batch, 2, heads, DIM), np.float32)
    pages = jnp.asarray(rng.standard_normal((batch, heads, 16, DIM)), jnp.bfloat16)
    tables = np.concatenate([np.arange(batch)[:, None], np.full((batch, 64), -1)], axis=1)
    w = random_weights(format, 64, heads * DIM)
    call = functools.partial(jq.paged_attention_matmul, block_tables=tables, w=w)
    given = q, pages, pages
    lens = rng.integers(2, 17, batch)
    found = jq.explain(call, *given, context_lens=lens, platform="cuda").calls[0]
    names = [kernel.name for kernel in found.kernels]
    assert names[:2] == ["causal_attention", quantizes] and len(names) == 3
    with jq.implementation("sim"):
        got = jax.jit(call)(*given, context_lens=lens)
    held = np.asarray(pages.astype(jnp.float32))
    seen = np.stack([lens - 1, lens], axis=1).reshape(-1)
    flat = q.reshape(-1, heads, DIM), held, held, np.repeat(tables, 2, axis=0), seen
    out = oracles.attention(*flat, DIM**-0.5).reshape(batch, 2, -1)
    assert nmse(got, out @ np.asarray(w.dequantize()).T) <= tolerance


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("window", [1, 8, 20])  # 8: a page that only the first tokens see
def test_windows_of_pieces_on_tensor_cores(
    window: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forces tensor cores, which would not pay off for so few tokens."""
    monkeypatch.setattr(rules, "_MOST_READ_AGAIN", 0)
    q, pages, k, v = operands(dtype)
    assert "causal_attention" in launched(dtype, TABLES, window=window)
    call = functools.partial(jq.paged_attention, **pages, window=window)
    with jq.implementation("sim"):
        got = jax.jit(call)(q, block_tables=TABLES, context_lens=LENS, lengths=LENGTHS)
    assert nmse(got, wanted(q, k, v, window=window)) <= 1e-10
