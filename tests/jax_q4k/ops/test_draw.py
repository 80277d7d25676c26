"""`draw` by the native kernel against plain JAX; `tests/models/sampling` has the rules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import native
from jax_q4k.ops.draw import DrawParameters, draw

ROWS = 200


@functools.cache
def drawing(implementation: Any) -> Any:
    return jax.jit(jq.implementation(implementation)(draw))


@pytest.mark.slow("compiles a program for each case", quick=["vocab=1", "vocab=65", "vocab=1500"])
@needs_native
@pytest.mark.parametrize("vocab", [1, 64, 65, 1500, 5000])
def test_the_kernel_draws_what_plain_jax_draws(vocab: int) -> None:
    """Rows have fewer, as many and more tokens than the candidates, from flat to peaked."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((ROWS, vocab)) * rng.choice([0.01, 1, 5, 30], (ROWS, 1))
    logits[::5] = np.round(logits[::5])
    logits[::7, ::3] = -np.inf
    logits[3, vocab // 2], logits[4, vocab // 2], logits[6] = np.nan, np.inf, -np.inf
    parameters = DrawParameters(
        seed=rng.integers(0, 2**32, ROWS, dtype=np.uint32),
        temperature=rng.choice([0, 1e-6, 0.1, 0.7, 1, 3, 100], ROWS).astype(np.float32),
        top_k=rng.choice([0, 1, 40, 1024, 1025, 2000, 2**31 - 1], ROWS).astype(np.int32),
        top_p=rng.choice([1, 0.99, 0.5, 1e-9], ROWS).astype(np.float32),
        min_p=rng.choice([0, 0, 0.05, 1], ROWS).astype(np.float32),
        step=rng.integers(0, 1000, ROWS).astype(np.int32),
    )
    args = logits.astype(np.float32), parameters
    tokens, want = (np.asarray(drawing(name)(*args)) for name in ("native", "xla"))
    assert tokens.tolist() == want.tolist() and tokens.dtype == np.int32
    assert tokens[[3, 4, 6]].tolist() == [vocab // 2, vocab // 2, 0]


@needs_native
def test_a_row_depends_on_nothing_else() -> None:
    logits = np.random.default_rng(0).standard_normal((9, 700)).astype(np.float32)
    ones = np.ones(9, np.float32)
    parameters = DrawParameters(np.arange(9, dtype=np.uint32), ones, *np.zeros((4, 9), np.int32))
    parameters = parameters._replace(top_p=0.9 * ones, min_p=0 * ones)
    whole = drawing("native")(logits, parameters)
    for row in range(9):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], (logits, parameters))
        assert drawing("native")(*one).tolist() == [whole[row]]
    mapped = jax.vmap(draw)(logits[:, None], jax.tree.map(lambda x: x[:, None], parameters))
    assert mapped[:, 0].tolist() == whole.tolist()


X, FLOATS, INTS = np.zeros((2, 5), np.float32), np.ones(2, np.float32), np.zeros(2, np.int32)


@needs_native
@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((X, FLOATS, INTS, FLOATS, FLOATS, INTS), "step is missing"),
        ((X, FLOATS, INTS, FLOATS, FLOATS, INTS, INTS, INTS), "too many operands"),
        ((X, FLOATS, FLOATS, FLOATS, FLOATS, INTS, INTS), "top_k has an element type"),
        ((X, FLOATS[:1], INTS, FLOATS, FLOATS, INTS, INTS), "temperature has shape"),
        ((X[:, :0], FLOATS, INTS, FLOATS, FLOATS, INTS, INTS), "at least one column"),
    ],
)
def test_the_handler_refuses_what_does_not_fit(operands: Any, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        struct = jax.ShapeDtypeStruct((2,), jnp.int32)
        args = map(jnp.asarray, operands)
        jax.block_until_ready(native.call("draw", [struct], *args, least_temperature=1e-5))
