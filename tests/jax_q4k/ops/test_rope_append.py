import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq

rng = np.random.default_rng(3)
PAGES, HEADS, KV_HEADS, SIZE, DIM, EPS = 5, 4, 2, 16, 32, 1e-5
SLOTS = np.array([17, -1, 79])


def operands(dtype=jnp.float32, rope_dim=DIM, qk_norm=False):
    tokens = len(SLOTS)
    pages = [
        jnp.asarray(rng.standard_normal((PAGES, KV_HEADS, SIZE, DIM)), dtype) for _ in range(2)
    ]
    q, k, v = (
        jnp.asarray(rng.standard_normal((tokens, h, DIM)), jnp.float32)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    radians = rng.uniform(0, 1e5, (tokens, rope_dim // 2))
    arrays = dict(q=q, k=k, v=v, k_pages=pages[0], v_pages=pages[1], slot_mapping=jnp.array(SLOTS))
    arrays |= dict(cos=jnp.float32(np.cos(radians)), sin=jnp.float32(np.sin(radians)))
    if qk_norm:
        arrays |= {name: jnp.float32(rng.uniform(0.5, 2, DIM)) for name in ("q_norm", "k_norm")} | {
            "eps": EPS
        }
    return arrays


def exact(a, interleaved):
    """Rotates q and k in float64, as products of complex numbers."""

    def turned(x, weight):
        x = np.array(x, np.float64)
        if weight is not None:
            x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
        half = a["cos"].shape[1]
        first = np.arange(half) * 2 if interleaved else np.arange(half)
        second = first + 1 if interleaved else first + half
        angle = np.asarray(a["cos"], np.float64) + 1j * np.asarray(a["sin"])
        z = (x[..., first] + 1j * x[..., second]) * angle[:, None]
        x[..., first], x[..., second] = z.real, z.imag
        return x

    return turned(a["q"], a.get("q_norm")), turned(a["k"], a.get("k_norm"))


@pytest.mark.grid
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "chain"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "rope_dim", "qk_norm", "interleaved", "tolerance"),
    [
        (jnp.float32, DIM, False, True, 1e-12),
        (jnp.bfloat16, DIM, True, False, 1e-5),
        (jnp.float16, 20, True, True, 1e-6),
    ],
)
def test_rotates_and_writes_its_slots(
    dtype, rope_dim, qk_norm, interleaved, tolerance, implementation, fused
):
    a = operands(dtype, rope_dim, qk_norm)
    with jq.implementation(implementation, fused=fused):
        q, *pages, k = jq.rope_append(**a, interleaved=interleaved, return_keys=True)
        results = jq.rope_append(**a, interleaved=interleaved)
    for without, result in zip(results, (q, *pages), strict=True):
        np.testing.assert_array_equal(without, result)
    want_q, want_k = exact(a, interleaved)
    assert nmse(q, want_q) <= 1e-12 and nmse(k, want_k) <= 1e-12
    for got, before, new in zip(pages, (a["k_pages"], a["v_pages"]), (want_k, a["v"]), strict=True):
        want = np.array(before).astype(np.float64)
        written = np.zeros((PAGES, SIZE), bool)
        for t, slot in enumerate(SLOTS):
            if slot >= 0:
                want[slot // SIZE, :, slot % SIZE] = new[t]
                written[slot // SIZE, slot % SIZE] = True
        assert got.dtype == dtype
        assert nmse(got, want) <= tolerance
        rest = ~written[:, None, :].repeat(KV_HEADS, 1)
        np.testing.assert_array_equal(np.asarray(got)[rest], np.asarray(before)[rest])


@pytest.mark.grid
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "chain"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.int8, 1e-4), (jnp.float8_e4m3fn, 2e-3)])
def test_quantized_pages(dtype, tolerance, implementation, fused):
    a = operands()
    pages = dict(k_pages=a.pop("k_pages").astype(dtype), v_pages=a.pop("v_pages").astype(dtype))
    if dtype == jnp.int8:
        pages |= dict(
            k_scales=jnp.ones((PAGES, KV_HEADS, SIZE)), v_scales=jnp.ones((PAGES, KV_HEADS, SIZE))
        )
    with jq.implementation(implementation, fused=fused):
        q, *got = jq.rope_append(**a, **pages, interleaved=True)
        want = jq.append_kv(**pages, k=a["k"], v=a["v"], slot_mapping=a["slot_mapping"])
    want_q, want_k = exact(a, True)
    assert nmse(q, want_q) <= 1e-12 and len(got) == len(want)
    for array, appended in list(zip(got, want, strict=True))[1::2]:  # v, which is not rotated
        np.testing.assert_array_equal(array, appended)
    rows = got[0][1, :, 1].astype(jnp.float32) * (got[2][1, :, 1, None] if dtype == jnp.int8 else 1)
    assert nmse(rows, want_k[0]) <= tolerance
    rest = np.delete(np.arange(PAGES), [1, 4])
    np.testing.assert_array_equal(np.asarray(got[0])[rest], np.asarray(pages["k_pages"])[rest])


