"""A decode step of a gated delta net, against the layer over complete sequences in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import delta_nets
from support.delta_nets import EPS
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS, NATIVE

import jax_q4k as jq

KEY_DIM, VALUE_DIM, WIDTH = 16, 32, 4
HEADS = 2, 4, KEY_DIM, VALUE_DIM


def empty(batch, width=WIDTH, dims=HEADS, value=np.nan):
    """A ring and a state before the first token; their values do not matter."""
    k_heads, v_heads, key_dim, value_dim = dims
    channels = 2 * k_heads * key_dim + v_heads * value_dim
    return (
        jnp.full((batch, width, channels), value, jnp.float32),
        jnp.full((batch, v_heads, key_dim, value_dim), value, jnp.float32),
    )


def ring(qkv, time, width):
    """The columns of a sequence's first `time` tokens in their slots; the other slots are NaN."""
    columns = np.full((qkv.shape[0], width, qkv.shape[2]), np.nan, np.float32)
    for t in range(max(0, time - width), time):
        columns[:, t % width] = qkv[:, t]
    return columns


@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "width, dims",
    [(4, HEADS), (3, (1, 3, 32, 16)), (1, (2, 2, 16, 48)), (4, (2, 4, 8, 24)), (7, HEADS)],
)
def test_token_by_token_is_the_layer(implementation, width, dims, tiled):
    """Runs from the first token until the ring wraps around."""
    tokens, weights = delta_nets.projected(2, 9, *dims, width)
    want, states = delta_nets.layer(tokens, weights, dims[2], tiled=tiled)
    columns, state = empty(2, width, dims)
    with jq.implementation(implementation):
        step = jax.jit(functools.partial(jq.gated_delta_step, **weights, eps=EPS, tiled=tiled))
        for t in range(9):
            given = (x[:, t] for x in tokens)
            y, columns, state = step(*given, columns, state, np.full(2, t))
            assert nmse(y, want[:, t]) <= 1e-11 and nmse(state, states[t + 1]) <= 1e-12
    np.testing.assert_array_equal(columns, ring(tokens[0], 9, width)[:, :width])


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_after_a_prompt_of_any_length(implementation):
    """The ring and the state come from prompts of different lengths."""
    time = 7
    tokens, weights = delta_nets.projected(1, time, *HEADS, WIDTH)
    want, states = delta_nets.layer(tokens, weights, KEY_DIM, tiled=False)
    columns = np.concatenate([ring(tokens[0], t, WIDTH) for t in range(time)])
    states = [np.full_like(states[0], np.nan), *states[1:]]  # zeros before the first token
    given = (x[0] for x in tokens)
    with jq.implementation(implementation):
        y, updated, _ = jq.gated_delta_step(
            *given,
            *(columns, np.concatenate(states[:time]).astype(np.float32), np.arange(time)),
            **weights,
            eps=EPS,
        )
    assert nmse(y, want[0]) <= 1e-11
    for t in range(time):
        np.testing.assert_array_equal(updated[t], ring(tokens[0], t + 1, WIDTH)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_negative_position_is_no_token(implementation):
    tokens, weights = delta_nets.projected(3, 1, *HEADS, WIDTH)
    columns, state = empty(3)
    columns = columns.at[1].set(3.0).at[1, 0, :4].set(jnp.array([-0.0, jnp.inf, 1e-42, 2.0]))
    state = state.at[1, 0, 0, :3].set(jnp.array([-0.0, 1e-42, -jnp.inf]))
    given = [x[:, 0].copy() for x in tokens]
    for x in given:
        x[1] = np.nan
    with jq.implementation(implementation):
        y, *after = jax.jit(functools.partial(jq.gated_delta_step, **weights, eps=EPS))(
            *given, columns, state, np.array([0, -1, -(2**31)])
        )
    assert not np.asarray(y)[1:].any()
    for x, before in zip(after, (columns, state), strict=True):
        for row in (1, 2):
            np.testing.assert_array_equal(*(np.asarray(a[row]).view("u4") for a in (x, before)))
    want, states = delta_nets.layer([x[:1] for x in tokens], weights, KEY_DIM, tiled=False)
    assert nmse(y[0], want[0, 0]) <= 1e-11 and nmse(after[1][0], states[1][0]) <= 1e-12


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_only_the_current_slot_is_written(implementation):
    tokens, weights = delta_nets.projected(1, 1, *HEADS, WIDTH)
    columns, state = empty(1, value=0.5)
    with jq.implementation(implementation):
        _, updated, _ = jq.gated_delta_step(
            *(x[:, 0] for x in tokens), columns, state, np.array([6]), **weights, eps=EPS
        )
    np.testing.assert_array_equal(updated, columns.at[:, 2].set(tokens[0][:, 0]))


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_extreme_gates(implementation):
    """Decays of 0 and 1, corrections of 0 and 1."""
    tokens, weights = delta_nets.projected(1, 3, *HEADS, WIDTH)
    tokens[2][0] = [[-200, 200, 80, -80]] * 3  # alpha
    tokens[3][0] = [[-200, 200, -60, 60]] * 3  # beta
    want, states = delta_nets.layer(tokens, weights, KEY_DIM, tiled=False)
    columns, state = empty(1)
    with jq.implementation(implementation):
        for t in range(3):
            y, columns, state = jq.gated_delta_step(
                *(x[:, t] for x in tokens), columns, state, np.array([t]), **weights, eps=EPS
            )
            assert nmse(y, want[:, t]) <= 1e-11
    assert nmse(state, states[3]) <= 1e-12


@pytest.mark.slow("compiles four programs", quick=["*native*"])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_vmap_of_sequences_is_one_call_and_of_weights_one_each(implementation):
    tokens, weights = delta_nets.projected(6, 1, *HEADS, WIDTH)
    given = [x.reshape(3, 2, -1) for x in tokens]
    cache = [x.reshape(3, 2, *x.shape[1:]) for x in empty(6, value=0.25)]
    at = np.array([[5, 0], [2, -1], [3, 9]])

    def function(weights, *operands):
        return jq.gated_delta_step(*operands, **weights, eps=EPS)

    together = jax.vmap(functools.partial(function, weights))
    stacked = {name: np.stack([w, w / 2, w * 2]) for name, w in weights.items()}
    with jq.implementation(implementation):
        got = together(*given, *cache, at)
        each = jax.vmap(function)(stacked, *given, *cache, at)
        for i in range(3):
            one = [x[i] for x in (*given, *cache, at)]
            halved = {name: w[i] for name, w in stacked.items()}
            for found, want in ((got, function(weights, *one)), (each, function(halved, *one))):
                assert all(nmse(a[i], b) <= 1e-13 for a, b in zip(found, want, strict=True))
    assert "scan" not in str(jax.make_jaxpr(together)(*given, *cache, at))


@NATIVE.marks[0]
def test_in_a_loop_in_place():
    tokens, weights = delta_nets.projected(1, 1, *HEADS, WIDTH)
    given = [x[:, 0] for x in tokens]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(columns, state):
        def step(t, cache):
            at = jnp.full(1, t, jnp.int32)
            return jq.gated_delta_step(*given, *cache, at, **weights, eps=EPS)[1:]

        return jax.lax.fori_loop(0, 9, step, (columns, state))

    cache = empty(1)
    shapes = [f"f32[{','.join(map(str, x.shape))}]" for x in cache]
    lines = program.lower(*cache).compile().as_text().splitlines()
    assert not [line for line in lines if " copy(" in line and any(s in line for s in shapes)]
    pointers = [x.unsafe_buffer_pointer() for x in cache]
    after = program(*cache)
    assert [x.unsafe_buffer_pointer() for x in after] == pointers and cache[1].is_deleted()
    many = [np.repeat(x, 9, axis=1) for x in tokens]
    assert nmse(after[1], delta_nets.layer(many, weights, KEY_DIM, tiled=False)[1][-1]) <= 1e-12


def arguments():
    (qkv, z, alpha, beta), weights = delta_nets.projected(2, 1, *HEADS, WIDTH)
    columns, state = empty(2, value=0.0)
    named = dict(qkv=qkv[:, 0], z=z[:, 0], alpha=alpha[:, 0], beta=beta[:, 0])
    cache = dict(columns=columns, state=state, positions=np.array([3, 4]))
    return named | cache | weights | {"eps": EPS}


GOOD = arguments()


def test_no_sequences():
    given = {k: v[:0] if k in tuple(GOOD)[:7] else v for k, v in GOOD.items()}
    y, columns, state = jq.gated_delta_step(**given)
    assert y.shape == (0, 4 * VALUE_DIM)
    assert (columns.shape, state.shape) == (given["columns"].shape, given["state"].shape)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"qkv": GOOD["qkv"][0]}, ValueError, r"qkv has shape \(192,\); it must be \(batch, ch"),
        ({"qkv": GOOD["qkv"][:, :-1]}, ValueError, "qkv has 191 channels.*key_dim=16 and.*= 128"),
        ({"qkv": GOOD["qkv"][:, :128]}, ValueError, "qkv has 128 channels"),
        (
            {"qkv": np.zeros((2, 128 + 3 * 32), "f4")},
            ValueError,
            "num_v_heads=4 must be a multiple of num_k_heads=3",
        ),
        ({"qkv": GOOD["qkv"].astype(int)}, TypeError, "qkv has dtype int"),
        ({"z": GOOD["z"][:, 1:]}, ValueError, r"z has shape \(2, 127\).*\(2, 128\)"),
        ({"alpha": GOOD["alpha"][:1]}, ValueError, r"alpha has shape \(1, 4\).*\(2, 4\)"),
        ({"beta": GOOD["beta"][:, :2]}, ValueError, r"beta has shape \(2, 2\)"),
        ({"columns": GOOD["columns"][0]}, ValueError, r"columns has shape.*\(2, width, 192\)"),
        ({"columns": GOOD["columns"][:, :0]}, ValueError, "width=0 must be positive"),
        (
            {"columns": GOOD["columns"].astype("f2")},
            TypeError,
            "columns has dtype float16.*float32",
        ),
        ({"state": GOOD["state"][:1]}, ValueError, r"state has shape.*\(2, num_v_heads, key_dim"),
        ({"state": GOOD["state"][:, :, :0]}, ValueError, r"state has shape \(2, 4, 0, 32\)"),
        ({"state": GOOD["state"].astype("f2")}, TypeError, "state has dtype float16.*float32"),
        ({"positions": np.zeros(2)}, TypeError, "positions has dtype float64"),
        ({"positions": np.zeros(3, int)}, ValueError, r"positions has shape \(3,\)"),
        ({"conv_weight": GOOD["conv_weight"][:, 1:]}, ValueError, r"conv_weight.*\(192, 4\)"),
        ({"dt_bias": np.zeros(3, "f4")}, ValueError, r"dt_bias has shape \(3,\).*\(4,\)"),
        ({"decay": np.zeros((), "f4")}, ValueError, r"decay has shape \(\)"),
        ({"norm_weight": np.zeros(4, "f4")}, ValueError, r"norm_weight has shape \(4,\).*\(32,\)"),
        ({"eps": -1.0}, ValueError, "eps=-1.0 must be finite in float32 and at least 0"),
        ({"tiled": None}, TypeError, "tiled=None must be True or False"),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        jq.gated_delta_step(**(GOOD | call))
