import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq
from ptx_kernels import formats

from .random_weights import random_weights


@pytest.mark.grid
@pytest.mark.parametrize("format", formats.names())
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_equals_the_formats_own_decoder(format, dtype):
    w = random_weights(format, 4, 512)
    want = formats.get(format).decode(tuple(np.asarray(p) for p in w.planes), np)
    got = jax.jit(jq.dequantize, static_argnums=1)(w, dtype)
    assert got.shape == (4, 512) and got.dtype == dtype
    np.testing.assert_array_equal(got, jnp.asarray(want).astype(dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    w = random_weights("Q4_K", 4, 256)[:0]
    assert jq.implementation(implementation)(jq.dequantize)(w, jnp.float16).shape == (0, 256)


def test_arguments_that_do_not_fit():
    w = random_weights("Q4_K", 4, 256)
    with pytest.raises(TypeError, match="must be a QuantizedArray"):
        jq.dequantize(jnp.zeros((4, 256)))
    with pytest.raises(TypeError, match="dtype=int8"):
        jq.dequantize(w, jnp.int8)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), w)
    with pytest.raises(ValueError, match=r"w has shape \(2, 4, 256\)"):
        jq.dequantize(stacked)
