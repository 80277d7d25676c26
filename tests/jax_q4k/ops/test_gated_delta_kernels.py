"""Operations of the gated delta net with PTX kernels in the simulator, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import gated_delta_rule as rule_oracle
from support.oracles import gated_delta_step as step_oracle

import jax_q4k as jq

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def prompt(time: int, key_dim: int, value_dim: int) -> tuple[np.ndarray, ...]:
    """Operands for two sequences, two k heads and six v heads."""
    q, k = normal(2, time, 2, key_dim), normal(2, time, 2, key_dim)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = -rng.exponential(0.3, (2, time, 6)), rng.uniform(0, 1, (2, time, 6))
    v, state = normal(2, time, 6, value_dim), normal(2, 6, key_dim, value_dim)
    return q, k, v, *(gate.astype(np.float32) for gate in gates), state


@pytest.mark.grid
# XLA computes the last two, as no kernel takes these heads
@pytest.mark.parametrize(
    "sizes", [(1, 64, 32), (21, 48, 80), (70, 128, 16), (5, 12, 16), (3, 8, 8)]
)
@pytest.mark.parametrize("tiled", [False, True])
def test_the_rule(sizes: tuple[int, int, int], tiled: bool) -> None:
    operands = prompt(*sizes)
    with jq.implementation("sim"):
        got = jq.gated_delta_rule(*operands, scale=0.4, tiled=tiled)
    want = rule_oracle(*operands, scale=0.4, tiled=tiled)
    assert [nmse(a, b) <= 1e-11 for a, b in zip(got, want, strict=True)] == [True, True]


def test_padding_in_front_and_behind() -> None:
    q, k, v, g, beta, state = prompt(12, 32, 32)
    real = (np.arange(12) >= 2) & (np.arange(12) < 9)
    g[:, ~real], beta[:, ~real] = 0, 0
    k[:, ~real], v[:, ~real] = np.nan, np.inf
    with jq.implementation("sim"):
        o, after = jq.gated_delta_rule(q, k, v, g, beta, state)
    want_o, want = rule_oracle(*(x[:, real] for x in (q, k, v, g, beta)), state, scale=32**-0.5)
    assert nmse(o[:, real], want_o) <= 1e-11 and nmse(after, want) <= 1e-11


def step_operands(key_dim: int, value_dim: int, width: int) -> tuple[np.ndarray, ...]:
    """Operands for four sequences, two k heads and six v heads."""
    channels, values = 4 * key_dim + 6 * value_dim, 6 * value_dim
    return (
        *(normal(4, channels), normal(4, values), normal(4, 6), normal(4, 6)),
        *(normal(4, width, channels), normal(4, 6, key_dim, value_dim)),
        np.array([0, -1, 2, 100], np.int32),
        *(normal(channels, width), normal(6), -abs(normal(6)), normal(value_dim)),
    )


WEIGHTS = "conv_weight", "dt_bias", "decay", "norm_weight"


@pytest.mark.grid
# XLA computes the last one
@pytest.mark.parametrize("sizes", [(64, 32, 4), (128, 128, 4), (24, 48, 1), (12, 16, 2)])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_step(sizes: tuple[int, int, int], tiled: bool) -> None:
    operands = step_operands(*sizes)
    weights = dict(zip(WEIGHTS, operands[7:], strict=True))
    options = dict(eps=1e-5, tiled=tiled)
    with jq.implementation("sim"):
        y, columns, state = jq.gated_delta_step(*operands[:7], **weights, **options)
    want = step_oracle(*operands, scale=sizes[0] ** -0.5, **options)
    assert nmse(y, want[0]) <= 1e-11 and nmse(state, want[2]) <= 1e-11
    np.testing.assert_array_equal(columns, want[1])


def test_a_step_is_one_launch_and_a_prompt_too() -> None:
    operands = step_operands(32, 32, 4)
    weights = dict(zip(WEIGHTS, operands[7:], strict=True))

    def step(*given: jax.Array) -> tuple[jax.Array, ...]:
        return jq.gated_delta_step(*given, **weights, eps=1e-6)

    for function, given, name in (
        (step, operands[:7], "gated_delta_step"),
        (jq.gated_delta_rule, prompt(9, 32, 32), "gated_delta_rule"),
    ):
        calls = jq.explain(function, *given, platform="cuda").calls
        assert [kernel.name for call in calls for kernel in call.kernels] == [name]


def test_vmap_is_a_larger_batch() -> None:
    operands = [jnp.stack([x, x[::-1]]) for x in prompt(5, 16, 16)]
    with jq.implementation("sim"):
        got = jax.vmap(jq.gated_delta_rule)(*operands)
    for i in range(2):
        want = rule_oracle(*(np.asarray(x[i]) for x in operands), scale=0.25)
        assert [nmse(a[i], b) <= 1e-11 for a, b in zip(got, want, strict=True)] == [True, True]
