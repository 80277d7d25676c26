"""Subjects for a gated delta net."""

from __future__ import annotations

import numpy as np

from ptx_kernels.kernels.gated_delta import (
    GatedDeltaRuleConfig,
    GatedDeltaStepConfig,
    gated_delta_rule,
    gated_delta_step,
)
from support.oracles import gated_delta_rule as rule_oracle
from support.oracles import gated_delta_step as step_oracle

from .base import Subject, rng_of


def delta_rule_subject(config: GatedDeltaRuleConfig, tiled: bool, time: int = 11) -> Subject:
    """Two sequences, two k heads of 80, four v heads of 32; two tokens of a head are padding.

    In the other sequence a token is padding for all heads. Padding holds NaN.
    """
    rng = rng_of(21)
    q, k = (rng.standard_normal((2, time, 2, 80), np.float32) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((2, time, 4, 32), np.float32)
    g = -rng.exponential(1, (2, time, 4)).astype(np.float32)
    beta = rng.uniform(0, 1, (2, time, 4)).astype(np.float32)
    state = rng.standard_normal((2, 4, 80, 32), np.float32)
    g[1, 3:5, 2] = beta[1, 3:5, 2] = g[0, 7] = beta[0, 7] = 0
    beta[0, 2, 0] = g[1, 6, 3] = 0  # neither alone makes a token padding
    sizes = dict(batch=2, time=time, num_k_heads=2, num_v_heads=4, key_dim=80, value_dim=32)
    kernel = gated_delta_rule(**sizes, scale=0.3, tiled=tiled, config=config)
    want = rule_oracle(q, k, v, g, beta, state, scale=0.3, tiled=tiled)
    keys, values = k.copy(), v.copy()
    keys[0, 7] = values[0, 7] = values[1, 3:5, 2] = np.nan
    return Subject(kernel, (q, keys, values, g, beta, state), want, 1e-12)


def delta_step_subject(
    config: GatedDeltaStepConfig, tiled: bool, *, width: int = 4, num_v_heads: int = 6
) -> Subject:
    """Seven sequences: one starts with NaN as its state, one has no token, one is long."""
    rng = rng_of(22)
    positions = np.array([0, 1, -1, 2, 3, 4, 1001], np.int32)
    values, channels = num_v_heads * 32, 2 * 2 * 80 + num_v_heads * 32

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    qkv, z, columns = normal(7, channels), normal(7, values), normal(7, width, channels)
    alpha, beta, bias = normal(7, num_v_heads) * 3, normal(7, num_v_heads), normal(num_v_heads)
    state, convolution = normal(7, num_v_heads, 80, 32), normal(channels, width)
    decay, norm = -rng.uniform(0.1, 2, num_v_heads).astype(np.float32), normal(32)
    state[0] = columns[0] = np.nan
    operands = qkv, z, alpha, beta, columns, state, positions, convolution, bias, decay, norm
    options = dict(scale=0.3, eps=1e-2, tiled=tiled)
    wants = step_oracle(*operands, **options)
    kernel = gated_delta_step(
        batch=7,
        num_k_heads=2,
        num_v_heads=num_v_heads,
        key_dim=80,
        value_dim=32,
        width=width,
        config=config,
        **options,
    )

    return Subject(kernel, operands, _with_zeros(*wants), 1e-12, _with_zeros)


def _with_zeros(*results: np.ndarray) -> tuple[np.ndarray, ...]:
    """Replaces NaN with zeros, in columns that nobody writes."""
    return tuple(map(np.nan_to_num, results))
