"""16-bit activations: operations compute in float32 and round to the activations' dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support.helpers import nmse

from ..cases import CASES, CONTIGUOUS, PAGES, RING, SCALES, STATE, ramp

ALL = range(9)
#: Results that are float32 for any dtype of activations.
OF_THEIR_OWN = {
    "append_kv int8": ALL,
    "quantize_q8_1": ALL,
    "embedding of floats": ALL,
    "route": (0, 1),  # ids and weights, not the gradient
    "gated_delta_rule": (1,),  # the state
    "gated_delta_rule in chunks": (1,),
    "gated_delta_step": (1, 2),  # columns and state
}


def is_activation(x):
    cached = any(x is of for of in (PAGES, CONTIGUOUS, SCALES, STATE, RING))
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) and not cached


def with_gradient(function):
    """Returns the results, and the first argument's cotangent."""

    def both(x, *others):
        results, back = jax.vjp(lambda x: function(x, *others), x)
        along = (ramp(-1, 1, *y.shape).astype(jnp.bfloat16) for y in jax.tree.leaves(results))
        along = jax.tree.unflatten(jax.tree.structure(results), along)
        return results, back(jax.tree.map(lambda c, y: c.astype(y.dtype), along, results))

    return jax.jit(both)


#: One case of each operation that takes activations.
NAMES = [
    name
    for name, (_, arguments, _) in CASES.items()
    if any(map(is_activation, arguments))
    and (name == "matmul Q4_K" or not name.startswith("matmul Q"))
]


@pytest.mark.slow(
    "compiles derivatives of each operation",
    quick=["paged_attention-bfloat16"],
)
@pytest.mark.parametrize(
    "name, dtype", [*((name, jnp.bfloat16) for name in NAMES), ("causal_attention", jnp.float16)]
)
def test_results_and_gradients_are_those_of_float32(name, dtype):
    function, arguments, differentiable = CASES[name]
    whole = with_gradient(function) if differentiable else jax.jit(function)
    half = [a.astype(dtype) if is_activation(a) else a for a in arguments]
    same = [a.astype(jnp.float32) if is_activation(a) else a for a in half]
    roundoff = float(jnp.finfo(dtype).eps) / 2
    got, want = (jax.tree.leaves(whole(*given)) for given in (half, same))
    for at, (rounded, exact) in enumerate(zip(got, want, strict=True)):
        follows = exact.dtype == jnp.float32 and at not in OF_THEIR_OWN.get(name, ())
        assert rounded.dtype == (dtype if follows else exact.dtype)
        assert nmse(rounded, exact) <= roundoff**2