@pytest.mark.grid
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "chain"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_rest_of_queries_rows(qk_norm, implementation, fused):
    """A row of q holds 20 more elements, which change neither queries nor pages."""
    a = operands(rope_dim=20, qk_norm=qk_norm)
    rest = jnp.float32(rng.standard_normal((len(SLOTS), HEADS, 20)))
    wide = a | {"q": jnp.concatenate([a["q"], rest], axis=-1), "q_rest": 20}
    with jq.implementation(implementation, fused=fused):
        q, *others = jq.rope_append(**a, interleaved=False, return_keys=True)
        wide_q, got, *wide_others = jq.rope_append(**wide, interleaved=False, return_keys=True)
    np.testing.assert_array_equal(got, rest)
    for one, other in zip((q, *others), (wide_q, *wide_others), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.grid
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "chain"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_normalized_values(implementation, fused):
    a = operands(qk_norm=True)
    v = np.asarray(a["v"], np.float64)
    normal = v / np.sqrt(np.mean(v**2, -1, keepdims=True) + 0.25)
    with jq.implementation(implementation, fused=fused):
        got = jq.rope_append(**a, interleaved=False, v_eps=0.25)
        want = jq.rope_append(**a | {"v": jnp.float32(normal)}, interleaved=False)
    for one, other in zip(got, want, strict=True):
        assert nmse(one, other) <= 1e-12


RANK = 64


def latent_operands(dtype=jnp.float32):
    """Rows of RANK elements and a key of DIM, and three heads of 24 + DIM."""
    tokens = len(SLOTS)
    rows = rng.standard_normal((PAGES, 1, SIZE, RANK + DIM), np.float32)
    radians = rng.uniform(0, 1e5, (tokens, DIM // 2))
    arrays = dict(q=rng.standard_normal((tokens, 3, 24 + DIM)), q_rest=24, v=None, v_pages=None)
    arrays |= dict(k=rng.standard_normal((tokens, 1, RANK + DIM)), slot_mapping=jnp.array(SLOTS))
    arrays |= dict(cos=jnp.float32(np.cos(radians)), sin=jnp.float32(np.sin(radians)))
    arrays |= dict(k_norm=jnp.float32(rng.uniform(0.5, 2, RANK)), eps=EPS)
    if dtype == jnp.int8:
        arrays |= dict(k_scales=jnp.ones((PAGES, 1, SIZE)))
        rows = np.rint(rows * 20)
    return arrays | dict(
        k_pages=jnp.asarray(rows, dtype), q=jnp.float32(arrays["q"]), k=jnp.float32(arrays["k"])
    )


@pytest.mark.grid
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "chain"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(jnp.float32, 1e-12), (jnp.bfloat16, 1e-5), (jnp.int8, 3e-4), (jnp.float8_e4m3fn, 2e-3)],
)
def test_latent_pages(dtype, tolerance, interleaved, implementation, fused):
    a = latent_operands(dtype)
    with jq.implementation(implementation, fused=fused):
        q, rest, rows, *scales = jq.rope_append(**a, interleaved=interleaved)
    np.testing.assert_array_equal(rest, a["q"][..., :24])
    turned = {"q": a["q"][..., 24:], "k": a["k"][..., RANK:], "cos": a["cos"], "sin": a["sin"]}
    want_q, key = exact(turned, interleaved)
    assert nmse(q, want_q) <= 1e-12 and rows.dtype == dtype
    x = np.asarray(a["k"][..., :RANK], np.float64)
    vector = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * np.asarray(a["k_norm"])
    new = np.concatenate([vector, key], axis=-1)
    stored, written = np.array(rows).astype(np.float64), np.zeros((PAGES, SIZE), bool)
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            page, offset = divmod(int(slot), SIZE)
            unit = scales[0][page, :, offset, None] if scales else 1
            assert nmse(stored[page, :, offset] * unit, new[t]) <= tolerance
            written[page, offset] = True
    before = np.asarray(a["k_pages"])
    np.testing.assert_array_equal(np.asarray(rows)[~written[:, None]], before[~written[:, None]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_latent_pages_without_a_norm(implementation):
    a = latent_operands()
    ones = jnp.ones(RANK)
    unit = a["k"][..., :RANK] / jnp.sqrt(jnp.mean(a["k"][..., :RANK] ** 2, -1, keepdims=True))
    a["k"] = a["k"].at[..., :RANK].set(unit)
    with jq.implementation(implementation):
        want = jq.rope_append(**a | {"k_norm": ones, "eps": 0.0}, interleaved=True)
        got = jq.rope_append(**a | {"k_norm": None, "eps": None}, interleaved=True)
    np.testing.assert_array_equal(got[2][1, 0, 1, :RANK], unit[0, 0])
    for one, other in zip(got, want, strict=True):
        assert nmse(one, other) <= 1e-12


def test_latent_pages_are_one_kernel_that_updates_in_place():
    a = latent_operands()
    static = {name: a.pop(name) for name in ("q_rest", "v", "v_pages", "eps")}
    jitted = jax.jit(functools.partial(jq.rope_append, **static, interleaved=True))
    text = jitted.trace(**a).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.ptx") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            dict(v=jnp.zeros((3, 1, RANK + DIM))),
            TypeError,
            "v, v_eps, q_norm and return_keys belong",
        ),
        (dict(v_eps=1e-6), TypeError, "belong to v_pages, which is None"),
        (dict(q_norm=jnp.ones(DIM)), TypeError, "belong to v_pages, which is None"),
        (dict(return_keys=True), TypeError, "belong to v_pages, which is None"),
        (dict(q_rest=23), ValueError, r"q has shape \(3, 3, 56\).*head_dim=55"),
        (dict(q_rest=-1), ValueError, "q_rest=-1 must not be negative"),
        (dict(q_rest=1.0), TypeError, "q_rest is of type float"),
        (dict(k=jnp.zeros((3, 1, RANK))), ValueError, "k has shape"),
        (dict(k_norm=jnp.ones(RANK + 1)), ValueError, r"k_norm has shape.*head_dim - rope_dim"),
        (dict(eps=None), ValueError, "eps=None"),
        (
            dict(cos=jnp.ones((3, 8)), sin=jnp.ones((3, 8))),
            ValueError,
            "rope_dim=16 must be a multiple of 32 below the head_dim=96 of latent pages",
        ),
        (
            dict(cos=jnp.ones((3, 48)), sin=jnp.ones((3, 48))),
            ValueError,
            "rope_dim=96 must be a multiple of 32 below the head_dim=96",
        ),
    ],
)
def test_latent_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        jq.rope_append(**(latent_operands() | call), interleaved=True)


