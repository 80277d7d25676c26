"""Float64 reference of gated delta nets, token by token, and operands for them."""

from __future__ import annotations

from typing import Any

import numpy as np

EPS = 1e-6


def sequences(
    batch: int, time: int, k_heads: int, v_heads: int, key_dim: int, value_dim: int, *, seed=0
) -> list[np.ndarray]:
    """Random q, k, v, g, beta and state, float32.

    Keys have norm 1. Decays range from almost none to strong: heads remember for 1 to 1000 tokens.
    """
    rng = np.random.default_rng([seed, batch, time, k_heads, v_heads, key_dim, value_dim])
    q, k = rng.standard_normal((2, batch, time, k_heads, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, time, v_heads, value_dim))
    g = -rng.exponential(size=(batch, time, v_heads)) * np.geomspace(1e-3, 1, v_heads)
    beta = rng.uniform(0.05, 1, (batch, time, v_heads))
    state = rng.standard_normal((batch, v_heads, key_dim, value_dim))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


def rule(*operands: Any, scale: float | None = None, tiled: bool = False) -> list[np.ndarray]:
    """Returns o and the state after the last token, float64."""
    q, k, v, g, beta, state = (np.asarray(x).astype(np.float64) for x in operands)
    k_heads, v_heads = q.shape[2], v.shape[2]
    heads = [h % k_heads if tiled else h // (v_heads // k_heads) for h in range(v_heads)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, o = q[:, :, heads], k[:, :, heads], np.zeros(v.shape)
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        found = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        d = beta[:, t][..., None] * (v[:, t] - found)
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], d)
        o[:, t] = scale * np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return [o, state]


def projected(
    batch: int, time: int, k_heads: int, v_heads: int, key_dim: int, value_dim: int, width: int
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Returns qkv, z, alpha and beta of all tokens, and the weights of a layer, float32."""
    rng = np.random.default_rng([batch, time, k_heads, v_heads, key_dim, value_dim, width])
    channels = 2 * k_heads * key_dim + v_heads * value_dim
    sizes = channels, v_heads * value_dim, v_heads, v_heads
    tokens = [rng.standard_normal((batch, time, size)).astype(np.float32) for size in sizes]
    weights = {
        "conv_weight": rng.standard_normal((channels, width)) / np.sqrt(width),
        "dt_bias": rng.standard_normal(v_heads),
        "decay": -np.exp(rng.standard_normal(v_heads) / 2),
        "norm_weight": 1 + 0.2 * rng.standard_normal(value_dim),
    }
    return tokens, {name: w.astype(np.float32) for name, w in weights.items()}


def layer(
    tokens: list[np.ndarray], weights: dict[str, np.ndarray], key_dim: int, *, tiled: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns y of all tokens, and the states before each token and after the last, float64."""
    qkv, z, alpha, beta = (x.astype(np.float64) for x in tokens)
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    (batch, time, channels), (_, width) = qkv.shape, w["conv_weight"].shape
    v_heads, value_dim = alpha.shape[2], len(w["norm_weight"])
    padded = np.concatenate([np.zeros((batch, width - 1, channels)), qkv], axis=1)
    u = sum(padded[:, i : i + time] * w["conv_weight"][:, i] for i in range(width))
    u = _silu(u)
    keys = (channels - v_heads * value_dim) // 2
    q, k = u[..., :keys], u[..., keys : 2 * keys]
    q, k = (x.reshape(batch, time, -1, key_dim) for x in (q, k))
    q, k = (x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + EPS) for x in (q, k))
    v = u[..., 2 * keys :].reshape(batch, time, v_heads, value_dim)
    g = np.logaddexp(alpha + w["dt_bias"], 0) * w["decay"]
    given = q, k, v, g, 1 / (1 + np.exp(-beta))
    states, out = [np.zeros((batch, v_heads, key_dim, value_dim))], []
    for t in range(time):
        o, state = rule(*(x[:, t : t + 1] for x in given), states[-1], tiled=tiled)
        states.append(state)
        out.append(o)
    o = np.concatenate(out, axis=1)
    o = o / np.sqrt(np.mean(o**2, axis=-1, keepdims=True) + EPS) * w["norm_weight"]
    return (o * _silu(z).reshape(o.shape)).reshape(z.shape), states


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
