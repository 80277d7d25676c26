"""The gated delta rule with the CPU kernels, for every available instruction set."""

import jax
import numpy as np
import pytest
from support import delta_nets
from support.delta_nets import EPS
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import native

pytestmark = [needs_native, pytest.mark.cpu_kernels]

#: Numbers of k heads and v heads, and their sizes; states have blocks of 32 columns, and half
#: blocks.
DIMS = [(1, 1, 16, 16), (2, 4, 48, 80), (1, 2, 128, 128), (1, 1, 256, 32), (1, 1, 16, 256)]


def rule(*operands, **options):
    return jax.jit(lambda *a: jq.implementation("native")(jq.gated_delta_rule)(*a, **options))(
        *operands
    )


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("time", [1, 2, 37])
@pytest.mark.parametrize("dims", DIMS)
def test_the_rule(kernels, dims, time):
    operands = delta_nets.sequences(2, time, *dims)
    for got, want in zip(rule(*operands), delta_nets.rule(*operands), strict=True):
        assert nmse(got, want) <= 1e-12


def test_a_decay_of_all(kernels):
    operands = delta_nets.sequences(1, 4, 1, 1, 16, 16)
    operands[3][0, 2] = -np.inf
    for got, want in zip(rule(*operands), delta_nets.rule(*operands), strict=True):
        assert nmse(got, want) <= 1e-12


def test_padding_at_the_end_leaves_the_state_bit_for_bit(kernels):
    """Padding at the start or in between has no effect either."""
    *tokens, state = delta_nets.sequences(1, 6, 1, 2, 32, 48)
    _, want = rule(*tokens, state)
    places = [2, 3, 5, 6, 8, 9]
    more = [np.full((1, 12, *x.shape[2:]), np.nan, np.float32) for x in tokens]
    more[0][...], more[3][...], more[4][...] = 1, 0, 0  # q, g and beta
    for wide, x in zip(more, tokens, strict=True):
        wide[:, places] = x
    o, got = rule(*more, state)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(o[:, places], rule(*tokens, state)[0])
    assert np.isfinite(o).all()


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("dims", DIMS)
def test_the_step(kernels, dims, width):
    tokens, weights = delta_nets.projected(2, 3, *dims, width)
    want, states = delta_nets.layer(tokens, weights, dims[2], tiled=True)
    columns = np.full((2, width, tokens[0].shape[2]), np.nan, np.float32)
    state = np.full(states[0].shape, np.nan, np.float32)
    with jq.implementation("native"):
        for t in range(3):
            y, columns, state = jq.gated_delta_step(
                *(x[:, t] for x in tokens),
                *(columns, state, np.full(2, t)),
                **weights,
                eps=EPS,
                tiled=True,
            )
            assert nmse(y, want[:, t]) <= 1e-11
    assert nmse(state, states[3]) <= 1e-12


def test_sizes_without_kernels_are_plain_jax():
    for key_dim, value_dim, taken in ((24, 16, 0), (16, 8, 0), (592, 16, 0), (16, 576, 1)):
        tokens, weights = delta_nets.projected(1, 1, 1, 1, key_dim, value_dim, 2)
        step = jax.jit(lambda *a, w=weights: jq.gated_delta_step(*a, **w, eps=EPS))
        columns = np.zeros((1, 2, tokens[0].shape[2]), np.float32)
        *given, state = delta_nets.sequences(1, 2, 1, 1, key_dim, value_dim)
        texts = (
            jax.jit(jq.gated_delta_rule).lower(*given, state).as_text(),
            step.lower(*(x[:, 0] for x in tokens), columns, state, np.array([0])).as_text(),
        )
        assert [text.count("@jax_q4k_gated_delta") for text in texts] == [taken] * 2


def test_a_state_is_updated_in_place_or_not_at_all():
    operands = delta_nets.sequences(1, 1, 1, 1, 16, 16)
    results = [jax.ShapeDtypeStruct(x.shape, np.float32) for x in (operands[2], operands[5])]
    with pytest.raises(jax.errors.JaxRuntimeError, match="state must be updated in place"):
        native.call("gated_delta_rule", results, *operands, scale=1.0, tiled=False)
