"""`prefetch=`: it changes no result; which launches prefetch how much."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.implementations import NATIVE

import jax_q4k as jq
from jax_q4k.ops.prefetch import MOST_ROWS

from .random_weights import random_weights

K, EPS = 256, 1e-5
W, NEXT = random_weights("Q4_K", 64, K, 1), random_weights("Q6_K", 512, K, 2)
GATE, UP, DOWN = (random_weights("Q4_K", K, K, i) for i in (3, 4, 5))
NORM = jnp.ones(K)
PAGES = jnp.zeros((4, 2, 16, 32), jnp.bfloat16)
ANGLES = jnp.zeros((2, 16)), jnp.zeros((2, 16))
TABLES, LENGTHS = jnp.arange(2)[:, None], jnp.array([3, 5])

#: Name -> f(x, prefetch); and the launches that prefetch, in order.
CALLS = {
    "linear": lambda x, p: jq.linear(x, (W,), norm_weight=NORM, eps=EPS, prefetch=p),
    "linear of nothing else": lambda x, p: jq.linear(x, (W,), prefetch=p),
    "mlp": lambda x, p: jq.mlp(x, GATE, UP, DOWN, prefetch=p),
    "qkv_rope_append": lambda x, p: jq.qkv_rope_append(
        x, (W, W, W), PAGES, PAGES, jnp.array([0, 17]), *ANGLES, interleaved=False, prefetch=p
    ),
    "paged_attention_matmul": lambda x, p: jq.paged_attention_matmul(
        x.reshape(2, 8, 32), PAGES, PAGES, TABLES, LENGTHS, W, prefetch=p
    ),
}
ASKING = {
    "linear": [""],
    "linear of nothing else": [""],
    "mlp": ["gated", ""],
    "qkv_rope_append": ["qkv_append"],
    "paged_attention_matmul": ["paged_attention"],  # it prefetches everything
}


def activations(rows: int = 2) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (rows, K))


@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", "sim", NATIVE])
@pytest.mark.parametrize("name", CALLS)
def test_results_stay(name, implementation):
    x = activations()
    with jq.implementation(implementation):
        want = jax.jit(lambda x: CALLS[name](x, ()))(x)
        got = jax.jit(lambda x: CALLS[name](x, (NEXT, W)))(x)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))


def asked(function, *arguments, device="NVIDIA H200") -> list[str]:
    """Names of the launches that prefetch."""
    calls = jq.explain(function, *arguments, platform="cuda", device=device).calls
    return [k.name for call in calls for k in call.kernels if k.ahead_bytes]


@pytest.mark.parametrize("name", CALLS)
def test_launches_that_ask(name):
    found = asked(lambda x: CALLS[name](x, (NEXT,)), activations())
    assert len(found) == len(ASKING[name])
    for kernel, start in zip(found, ASKING[name], strict=True):
        assert kernel.startswith(start or "matvec")
    # the last launch prefetches the given weights
    (call,) = jq.explain(lambda x: CALLS[name](x, (NEXT,)), activations(), platform="cuda").calls
    last = [kernel for kernel in call.kernels if kernel.ahead_bytes][-1]
    planes = sum(plane.nbytes for plane in NEXT.planes)
    assert 0.5 * planes < last.ahead_bytes <= planes and ", prefetches 0.1 MB" in str(call)


def test_devices_that_cannot_ask_for_nothing():
    """sm_80 has no bulk prefetch; the L2 size of an unknown device is not known."""
    for device in ("NVIDIA A100-SXM4-80GB", "NVIDIA GB999"):
        assert asked(lambda x: CALLS["mlp"](x, (NEXT,)), activations(), device=device) == []


def test_many_rows_ask_for_nothing():
    call = CALLS["linear"]
    assert asked(lambda x: call(x, (NEXT,)), activations(MOST_ROWS))
    assert asked(lambda x: call(x, (NEXT,)), activations(MOST_ROWS + 1)) == []


def test_it_can_be_turned_off():
    def silent(x):
        with jq.implementation(prefetch=False):
            return CALLS["mlp"](x, (NEXT,))

    assert asked(silent, activations()) == []
    with pytest.raises(ValueError, match="prefetch='no' must be True or False"):
        jq.implementation(prefetch="no").__enter__()


def test_weights_that_are_not_packed_are_passed_over():
    dense = jnp.ones((64, K))
    assert asked(lambda x: CALLS["linear"](x, (dense,)), activations()) == []
    assert len(asked(lambda x: CALLS["linear"](x, (dense, NEXT)), activations())) == 1


def test_a_large_matrix_is_asked_for_in_parts():
    """Attention prefetches a sixth of the L2's size, the following product the next part."""
    row = 16 * 144  # bytes

    def step(x, plane):
        large = jq.QuantizedArray("Q4_K", (20480, 4096), (plane,))
        return CALLS["paged_attention_matmul"](x, (large,))

    plane = jax.ShapeDtypeStruct((20480, 16, 144), jnp.uint8)
    (call,) = jq.explain(step, activations(), plane, platform="cuda").calls
    wanted = [kernel.arguments["prefetch"][0] for kernel in call.kernels]
    assert [(each.first, each.last) for each in wanted] == [(0, 4551), (4551, 9102)]
    assert 4551 * row == pytest.approx((60 << 20) / 6, rel=1e-3)


@pytest.mark.slow("compiles a program for each case", quick=["mlp"])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_transforms_pass_it_over(name):
    x = activations()

    def total(x, p):
        (y,) = jax.tree.leaves(CALLS[name](x, p))
        return y.sum()

    for transform in (jax.grad, lambda f, **o: jax.vmap(f, in_axes=(0, None))):
        given = x[:, None] if transform is not jax.grad else x
        got, want = (transform(total)(given, p) for p in ((NEXT,), ()))
        np.testing.assert_array_equal(got, want)
    tangents = jax.jvp(lambda x: total(x, (NEXT,)), (x,), (x,))
    for got, want in zip(tangents, jax.jvp(lambda x: total(x, ()), (x,), (x,)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_matrix_of_a_stack():
    """The kernel itself reads the index that locates the matrix in the stack."""
    x = activations()

    matrices = [random_weights("Q4_K", K, K, seed) for seed in (7, 8, 9)]
    square = jax.tree.map(lambda *planes: jnp.stack(planes), *matrices)

    def layers(x, index):
        return jq.mlp(x, square, square, square, index=index, prefetch=(NEXT,))

    (call,) = jq.explain(layers, x, jnp.int32(1), platform="cuda").calls
    gated, down = call.kernels
    assert [each.layers for each in gated.arguments["prefetch"]] == [3]
    assert [each.layers for each in down.arguments["prefetch"]] == [0]
    with jq.implementation("sim"):
        got = jax.jit(layers)(x, -1)
    with jq.implementation("sim", prefetch=False):
        want = jax.jit(layers)(x, 2)
    np.testing.assert_array_equal(got, want)
