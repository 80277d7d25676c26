"""Kernels of the gated delta net in the simulator, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import gated_delta_rule as rule_oracle
from support.oracles import gated_delta_step as step_oracle

from ptx_kernels import simulator
from ptx_kernels.devices import target
from ptx_kernels.kernels.gated_delta import (
    GatedDeltaRuleConfig,
    GatedDeltaStepConfig,
    gated_delta_rule,
    gated_delta_rule_rule,
    gated_delta_step,
    gated_delta_step_rule,
)
from ptx_kernels.limits import gated_delta_takes
from ptx_kernels.ptx import KernelError

Arrays = tuple[np.ndarray, ...]


def prompt(sizes: dict[str, int], seed: int = 0) -> Arrays:
    """q, k, v, g, beta and state, with unit keys and decays of all sizes."""
    rng = np.random.default_rng(seed)
    batch, time, k_heads, v_heads, keys, values = sizes.values()
    q, k = (rng.standard_normal((batch, time, k_heads, keys), np.float32) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((batch, time, v_heads, values), np.float32)
    g = -rng.exponential(0.3, (batch, time, v_heads)).astype(np.float32)
    beta = rng.uniform(0, 1, (batch, time, v_heads)).astype(np.float32)
    return q, k, v, g, beta, rng.standard_normal((batch, v_heads, keys, values), np.float32)


def heads(batch: int, time: int, k_heads: int, v_heads: int, keys: int, values: int) -> Any:
    sizes = dict(batch=batch, time=time, num_k_heads=k_heads, num_v_heads=v_heads)
    return sizes | dict(key_dim=keys, value_dim=values)


@pytest.mark.grid
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "sizes, config",
    [
        (heads(1, 1, 1, 1, 16, 16), GatedDeltaRuleConfig(1, 4, 2, tokens=2)),
        (heads(2, 5, 2, 6, 32, 48), GatedDeltaRuleConfig(1, 2, 1, tokens=2)),
        (heads(1, 33, 2, 4, 128, 32), GatedDeltaRuleConfig(8, 16, 2, tokens=16)),
        # runs of two rows and of one
        (heads(1, 9, 1, 2, 80, 32), GatedDeltaRuleConfig(4, 8, 1, tokens=4)),
        (heads(1, 4, 1, 2, 48, 32), GatedDeltaRuleConfig(4, 16, 4, tokens=4)),
        # more lanes than sums, a key in two runs of a lane
        (heads(1, 6, 1, 2, 256, 16), GatedDeltaRuleConfig(8, 32, 2, tokens=8)),
        # values in two runs
        (heads(1, 3, 1, 1, 16, 144), GatedDeltaRuleConfig(9, 8, 4, tokens=9)),
    ],
)
def test_a_prompt_equals_float64(
    sizes: dict[str, int], config: GatedDeltaRuleConfig, tiled: bool
) -> None:
    operands = prompt(sizes)
    kernel = gated_delta_rule(**sizes, scale=0.3, tiled=tiled, config=config)
    want = rule_oracle(*operands, scale=0.3, tiled=tiled)
    for got, expected in zip(simulator.run(kernel, *operands), want, strict=True):
        assert nmse(got, expected) <= 1e-12


@pytest.mark.slow("simulates or assembles large kernels")
def test_long_prompts_do_not_drift() -> None:
    """Errors of a token are forgotten with it or stay, but do not grow."""
    sizes = heads(1, 600, 1, 1, 32, 32)
    q, k, v, g, beta, state = prompt(sizes)
    kernel = gated_delta_rule(**sizes, scale=0.2, config=GatedDeltaRuleConfig(4, 8, 2, tokens=8))
    for decays in (g, g / 1000):
        operands = q, k, v, decays, beta, state
        want = rule_oracle(*operands, scale=0.2)
        for got, expected in zip(simulator.run(kernel, *operands), want, strict=True):
            assert nmse(got, expected) <= 1e-12


def test_padding_leaves_every_bit_of_the_state() -> None:
    """The bits stay whatever the state, keys and values hold; queries still get an output."""
    sizes = heads(1, 5, 2, 2, 16, 16)
    q, k, v, g, beta, state = prompt(sizes)
    state[0, 0, :3, 0] = state[0, 1, 7, 9] = -0.0
    state[0, 0, :4, 1] = [np.inf, -np.inf, np.nan, 1e-42]
    g[...], beta[...] = 0, 0
    k[0, 1], v[0, 2], k[0, 3], v[0, 3] = np.nan, np.inf, np.inf, np.nan
    kernel = gated_delta_rule(**sizes, scale=1.0, config=GatedDeltaRuleConfig(1, 4, 2, tokens=2))
    o, after = simulator.run(kernel, q, k, v, g, beta, state)
    assert after.tobytes() == state.tobytes()
    read = np.einsum("hkv,thk->thv", state[0].astype(np.float64), q[0])
    np.testing.assert_array_equal(np.isfinite(o[0]), np.isfinite(read))
    assert nmse(o[0, :, 1], read[:, 1]) <= 1e-12


def test_a_token_that_forgets_or_writes_nothing_is_no_padding() -> None:
    sizes = heads(1, 3, 1, 1, 16, 16)
    q, k, v, g, beta, state = prompt(sizes)
    g[0, :, 0], beta[0, :, 0] = [0, -1e4, -0.5], [1, 0, 0]
    kernel = gated_delta_rule(**sizes, scale=1.0, config=GatedDeltaRuleConfig(1, 4, 2, tokens=2))
    o, after = simulator.run(kernel, q, k, v, g, beta, state)
    want, _ = rule_oracle(q, k, v, g, beta, state, scale=1.0)
    assert nmse(o[0, 0], want[0, 0]) <= 1e-12
    assert not o[0, 1:].any() and not after.any()


def step_operands(sizes: dict[str, int], positions: list[int], width: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    batch, _, k_heads, v_heads, keys, values = sizes.values()
    channels = 2 * k_heads * keys + v_heads * values

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return (
        *(normal(batch, channels), normal(batch, v_heads * values)),
        *(normal(batch, v_heads) * 4, normal(batch, v_heads), normal(batch, width, channels)),
        *(normal(batch, v_heads, keys, values), np.array(positions, np.int32)),
        *(normal(channels, width), normal(v_heads)),
        *(-rng.uniform(0.1, 3, v_heads).astype(np.float32), normal(values)),
    )


def step_kernel(sizes: dict[str, int], width: int, config: GatedDeltaStepConfig, **options: Any):
    own = {name: size for name, size in sizes.items() if name != "time"}
    return gated_delta_step(**own, width=width, config=config, **options)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "sizes, width, config",
    [
        (heads(3, 1, 1, 1, 16, 16), 1, GatedDeltaStepConfig(1, 4, 2)),
        (heads(3, 1, 2, 6, 32, 48), 2, GatedDeltaStepConfig(3, 8, 4)),
        (heads(3, 1, 1, 2, 128, 128), 4, GatedDeltaStepConfig(8, 8, 4, 2)),
        (heads(3, 1, 1, 3, 80, 32), 5, GatedDeltaStepConfig(2, 8, 2)),
        # several rounds; a key in two runs of a lane
        (heads(3, 1, 1, 2, 160, 64), 3, GatedDeltaStepConfig(1, 16, 4)),
    ],
)
def test_a_step_equals_float64(
    sizes: dict[str, int], width: int, config: GatedDeltaStepConfig, tiled: bool
) -> None:
    operands = step_operands(sizes, [5, 1, 1 << 30], width)
    options = dict(scale=0.2, eps=1e-3, tiled=tiled)
    y, columns, state = simulator.run(step_kernel(sizes, width, config, **options), *operands)
    want_y, want_columns, want_state = step_oracle(*operands, **options)
    assert nmse(y, want_y) <= 1e-12 and nmse(state, want_state) <= 1e-12
    np.testing.assert_array_equal(columns, want_columns)


def test_steps_one_after_the_other_are_the_prompt() -> None:
    """Starts from NaN in state and columns; one sequence runs ahead, and one pauses."""
    sizes, width = heads(3, 1, 2, 4, 32, 32), 3
    options = dict(scale=32**-0.5, eps=1e-6, tiled=True)
    kernel = step_kernel(sizes, width, GatedDeltaStepConfig(2, 8, 4), **options)
    *_, columns, state = step_operands(sizes, [0, 0, 0], width)[:6]
    columns[...] = state[...] = np.nan
    want_columns, want_state = columns, state
    for step in range(5):
        positions = [step, step - 2, [0, 1, -1, 2, 3][step]]
        given = list(step_operands(sizes, positions, width, seed=step))
        weights = step_operands(sizes, positions, width)[7:]
        got = simulator.run(kernel, *given[:4], columns, state, given[6], *weights)
        want = step_oracle(*given[:4], want_columns, want_state, given[6], *weights, **options)
        y, columns, state = got
        want_y, want_columns, want_state = want
        assert nmse(y, want_y) <= 1e-12
        np.testing.assert_array_equal(columns, want_columns)
        known = ~np.isnan(want_state)
        np.testing.assert_array_equal(np.isnan(state), ~known)
        assert nmse(state[known], want_state[known]) <= 1e-12


def test_a_sequence_without_a_token_is_left_alone() -> None:
    sizes, width = heads(2, 1, 1, 2, 16, 32), 4
    operands = step_operands(sizes, [-1, -(2**31)], width)
    operands[0][...] = operands[5][0] = np.nan
    kernel = step_kernel(sizes, width, GatedDeltaStepConfig(1, 4, 4), scale=1.0, eps=0.0)
    y, columns, state = simulator.run(kernel, *operands)
    assert y.tobytes() == bytes(y.nbytes)
    assert columns.tobytes() == operands[4].tobytes() and state.tobytes() == operands[5].tobytes()


def test_large_gates() -> None:
    """softplus of an argument whose exponential overflows is the argument; of its negative, 0."""
    sizes, width = heads(1, 1, 1, 4, 16, 32), 2
    operands = step_operands(sizes, [3], width)
    operands[2][0], operands[8][...] = [100, 1e30, -100, -1e30], 0
    operands[9][...] = [-1e-3, -1, -1, -1]
    operands[3][0] = [-200, 200, -200, 200]
    options = dict(scale=1.0, eps=1e-6)
    kernel = step_kernel(sizes, width, GatedDeltaStepConfig(1, 4, 4), **options)
    y, _, state = simulator.run(kernel, *operands)
    with np.errstate(over="ignore"):
        want_y, _, want_state = step_oracle(*operands, **options)
    for head in range(4):
        assert nmse(state[:, head], want_state[:, head]) <= 1e-12
        assert nmse(y.reshape(4, 32)[head], want_y.reshape(4, 32)[head]) <= 1e-12


RULE = dict(heads(1, 4, 2, 4, 32, 32), scale=1.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_v_heads=3), "num_v_heads=3 must be a multiple of num_k_heads=2"),
        (dict(key_dim=30), "key_dim=30 must be a multiple of 4 and of lanes=16"),
        (dict(key_dim=40), "key_dim=40 must be a multiple of 4 and of lanes=16"),
        (dict(config=GatedDeltaRuleConfig(4, 4, 2)), "columns=64 of a block must divide .*=32"),
        (dict(config=GatedDeltaRuleConfig(1, 32, 2)), "columns=2 of a block .* multiple of 4"),
        (dict(config=GatedDeltaRuleConfig(1, 6, 4)), "lanes=6 must be a power of two from 2 to 32"),
        (dict(config=GatedDeltaRuleConfig(1, 1, 1)), "lanes=1 must be a power of two from 2 to 32"),
        (dict(config=GatedDeltaRuleConfig(1, 16, 3)), "columns=3 1, 2 or 4"),
        (
            dict(config=GatedDeltaRuleConfig(4, 16, 2, tokens=6)),
            "tokens=6 must be a multiple of warps=4",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        gated_delta_rule(**(RULE | dict(config=GatedDeltaRuleConfig(1, 16, 2)) | arguments))


@pytest.mark.slow("makes a kernel of every size")
@pytest.mark.parametrize("batch", [1, 8])
def test_rules_serve_every_size_that_is_taken(batch: int) -> None:
    taken = [s for s in itertools.product(range(8, 273, 8), repeat=2) if gated_delta_takes(*s)]
    assert {k for k, _ in taken} == {*range(8, 129, 8), *range(144, 257, 16)}
    assert {v for _, v in taken} == set(range(16, 257, 16))
    for key_dim, value_dim in taken[batch // 8 :: 3]:
        sizes = heads(batch, 3, 2, 4, key_dim, value_dim)
        config = gated_delta_rule_rule(target(), batch, 4, key_dim, value_dim)
        assert gated_delta_rule(**sizes, scale=1.0, config=config).block[0] <= 256
        chosen = gated_delta_step_rule(target(), key_dim, value_dim)
        kernel = step_kernel(sizes, 4, chosen, scale=1.0, eps=0.0)
        most = 128 if chosen.lanes == 4 else 64  # elements of the state per lane
        assert kernel.block[0] <= 256 and key_dim * chosen.columns // chosen.lanes <= most


def test_tuned_configs() -> None:
    """Fewer lanes share a column if there are more heads."""
    chosen = {n: gated_delta_rule_rule(target(), 1, n, 128, 128) for n in (4, 16, 32, 64, 96)}
    assert [c.lanes for c in chosen.values()] == [32, 32, 16, 8, 4]
    assert [c.block_columns for c in chosen.values()] == [16, 16, 32, 32, 64]
    assert gated_delta_rule_rule(target("A100"), 1, 32, 128, 128).lanes == 16
    assert gated_delta_rule_rule(target(), 64, 32, 256, 128).lanes == 8
    assert gated_delta_step_rule(target(), 128, 128) == GatedDeltaStepConfig(4, 4, 4, 2)
    assert gated_delta_step_rule(target(), 128, 256) == GatedDeltaStepConfig(8, 8, 4)
    assert gated_delta_step_rule(target(), 64, 48) == GatedDeltaStepConfig(3, 8, 4)
