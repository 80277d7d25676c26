import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq

rng = np.random.default_rng(1)


def test_equals_the_formula_in_numpy():
    x = rng.standard_normal((3, 4, 96)).astype(np.float32)
    values, scale_sum = jq.quantize_q8_1(x)
    assert values.shape == x.shape and values.dtype == jnp.int8
    assert scale_sum.shape == (3, 4, 3, 2) and scale_sum.dtype == jnp.float32
    groups = x.reshape(3, 4, 3, 32)
    amax = np.abs(groups).max(-1)
    inverse = np.float32(127) / amax
    want = np.rint(groups * inverse[..., None]).astype(np.int8)
    np.testing.assert_array_equal(np.asarray(values).reshape(want.shape), want)
    scale = amax * np.float32(1 / 127)
    np.testing.assert_array_equal(scale_sum[..., 0], scale)
    np.testing.assert_array_equal(
        scale_sum[..., 1], scale * want.sum(-1, dtype=np.int32).astype(np.float32)
    )


def test_halves_round_to_even_and_the_largest_is_127():
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [127.0, 0.5, 1.5, -2.5, -127.0]
    values, _ = jq.quantize_q8_1(x)
    assert values[0, :5].tolist() == [127, 0, 2, -2, -127]


def test_values_whose_reciprocal_overflows_stay_within_127():
    values, _ = jq.quantize_q8_1(np.array([[1e-37, -1e-37] * 16], np.float32))
    assert values[0, :2].tolist() == [127, -127]


def test_a_group_of_zeros():
    values, scale_sum = jq.quantize_q8_1(jnp.zeros((2, 64)))
    assert not np.any(values) and not np.any(scale_sum)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_stays_in_its_group(poison):
    x = rng.standard_normal((2, 64)).astype(np.float32)
    values, scale_sum = jq.quantize_q8_1(x)
    x[0, 40] = poison
    got_values, got = jq.quantize_q8_1(x)
    assert not np.any(got_values[0, 32:]) and not np.isfinite(got[0, 1]).any()
    np.testing.assert_array_equal(got_values[1], values[1])
    np.testing.assert_array_equal(got[0, 0], scale_sum[0, 0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_are_widened_first(dtype):
    x = jnp.asarray(rng.standard_normal((1, 32)), dtype)
    for got, want in zip(jq.quantize_q8_1(x), jq.quantize_q8_1(x.astype(jnp.float32)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_vector_is_a_row():
    x = rng.standard_normal(64).astype(np.float32)
    for got, want in zip(jq.quantize_q8_1(x), jq.quantize_q8_1(x[None]), strict=True):
        np.testing.assert_array_equal(got, want[0])


def test_no_rows():
    values, scale_sum = jq.quantize_q8_1(jnp.zeros((0, 64)))
    assert values.shape == (0, 64) and scale_sum.shape == (0, 2, 2)


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match=r"x has shape \(2, 33\).*multiple of 32"):
        jq.quantize_q8_1(jnp.zeros((2, 33)))
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        jq.quantize_q8_1(jnp.zeros(()))
    with pytest.raises(TypeError, match="x has dtype int8"):
        jq.quantize_q8_1(jnp.zeros((2, 32), jnp.int8))
