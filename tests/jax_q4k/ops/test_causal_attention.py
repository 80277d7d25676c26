"""Attention of a prompt: against its definition, with windows, scales and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import nmse
from implementations import IMPLEMENTATIONS

import jax_q4k as jq
from jax_q4k.ops.causal_attention import QUERY_BLOCK


def arrays(time, head_dim=32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, time, 4, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, time, 2, head_dim)).astype(np.float32)
    return q, k, v


def definition(q, k, v, lengths, scale, window):
    """The attention of every token that is no padding, in float64, and zeros for the others."""
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        if t >= lengths[b]:
            continue
        past = slice(max(0, t + 1 - window), t + 1)
        scores = k[b, past, h // 2].astype(np.float64) @ q[b, t, h] * scale
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, past, h // 2] / weights.sum()
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "time, window", [(1, 1), (40, 1), (40, 7), (40, 16), (40, 33), (40, 99), (QUERY_BLOCK + 9, 20)]
)
def test_a_token_sees_the_last_ones_of_its_window(implementation, time, window):
    q, k, v = arrays(time)
    lengths = np.array([time, max(1, time - 3)])
    k[1, lengths[1] :] = v[1, lengths[1] :] = np.nan
    with jq.implementation(implementation):
        got = jax.jit(lambda *a: jq.causal_attention(*a, window=window, scale=0.3))(
            q, k, v, lengths
        )
    want = definition(q, k, v, lengths, 0.3, window)
    for row, length in enumerate(lengths):
        assert nmse(np.asarray(got)[row, :length], want[row, :length]) <= 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_derivative_sees_window_and_scale(implementation):
    q, k, v = arrays(12)
    lengths = jnp.array([12, 9])
    real = (np.arange(12) < np.asarray(lengths)[:, None])[..., None, None]

    def plain(q, k, v):
        groups = q.reshape(2, 12, 2, 2, 32)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", groups, k, precision="highest") * 0.3
        apart = jnp.arange(12)[:, None] - jnp.arange(12)
        scores = jnp.where((apart >= 0) & (apart < 5), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision="highest")
        return jnp.sum(jnp.where(real, out.reshape(q.shape), 0.0) ** 2)

    def ours(q, k, v):
        out = jq.causal_attention(q, k, v, lengths, window=5, scale=0.3)
        return jnp.sum(jnp.where(real, out, 0.0) ** 2)

    with jq.implementation(implementation):
        got = jax.grad(ours, argnums=(0, 1, 2))(q, k, v)
    want = jax.grad(plain, argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(got, want, strict=True):
        assert nmse(np.asarray(one), np.asarray(other)) <= 1e-10


@pytest.mark.parametrize("shape", [(0, 3, 4, 32), (2, 0, 4, 32), (2, 3, 4, 0)])
def test_nothing_to_attend_to(shape):
    q, kv, lengths = np.ones(shape, "f4"), np.ones((*shape[:2], 2, shape[3]), "f4"), shape[:1]
    assert jq.causal_attention(q, kv, kv, np.ones(lengths, "i4")).shape == shape
    with pytest.raises(ValueError, match="scale=0.0 must be positive"):
        jq.causal_attention(q, kv, kv, np.ones(lengths, "i4"), scale=0.0)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"window": 0}, ValueError, "window=0 must be a positive int32"),
        ({"window": 2.5}, TypeError, "window is of type float; it must be an integer"),
        ({"scale": 0.0}, ValueError, "scale=0.0 must be positive and finite"),
        ({"scale": "1"}, TypeError, "scale is of type str; it must be a number"),
    ],
)
def test_bad_windows_and_scales(options, error, message):
    with pytest.raises(error, match=message):
        jq.causal_attention(*arrays(3), np.array([3, 3]), **options)
