"""Attention over a prompt: its definition, with windows, scales, caps, sinks and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq
from jax_q4k.ops.causal_attention import QUERY_BLOCK


def arrays(time, head_dim=32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, time, 4, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, time, 2, head_dim)).astype(np.float32)
    return q, k, v


SINKS = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)


def definition(q, k, v, lengths, scale, window=1 << 30, soft_cap=np.inf, sinks=(-np.inf,) * 4):
    """Computes attention of all tokens in float64, with zeros for padding."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, h in np.ndindex(*q.shape[:3]):
        if t >= lengths[b]:
            continue
        past = slice(max(0, t + 1 - window), t + 1)
        scores = k[b, past, h // 2].astype(np.float64) @ q[b, t, h] * scale
        scores = scores if soft_cap == np.inf else soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        total = weights.sum() + np.exp(sinks[h] - scores.max())
        out[b, t, h] = weights @ v[b, past, h // 2] / total
    return out


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "time, window", [(1, 1), (40, 1), (40, 7), (40, 16), (40, 33), (40, 99), (QUERY_BLOCK + 9, 20)]
)
def test_a_token_sees_the_last_ones_of_its_window(implementation, time, window):
    q, k, v = arrays(time)
    lengths = np.array([time, max(1, time - 3)])
    k[1, lengths[1] :] = v[1, lengths[1] :] = np.nan
    with jq.implementation(implementation, activations="f32"):
        got = jax.jit(lambda *a: jq.causal_attention(*a, window=window, scale=0.3))(
            q, k, v, lengths
        )
    want = definition(q, k, v, lengths, 0.3, window)
    for row, length in enumerate(lengths):
        assert nmse(np.asarray(got)[row, :length], want[row, :length]) <= 1e-12


def test_more_queries_than_plain_jax_scores_at_a_time():
    q, k, v = arrays(QUERY_BLOCK + 9)
    lengths = np.full(2, QUERY_BLOCK + 9)
    with jq.implementation("xla"):
        got = jq.causal_attention(q, k, v, lengths, window=20)[:, -20:]
        want = jq.causal_attention(*(x[:, -40:] for x in (q, k, v)), lengths, window=20)[:, -20:]
    assert nmse(got, want) <= 1e-12


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "time, head_dim, value_dim",
    [(37, 192, 128), (21, 512, 512), (21, 48, 576), (9, 40, 24), (QUERY_BLOCK + 9, 48, 32)],
)
def test_values_of_another_width(implementation, time, head_dim, value_dim):
    q, k, _ = arrays(time, head_dim)
    *_, v = arrays(time, value_dim, seed=1)
    lengths = np.array([time, time - 3])
    k[1, lengths[1] :] = v[1, lengths[1] :] = np.nan
    with jq.implementation(implementation, activations="f32"):
        got = np.asarray(jax.jit(jq.causal_attention)(q, k, v, lengths))
    want = definition(q, k, v, lengths, head_dim**-0.5)
    assert got.shape == want.shape
    for row, length in enumerate(lengths):
        assert nmse(got[row, :length], want[row, :length]) <= 1e-12


@pytest.mark.slow("compiles derivatives")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_derivative_with_values_of_another_width(implementation):
    q, k, _ = arrays(12, 48)
    *_, v = arrays(12, 32, seed=1)

    def plain(q, k, v):
        groups = q.reshape(2, 12, 2, 2, 48)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", groups, k, precision="highest") * 48**-0.5
        seen = jnp.arange(12)[:, None] >= jnp.arange(12)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision="highest")
        return jnp.sum(out**2)

    def ours(q, k, v):
        return jnp.sum(jq.causal_attention(q, k, v, jnp.array([12, 12])) ** 2)

    with jq.implementation(implementation):
        got = jax.grad(ours, argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(got, jax.grad(plain, argnums=(0, 1, 2))(q, k, v), strict=True):
        assert one.shape == other.shape and nmse(one, other) <= 1e-10


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options", [{"soft_cap": 0.7}, {"sinks": SINKS}, {"soft_cap": 2.0, "sinks": SINKS}]
)
def test_scores_are_capped_and_sinks_take_their_part(implementation, options):
    q, k, v = arrays(21)
    with jq.implementation(implementation, activations="f32"):
        got = jq.causal_attention(q, k, v, np.array([21, 21]), window=6, scale=0.3, **options)
    assert nmse(got, definition(q, k, v, [21, 21], 0.3, 6, **options)) <= 1e-12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_sums_of_two_bf16_unless_activations_are_f32(dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in arrays(40))
    lengths, exact = np.array([40, 31]), [np.asarray(x, np.float64) for x in (q, k, v)]
    want = definition(*exact, lengths, 32**-0.5)
    errors = {}
    for activations in (None, "q8_1", "f32"):
        with jq.implementation("sim", activations=activations):
            got = np.asarray(jq.causal_attention(q, k, v, lengths).astype(jnp.float32))
        errors[activations] = max(
            nmse(got[row, :length], want[row, :length]) for row, length in enumerate(lengths)
        )
    if dtype == "float32":
        assert 1e-12 < errors[None] == errors["q8_1"] <= 1e-10 and errors["f32"] <= 1e-12
    else:  # rounding of the result
        assert max(errors.values()) <= {"bfloat16": 1e-5, "float16": 2e-7}[dtype]