def test_a_fusion_is_one_operation_and_a_chain_is_not():
    a = operands()
    names = {}
    for fused in (None, False, ("mlp",)):
        with jq.implementation(fused=fused):
            jaxpr = jax.make_jaxpr(functools.partial(jq.rope_append, interleaved=True))(**a)
        names[fused] = [equation.primitive.name for equation in jaxpr.eqns]
    assert names[None] == ["rope_append"]
    assert "append_kv" in names[False] and names[("mlp",)] == names[False]


def test_donated_pages_are_updated_in_place():
    a = operands()
    program = jax.jit(
        functools.partial(jq.rope_append, interleaved=True), donate_argnames=("k_pages", "v_pages")
    )
    pointers = [a[name].unsafe_buffer_pointer() for name in ("k_pages", "v_pages")]
    _, *pages = program(**a)
    assert [page.unsafe_buffer_pointer() for page in pages] == pointers


def test_lowered_for_cuda_is_one_kernel_that_updates_in_place():
    jitted = jax.jit(functools.partial(jq.rope_append, interleaved=False))
    text = jitted.trace(**operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.ptx") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


def test_mapped_over_sequences_of_their_own_pages():
    each = [operands(), operands()]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    got = jax.vmap(lambda a: jq.rope_append(**a, interleaved=True))(stacked)
    for i, a in enumerate(each):
        for result, want in zip(got, jq.rope_append(**a, interleaved=True), strict=True):
            np.testing.assert_array_equal(result[i], want)


@pytest.mark.parametrize("fused", [None, False])
def test_no_tokens(fused):
    a = operands()
    empty = {name: a[name][:0] for name in ("q", "k", "v", "slot_mapping", "cos", "sin")}
    with jq.implementation(fused=fused):
        q, k_pages, _ = jq.rope_append(**(a | empty), interleaved=True)
    assert q.shape == (0, HEADS, DIM)
    np.testing.assert_array_equal(k_pages, a["k_pages"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (dict(q=jnp.zeros((2, HEADS, DIM))), ValueError, r"q has shape \(2, 4, 32\).*tokens=3"),
        (dict(q=jnp.zeros((3, HEADS, 64))), ValueError, "q has shape"),
        (dict(k=jnp.zeros((3, HEADS, DIM))), ValueError, r"k has shape \(3, 4, 32\)"),
        (dict(v=jnp.zeros((3, KV_HEADS, DIM), jnp.int8)), TypeError, "v has dtype int8"),
        (dict(cos=jnp.zeros((3, 17))), ValueError, r"cos has shape \(3, 17\).*16"),
        (dict(cos=jnp.zeros((3, 0))), ValueError, r"cos has shape \(3, 0\)"),
        (dict(sin=jnp.zeros((3, 8))), ValueError, r"sin has shape \(3, 8\)"),
        (dict(slot_mapping=np.array([0, 1, 80])), ValueError, "slot_mapping holds 80"),
        (dict(slot_mapping=jnp.zeros((3, 1), int)), ValueError, "slot_mapping has shape"),
        (dict(q_norm=jnp.ones(DIM), eps=EPS), ValueError, "q_norm and k_norm must both be given"),
        (dict(q_norm=jnp.ones(DIM), k_norm=jnp.ones(DIM)), ValueError, "eps=None"),
        (
            dict(q_norm=jnp.ones(DIM), k_norm=jnp.ones(64), eps=EPS),
            ValueError,
            r"k_norm has shape \(64,\)",
        ),
        (
            dict(k_pages=jnp.zeros((PAGES, KV_HEADS, 8, DIM))),
            ValueError,
            "v_pages has shape|page_size=8",
        ),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        jq.rope_append(**(operands() | call), interleaved=True)
