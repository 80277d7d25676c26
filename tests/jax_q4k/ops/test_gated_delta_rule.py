"""The gated delta rule: its definition in float64, in chunks and in parts, with derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import delta_nets
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS, NATIVE

import jax_q4k as jq
from jax_q4k.ops.gated_delta_rule import CHUNK, FEW, chunked, stepwise

LAST = -1  # index of the state among the operands
FORMS = pytest.mark.parametrize("form", [stepwise, chunked])


def padded(operands, at, value=0.0):
    """Copies operands; makes tokens `at` of the last sequence padding, with `value` as k and v."""
    q, k, v, g, beta, state = (x.copy() for x in operands)
    k[-1, at] = v[-1, at] = value
    g[-1, at] = beta[-1, at] = 0
    return q, k, v, g, beta, state


@pytest.mark.slow("compiles a program for each case", quick=["time=1-dims0-tiled=True-native"])
@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "time, dims",
    [
        (1, (2, 4, 16, 32)),
        (FEW, (2, 6, 32, 48)),
        (FEW + 1, (3, 3, 16, 16)),
        (CHUNK, (1, 4, 8, 24)),  # without a CPU kernel
        (2 * CHUNK + 3, (2, 4, 32, 16)),
    ],
)
def test_equals_the_definition(implementation, time, dims, tiled):
    operands = delta_nets.sequences(2, time, *dims)
    with jq.implementation(implementation):
        got = jax.jit(functools.partial(jq.gated_delta_rule, tiled=tiled))(*operands)
    for one, want in zip(got, delta_nets.rule(*operands, tiled=tiled), strict=True):
        assert one.dtype == jnp.float32 and nmse(one, want) <= 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_scale_of_ones_own(implementation):
    operands = delta_nets.sequences(1, 3, 1, 2, 16, 16)
    with jq.implementation(implementation):
        o, _ = jq.gated_delta_rule(*operands, scale=0.3)
    assert nmse(o, delta_nets.rule(*operands, scale=0.3)[0]) <= 1e-12


@FORMS
def test_the_forms_of_plain_jax_in_float64(form):
    """Also holds for decays that leave nothing, within a chunk and between chunks."""
    for strength in (0.0, 1.0, 1e3):
        operands = delta_nets.sequences(1, 2 * CHUNK - 1, 2, 4, 8, 16)
        operands[3] *= np.float32(strength)
        with jax.enable_x64(True):
            wide = [x.astype(np.float64) for x in operands]
            got = jax.jit(functools.partial(form, scale=8**-0.5, tiled=True))(*wide)
            for one, want in zip(got, delta_nets.rule(*operands, tiled=True), strict=True):
                assert one.dtype == np.float64 and nmse(one, want) <= 1e-28


@pytest.mark.slow("compiles second derivatives")
@FORMS
def test_derivatives_are_finite_differences(form):
    operands = delta_nets.sequences(1, CHUNK + 2, 1, 2, 8, 8)
    operands[3][0, 5] = -900.0  # e^900 would be infinite: above the diagonal
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in operands]
        along = [jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in wide]
        along[3] = along[3].at[0, 5].set(0)

        @jax.jit
        def loss(step):
            given = [x + step * dx for x, dx in zip(wide, along, strict=True)]
            return sum(jnp.sum(jnp.sin(y)) for y in form(*given, scale=0.4, tiled=False))

        slope = jax.grad(loss)(0.0)
        difference = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert np.isfinite(slope) and float(slope) == pytest.approx(float(difference), rel=1e-7)


@pytest.mark.slow("compiles a program for each case", quick=["time=20-sim"])
@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("time", [3, FEW + 4])
def test_gradients_are_those_of_tokens_in_float64(implementation, time):
    operands = delta_nets.sequences(2, time, 2, 4, 16, 16)

    def loss(function, *operands):
        return sum(jnp.sum(jnp.sin(y)) for y in function(*operands))

    places = tuple(range(6))
    with jq.implementation(implementation):
        got = jax.jit(jax.grad(functools.partial(loss, jq.gated_delta_rule), places))(*operands)
    with jax.enable_x64(True):
        exact = functools.partial(loss, functools.partial(stepwise, scale=0.25, tiled=False))
        wide = [x.astype(np.float64) for x in operands]
        want = jax.jit(jax.grad(exact, places))(*wide)
    for one, expected in zip(got, want, strict=True):
        assert nmse(one, expected) <= 1e-11


@pytest.mark.slow("compiles three programs", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_a_sequence_in_two_pieces(implementation):
    """Cuts at every token, so that the parts are single tokens and chunks."""
    *tokens, state = delta_nets.sequences(2, FEW + 3, 1, 2, 16, 16)
    want = delta_nets.rule(*tokens, state)
    with jq.implementation(implementation):
        run = jax.jit(jq.gated_delta_rule)
        for cut in range(FEW + 4):
            first, between = run(*(x[:, :cut] for x in tokens), state)
            second, last = run(*(x[:, cut:] for x in tokens), between)
            assert nmse(np.concatenate([first, second], axis=1), want[0]) <= 1e-12
            assert nmse(last, want[1]) <= 1e-12


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_ten_thousand_tokens(implementation):
    """The head remembers about a thousand tokens."""
    operands = delta_nets.sequences(1, 10_000, 1, 1, 16, 16)
    with jq.implementation(implementation):
        got = jax.jit(jq.gated_delta_rule)(*operands)
    assert max(map(nmse, got, delta_nets.rule(*operands))) <= 1e-10


@pytest.mark.parametrize("implementation", [NATIVE])
def test_ten_thousand_steps(implementation):
    *tokens, state = operands = delta_nets.sequences(1, 10_000, 1, 1, 16, 16)

    def step(state, token):
        o, state = jq.gated_delta_rule(*(x[:, None] for x in token), state)
        return state, o[:, 0]

    with jq.implementation(implementation):
        state, o = jax.lax.scan(step, state, [jnp.swapaxes(x, 0, 1) for x in tokens])
    want = delta_nets.rule(*operands)
    assert nmse(o.swapaxes(0, 1), want[0]) <= 1e-10 and nmse(state, want[1]) <= 1e-10


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("time", [1, 7, FEW + 9, CHUNK + 40])
def test_padding_leaves_the_state_bit_for_bit(implementation, time):
    """Sequences of only padding, whatever it holds; the state may contain -0, inf and NaN."""
    operands = padded(delta_nets.sequences(2, time, 2, 2, 16, 16), slice(None), np.nan)
    special = [-0.0, np.inf, -np.inf, np.nan, 1e-42]
    operands[LAST][-1, 0, 0, :5] = special
    with jq.implementation(implementation):
        o, state = jax.jit(jq.gated_delta_rule)(*operands)
    np.testing.assert_array_equal(
        np.asarray(state)[-1].view(np.uint32), operands[LAST][-1].view(np.uint32)
    )
    assert nmse(o[0], delta_nets.rule(*(x[:1] for x in operands))[0][0]) <= 1e-12
    read = np.einsum("kv,tk->tv", operands[LAST][-1, 1], operands[0][-1, :, 1]) / 4
    assert nmse(o[-1, :, 1], read) <= 1e-12


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("time", [FEW, CHUNK + 6])
@pytest.mark.parametrize("value", [3.0, np.nan])
def test_padding_among_tokens_changes_nothing(implementation, time, value):
    whole = delta_nets.sequences(1, time, 1, 2, 16, 32)
    at = np.array([0, 3, 4, time - 1])
    operands = padded(whole, at, value)
    left = [np.delete(x, at, axis=1) for x in whole[:LAST]]
    want = delta_nets.rule(*left, whole[LAST])
    with jq.implementation(implementation):
        o, state = jax.jit(jq.gated_delta_rule)(*operands)
    assert nmse(np.delete(o, at, axis=1), want[0]) <= 1e-12 and nmse(state, want[1]) <= 1e-12


@pytest.mark.slow("compiles a program for each case", quick=["chunked"])
@FORMS
def test_padding_has_no_gradient(form):
    operands = padded(delta_nets.sequences(1, FEW + 1, 1, 1, 8, 8), [2, 5], np.nan)

    real = np.delete(np.arange(FEW + 1), [2, 5])

    def loss(*operands):
        o, state = form(*operands, scale=1.0, tiled=False)
        return jnp.sum(o[:, real] ** 2) + jnp.sum(state**2)

    *gradients, _, beta, state = jax.jit(jax.grad(loss, tuple(range(6))))(*operands)
    assert jnp.isfinite(state).all() and (state != 0).any()
    for gradient in (*gradients, beta):
        assert not gradient[0, [2, 5]].any() and jnp.isfinite(gradient).all()
        assert gradient[0, [1, 3]].any()


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("time", [5, FEW + 5])
def test_a_bad_token_spoils_what_comes_after_it_in_its_head(implementation, time):
    operands = delta_nets.sequences(1, time, 2, 2, 16, 16)
    operands[2][0, 3, 0, 7] = np.inf
    with jq.implementation(implementation):
        o, state = jq.gated_delta_rule(*operands)
    assert np.isfinite(o[:, :, 1]).all() and np.isfinite(state[:, 1]).all()
    assert not np.isfinite(o[0, 3:, 0, 7]).any() and not np.isfinite(state[0, 0, :, 7]).any()
    if time <= FEW or implementation == "native":  # a chunk's products use all its tokens
        assert np.isfinite(o[:, :3]).all()
        assert np.isfinite(np.delete(state[0, 0], 7, axis=-1)).all()


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_vmap_of_sequences_is_one_call(implementation):
    operands = delta_nets.sequences(6, 4, 1, 2, 16, 16)
    examples = [x.reshape(3, 2, *x.shape[1:]) for x in operands]
    shared = examples[0][0]  # shared by all examples

    def function(k, *others):
        return jq.gated_delta_rule(shared, k, *others)

    with jq.implementation(implementation):
        got = jax.jit(jax.vmap(function))(*examples[1:])
        for i in range(3):
            want = function(*(x[i] for x in examples[1:]))
            assert all(nmse(a[i], b) <= 1e-13 for a, b in zip(got, want, strict=True))
    assert "scan" not in str(jax.make_jaxpr(jax.vmap(function))(*examples[1:]))


@NATIVE.marks[0]
def test_a_donated_state_is_updated_in_place():
    *tokens, state = map(jnp.asarray, delta_nets.sequences(2, 3, 1, 2, 16, 32))
    pointer = state.unsafe_buffer_pointer()
    _, updated = jax.jit(jq.gated_delta_rule, donate_argnums=5)(*tokens, state)
    assert updated.unsafe_buffer_pointer() == pointer and state.is_deleted()


@NATIVE.marks[0]
def test_in_a_loop_without_a_copy_of_the_state():
    *tokens, state = map(jnp.asarray, delta_nets.sequences(1, 1, 1, 2, 16, 32))

    @functools.partial(jax.jit, donate_argnums=0)
    def program(state):
        step = functools.partial(jq.gated_delta_rule, *tokens)
        return jax.lax.fori_loop(0, 6, lambda _, state: step(state)[1], state)

    text = program.lower(state).compile().as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and "f32[1,2,16,32]" in line]
    assert not copies
    many = [np.repeat(x, 6, axis=1) for x in tokens]
    want = delta_nets.rule(*many, state)[1]
    assert nmse(program(state), want) <= 1e-12


@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (1, 2, 16, 24)])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_a_step_of_heads_without_a_kernel(implementation, dims):
    operands = delta_nets.sequences(1, 1, *dims)
    with jq.implementation(implementation):
        got = jq.gated_delta_rule(*operands)
    for one, want in zip(got, delta_nets.rule(*operands), strict=True):
        assert nmse(one, want) <= 1e-12


@pytest.mark.parametrize("batch, time, dim", [(0, 3, 16), (2, 0, 16), (0, 0, 8)])
def test_no_tokens(batch, time, dim):
    *tokens, state = delta_nets.sequences(batch, time, 1, 2, dim, dim)
    o, updated = jq.gated_delta_rule(*tokens, state)
    assert o.shape == (batch, time, 2, dim)
    np.testing.assert_array_equal(updated, state)


GOOD = dict(
    zip(("q", "k", "v", "g", "beta", "state"), delta_nets.sequences(2, 3, 2, 4, 8, 16), strict=True)
)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"q": GOOD["q"][0]}, ValueError, r"q has shape \(3, 2, 8\); it must be \(batch, time"),
        ({"q": GOOD["q"][:, :, :0]}, ValueError, r"q has shape \(2, 3, 0, 8\).*with a head"),
        ({"q": GOOD["q"][..., :0]}, ValueError, r"q has shape \(2, 3, 2, 0\).*and a dimension"),
        ({"k": GOOD["k"][:, :2]}, ValueError, r"k has shape \(2, 2, 2, 8\).*q's shape"),
        ({"v": GOOD["v"][:1]}, ValueError, r"v has shape \(1, 3, 4, 16\).*\(2, 3, num_v_heads"),
        ({"v": GOOD["v"][..., :0]}, ValueError, r"v has shape \(2, 3, 4, 0\)"),
        ({"v": GOOD["v"][:, :, :3]}, ValueError, "num_v_heads=3 must be a multiple of num_k.*=2"),
        ({"v": GOOD["v"][:, :, :0]}, ValueError, "num_v_heads=0 must be a multiple"),
        ({"g": GOOD["g"][..., :2]}, ValueError, r"g has shape \(2, 3, 2\).*\(2, 3, 4\)"),
        ({"beta": GOOD["beta"][0]}, ValueError, r"beta has shape \(3, 4\)"),
        ({"beta": GOOD["beta"].astype(int)}, TypeError, "beta has dtype int"),
        ({"state": GOOD["state"][:, :2]}, ValueError, r"state has shape \(2, 2, 8, 16\).*\(2, 4,"),
        (
            {"state": GOOD["state"].astype(jnp.bfloat16)},
            TypeError,
            "state has dtype bfloat16; it must be float32",
        ),
        ({"scale": 0.0}, ValueError, "scale=0.0 must be positive"),
        ({"tiled": 1}, TypeError, "tiled=1 must be True or False"),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        jq.gated_delta_rule(**(GOOD | call))
