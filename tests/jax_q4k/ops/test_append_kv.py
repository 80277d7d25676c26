import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq

rng = np.random.default_rng(2)
PAGES, HEADS, SIZE, DIM = 5, 2, 16, 32


def arrays(tokens, dtype=jnp.float32):
    pages = [jnp.asarray(rng.standard_normal((PAGES, HEADS, SIZE, DIM)), dtype) for _ in range(2)]
    new = [jnp.asarray(rng.standard_normal((tokens, HEADS, DIM)), jnp.float32) for _ in range(2)]
    return (*pages, *new)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_writes_its_slots_and_nothing_else(dtype):
    k_pages, v_pages, k, v = arrays(5, dtype)
    slots = [17, -1, 79, 3, -2]  # -2 is no other's slot if counted from the end
    want = [np.array(k_pages), np.array(v_pages)]
    for t, slot in enumerate(slots):
        if slot >= 0:
            want[0][slot // SIZE, :, slot % SIZE] = k[t].astype(dtype)
            want[1][slot // SIZE, :, slot % SIZE] = v[t].astype(dtype)
    got = jq.append_kv(k_pages, v_pages, k, v, jnp.array(slots))
    for array, expected in zip(got, want, strict=True):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantized_by_the_kernels_as_by_plain_jax(dtype):
    k_pages, v_pages, k, v = arrays(4)
    k, v = k.at[1].mul(1e4).at[2, 0].set(0), v.at[0, 1, 3].set(jnp.nan).at[3].set(-jnp.inf)
    scales = dict(k_scales=jnp.ones((PAGES, HEADS, SIZE)), v_scales=jnp.ones((PAGES, HEADS, SIZE)))
    call = (k_pages.astype(dtype), v_pages.astype(dtype), k, v, jnp.array([17, 3, 79, 20]))
    options = scales if dtype == jnp.int8 else {}
    want = jq.append_kv(*call, **options)
    got = jq.implementation("sim")(jq.append_kv)(*call, **options)
    for array, expected in zip(got, want, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array.astype(jnp.float32), expected.astype(jnp.float32))
    if dtype == jnp.int8:
        rows = got[0][1, :, 1].astype(jnp.float32) * got[2][1, :, 1, None]
        assert nmse(rows, k[0]) <= 1e-4
        assert (
            got[2][0, 0, 3] == jnp.max(jnp.abs(k[1, 0])) * jnp.float32(1 / 127)
            and got[2][4, 0, 15] == 0
        )
        assert jnp.isnan(got[3][1, 1, 1]) and jnp.isinf(got[3][1, 0, 4])


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", jq.PAGE_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [96, 576])
def test_latent_pages_are_a_single_array(dim, dtype, implementation):
    pages = jnp.asarray(rng.standard_normal((PAGES, 1, SIZE, dim)), jnp.float32).astype(dtype)
    k = jnp.asarray(rng.standard_normal((4, 1, dim)), jnp.float32).at[1, 0, 3].set(1e3)
    slots = np.array([17, -1, 79, 3])
    scales = jnp.ones((PAGES, 1, SIZE)) if dtype == jnp.int8 else None
    want = np.array(pages.astype(jnp.float32))
    rows, steps = np.asarray(k), np.ones((4, 1), np.float32)
    if dtype == jnp.int8:
        rows, steps = oracles.int8_vectors(rows)
    for t, slot in enumerate(slots):
        if slot >= 0:
            stored = jnp.asarray(rows[t]).astype(dtype)
            want[slot // SIZE, :, slot % SIZE] = stored.astype(jnp.float32)
    call = jax.jit(lambda pages, k, scales: jq.append_kv(pages, None, k, None, slots, **scales))
    got = jq.implementation(implementation)(call)(
        pages, k, {} if scales is None else {"k_scales": scales}
    )
    assert len(got) == (1 if scales is None else 2) and got[0].dtype == dtype
    np.testing.assert_array_equal(got[0].astype(jnp.float32), want)
    if scales is not None:
        want = np.ones((PAGES, 1, SIZE), np.float32)
        want[slots[[0, 2, 3]] // SIZE, :, slots[[0, 2, 3]] % SIZE] = steps[[0, 2, 3]]
        np.testing.assert_array_equal(got[1], want)


def test_donated_latent_pages_are_updated_in_place():
    pages, k = jnp.zeros((PAGES, 1, SIZE, 576), jnp.bfloat16), jnp.ones((1, 1, 576))
    program = jax.jit(
        lambda pages, k: jq.append_kv(pages, None, k, None, jnp.array([2])), donate_argnums=0
    )
    pointer = pages.unsafe_buffer_pointer()
    (got,) = program(pages, k)
    assert got.unsafe_buffer_pointer() == pointer and got[0, 0, 2, 575] == 1


def test_no_latent_tokens():
    pages = jnp.ones((PAGES, 1, SIZE, 64))
    (got,) = jq.append_kv(pages, None, jnp.ones((0, 1, 64)), None, jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(got, pages)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(v=jnp.ones((3, 1, 64))), TypeError, "v belongs to v_pages, which is None"),
        (dict(v_scales=jnp.ones((5, 1, 16))), TypeError, "v_scales belongs to v_pages"),
        (dict(k_scales=jnp.ones((5, 1, 16))), TypeError, "k_scales belongs to int8 k_pages"),
        (dict(k_pages=jnp.zeros((5, 1, 16, 64), jnp.int8)), TypeError, "needs k_scales"),
        (dict(k_pages=jnp.zeros((5, 1, 16, 80))), ValueError, "head_dim=80 must be .*544, 576"),
        (dict(k_pages=jnp.zeros((5, 1, 24, 64))), ValueError, "page_size=24"),
        (dict(k=jnp.ones((3, 1, 32))), ValueError, r"k has shape \(3, 1, 32\).*\(3, 1, 64\)"),
        (dict(v_pages=jnp.zeros((5, 1, 16, 64))), TypeError, "v is of type NoneType"),
    ],
)
def test_latent_arguments_that_do_not_fit(change, error, message):
    good = dict(k_pages=jnp.zeros((5, 1, 16, 64)), v_pages=None, v=None)
    good |= dict(k=jnp.ones((3, 1, 64)), slot_mapping=jnp.arange(3))
    with pytest.raises(error, match=message):
        jq.append_kv(**(good | change))


def test_slots_outside_the_pages_are_skipped_inside_a_program():
    k_pages, v_pages, k, v = arrays(3)
    got = jax.jit(jq.append_kv)(
        k_pages, v_pages, k, v, jnp.array([-(2**31), PAGES * SIZE, 2**31 - 1])
    )
    np.testing.assert_array_equal(got[0], k_pages)
    np.testing.assert_array_equal(got[1], v_pages)


def test_donated_pages_are_updated_in_place():
    k_pages, v_pages, k, v = arrays(1)
    program = jax.jit(jq.append_kv, donate_argnums=(0, 1))
    pointers = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    got = program(k_pages, v_pages, k, v, jnp.array([2]))
    assert tuple(array.unsafe_buffer_pointer() for array in got) == pointers


def test_in_a_loop_without_a_copy_of_the_pages():
    k_pages, v_pages, k, v = arrays(1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(k_pages, v_pages, k, v):
        def step(i, pages):
            return jq.append_kv(*pages, k + i, v + i, jnp.full(1, 3 * i))

        return jax.lax.fori_loop(0, 6, step, (k_pages, v_pages))

    text = program.lower(k_pages, v_pages, k, v).compile().as_text()
    pages_type = f"f32[{PAGES},{HEADS},{SIZE},{DIM}]"
    assert not [line for line in text.splitlines() if " copy(" in line and pages_type in line]
    got, _ = program(k_pages, v_pages, k, v)
    np.testing.assert_array_equal(got[0, :, 15], k[0] + 5)


def test_no_tokens():
    k_pages, v_pages, k, v = arrays(0)
    got = jq.append_kv(k_pages, v_pages, k, v, jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(got[0], k_pages)


def pages(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


INT8 = {name: jnp.zeros((5, 2, 16, 32), jnp.int8) for name in ("k_pages", "v_pages")}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (dict(k_pages=pages(5, 2, 8, 32), v_pages=pages(5, 2, 8, 32)), ValueError, "page_size=8"),
        (dict(k_pages=pages(5, 2, 0, 32), v_pages=pages(5, 2, 0, 32)), ValueError, "page_size=0"),
        (
            dict(k_pages=pages(0, 2, 16, 32), v_pages=pages(0, 2, 16, 32)),
            ValueError,
            "no axis may be empty",
        ),
        (
            dict(k_pages=pages(5, 16, 32), v_pages=pages(5, 16, 32)),
            ValueError,
            r"k_pages has shape \(5, 16, 32\)",
        ),
        (
            dict(k_pages=pages(5, 2, 24, 32), v_pages=pages(5, 2, 24, 32)),
            ValueError,
            "page_size=24",
        ),
        (
            dict(k_pages=pages(5, 2, 16, 40), v_pages=pages(5, 2, 16, 40)),
            ValueError,
            "head_dim=40.*32, 48, 64",
        ),
        (dict(v_pages=pages(5, 2, 32, 32)), ValueError, "v_pages has shape"),
        (
            dict(v_pages=pages(5, 2, 16, 32, dtype=jnp.float16)),
            TypeError,
            "v_pages has dtype float16",
        ),
        (
            dict(k_pages=pages(5, 2, 16, 32, dtype=jnp.int16)),
            TypeError,
            "k_pages has dtype int16.*float8_e4m3fn",
        ),
        (
            dict(k_scales=pages(5, 2, 16)),
            TypeError,
            "k_scales belongs to int8 k_pages, which is float32",
        ),
        (INT8, TypeError, r"int8 k_pages needs k_scales, float32 of shape \(5, 2, 16\)"),
        (INT8 | dict(k_scales=pages(5, 2, 16)), TypeError, "int8 k_pages needs v_scales"),
        (
            INT8 | dict(k_scales=pages(5, 2, 16, dtype=jnp.float16)),
            TypeError,
            "k_scales has dtype float16",
        ),
        (
            INT8 | dict(k_scales=pages(5, 2), v_scales=pages(5, 2, 16)),
            ValueError,
            r"k_scales has shape \(5, 2\)",
        ),
        (dict(k=pages(3, 4, 32)), ValueError, r"k has shape \(3, 4, 32\).*\(3, 2, 32\)"),
        (dict(v=pages(2, 2, 32)), ValueError, "v has shape"),
        (dict(k=pages(3, 2, 32, dtype=jnp.int8)), TypeError, "k has dtype int8"),
        (dict(slot_mapping=jnp.zeros((3, 1), jnp.int32)), ValueError, "slot_mapping has shape"),
        (dict(slot_mapping=jnp.zeros(3)), TypeError, "slot_mapping has dtype float32"),
        (dict(slot_mapping=np.array([0, 1, 80])), ValueError, "slot_mapping holds 80.*80"),
        (dict(slot_mapping=np.array([0, 1, 2**32])), ValueError, "slot_mapping holds 2147483647"),
        (dict(k=None), TypeError, "k is of type NoneType; it must be a float array"),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    good = dict(
        k_pages=pages(5, 2, 16, 32),
        v_pages=pages(5, 2, 16, 32),
        k=pages(3, 2, 32),
        v=pages(3, 2, 32),
        slot_mapping=jnp.arange(3),
    )
    with pytest.raises(error, match=message):
        jq.append_kv(**(good | call))


def test_slots_that_a_traced_program_closes_over():
    k_pages, v_pages, k, v = arrays(2, jnp.float32)
    program = jax.jit(lambda slots: jq.append_kv(k_pages, v_pages, k, v, slots))
    inside = jnp.array([17, 3])
    for array, want in zip(
        jax.jit(lambda: jq.append_kv(k_pages, v_pages, k, v, inside))(),
        program(inside),
        strict=True,
    ):
        np.testing.assert_array_equal(array, want)
    beyond = jnp.array([17, 80])
    with pytest.raises(ValueError, match="slot_mapping holds 80"):
        jax.jit(lambda: jq.append_kv(k_pages, v_pages, k, v, beyond))()