def test_heads_too_wide_for_a_kernel_take_plain_jax():
    q, k, v = arrays(9, 256)
    lengths = np.array([9, 9])
    for activations, kernels in ((None, 2), ("f32", 0)):
        with jq.implementation(activations=activations):
            found = jq.explain(jq.causal_attention, q, k, v, lengths, platform="cuda")
        assert sum(len(call.kernels) for call in found.calls) == kernels


def test_vmap_of_prompts_is_a_larger_batch():
    q, k, v = (np.stack([x, x[::-1]]) for x in arrays(9))
    lengths = np.array([[9, 4], [1, 9]])
    with jq.implementation("sim", activations="f32"):
        got = jax.vmap(jq.causal_attention)(q, k, v, lengths)
    for i in range(2):
        want = definition(q[i], k[i], v[i], lengths[i], 32**-0.5)
        for row, length in enumerate(lengths[i]):
            assert nmse(got[i, row, :length], want[row, :length]) <= 1e-12


def test_vmap_of_sinks():
    q, k, v = arrays(9)
    sinks, lengths = np.stack([SINKS, SINKS[::-1]]), np.array([9, 9])
    got = jax.vmap(lambda s: jq.causal_attention(q, k, v, lengths, sinks=s))(sinks)
    want = [jq.causal_attention(q, k, v, lengths, sinks=s) for s in sinks]
    assert nmse(got, want) <= 1e-14


@pytest.mark.slow("compiles derivatives")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_derivative_sees_every_option(implementation):
    q, k, v = arrays(12)
    lengths = jnp.array([12, 9])
    real = (np.arange(12) < np.asarray(lengths)[:, None])[..., None, None]

    def plain(q, k, v, sinks):
        groups = q.reshape(2, 12, 2, 2, 32)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", groups, k, precision="highest") * 0.3
        scores = 2 * jnp.tanh(scores / 2)
        apart = jnp.arange(12)[:, None] - jnp.arange(12)
        scores = jnp.where((apart >= 0) & (apart < 5), scores, -jnp.inf)
        exps = jnp.exp(scores)
        total = exps.sum(axis=-1, keepdims=True) + jnp.exp(sinks).reshape(2, 2, 1, 1)
        weights = exps / total
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision="highest")
        return jnp.sum(jnp.where(real, out.reshape(q.shape), 0.0) ** 2)

    def ours(q, k, v, sinks):
        options = {"window": 5, "scale": 0.3, "soft_cap": 2.0, "sinks": sinks}
        out = jq.causal_attention(q, k, v, lengths, **options)
        return jnp.sum(jnp.where(real, out, 0.0) ** 2)

    with jq.implementation(implementation):
        got = jax.grad(ours, argnums=(0, 1, 2, 3))(q, k, v, SINKS)
    want = jax.grad(plain, argnums=(0, 1, 2, 3))(q, k, v, SINKS)
    for one, other in zip(got, want, strict=True):
        assert nmse(np.asarray(one), np.asarray(other)) <= 1e-10


@pytest.mark.parametrize("shape", [(0, 3, 4, 32), (2, 0, 4, 32), (2, 3, 4, 0)])
def test_nothing_to_attend_to(shape):
    q, kv, lengths = np.ones(shape, "f4"), np.ones((*shape[:2], 2, shape[3]), "f4"), shape[:1]
    assert jq.causal_attention(q, kv, kv, np.ones(lengths, "i4")).shape == shape
    with pytest.raises(ValueError, match="scale=0.0 must be positive"):
        jq.causal_attention(q, kv, kv, np.ones(lengths, "i4"), scale=0.0)


def test_values_without_elements():
    q, k, v = arrays(5)
    assert jq.causal_attention(q, k, v[..., :0], np.array([5, 5])).shape == (2, 5, 4, 0)


@pytest.mark.parametrize("shape", [(2, 5, 2), (2, 5, 1, 32), (2, 4, 2, 32), (1, 5, 2, 32)])
def test_values_that_do_not_fit(shape):
    q, k, _ = arrays(5)
    with pytest.raises(ValueError, match=r"v has shape .* must be \(2, 5, 2, value_dim\), as k"):
        jq.causal_attention(q, k, np.ones(shape, np.float32), np.array([5, 5]))
    with pytest.raises(ValueError, match="head_dim=0 must be positive"):
        jq.causal_attention(q[..., :0], k[..., :0], k, np.array([5, 5]))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"window": 0}, ValueError, "window=0 must be a positive int32"),
        ({"window": 2.5}, TypeError, "window is of type float; it must be a static integer"),
        ({"scale": 0.0}, ValueError, "scale=0.0 must be positive and finite"),
        ({"scale": "1"}, TypeError, "scale is of type str; it must be a static number"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap=-1.0 must be positive and finite"),
        ({"sinks": SINKS[:2]}, ValueError, r"sinks has shape \(2,\).*\(4,\)"),
        ({"sinks": np.zeros(4, np.int32)}, TypeError, "sinks has dtype int32"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        jq.causal_attention(*arrays(3), np.array([3, 3]), **options)
