import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config import Config, rope
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.network.layers import MLP, Linear
from jax_q4k.ops.causal_attention import QUERY_BLOCK, causal_attention
from tools.random_model import GEMMA_4_31B, QWEN_3_6_35B_A3B

from ..golden_files import NAMES, model, path, reference

pytestmark = pytest.mark.cpu_kernels

rng = np.random.default_rng(5)


@functools.cache
def programs(name):
    """Jitted prefill and decode of a golden model, with its weights bound."""
    loaded = model(name)

    @jax.jit
    def prefill(weights, *args):
        return loaded.decoder(weights).prefill(*args)

    @jax.jit
    def decode(weights, *args):
        return loaded.decoder(weights).decode(*args)

    return (
        lambda *args: prefill(loaded.weights, *args),
        lambda *args: decode(loaded.weights, *args),
    )


@pytest.mark.slow("compiles two programs a model", quick=["qwen3-qknorm"])
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_paged_decode(name):
    """The second row is padded, and the pages are shuffled."""
    (prefill, decode), loaded, want = programs(name), model(name), reference(name)
    cache = PagedCache.create(loaded.config, 2, 72)
    cache = dataclasses.replace(
        cache, block_tables=jnp.array(rng.permutation(10).reshape(2, 5), jnp.int32)
    )
    prompts = np.zeros((2, 64), np.int32)
    prompts[0, :48], prompts[1, :20] = want.prompt, want.prompt[:20]

    lengths = np.array([48, 20], np.int32)
    logits, cache = prefill(prompts, lengths, cache)
    everywhere = loaded._full_pass()(loaded.weights, prompts, lengths)
    rows, other = [everywhere[0, :47], logits[:1]], [everywhere[1, :19], logits[1:]]
    for step in range(24):
        token = np.array([want.greedy[step], want.tokens[20 + step]], np.int32)
        logits, cache = decode(token, cache)
        rows.append(logits[:1])
        other.append(logits[1:])
    assert nmse(np.concatenate(rows), want.logits) <= 1e-8
    assert nmse(np.concatenate(other), want.logits[:44]) <= 1e-8
    assert cache.context_lens.tolist() == [72, 44]


@pytest.mark.usefixtures("exact")
def test_last_position_and_inactive_rows():
    loaded, want = model("llama-gqa"), reference("llama-gqa")
    prefill, decode = programs("llama-gqa")
    prompts = jnp.array([want.prompt[:16], want.prompt[:16]])
    logits, cache = prefill(prompts, jnp.array([16, 7]), PagedCache.create(loaded.config, 2, 32))
    assert nmse(logits, want.logits[[15, 6]]) <= 1e-8
    before = jax.tree.map(np.asarray, cache)
    # padding is not stored
    assert np.any(before.pages[0][0][2, :, :7]) and not np.any(before.pages[0][0][2, :, 7:])
    token = jnp.array([want.prompt[16], 3])
    logits, cache = decode(token, cache, jnp.array([True, False]))
    assert nmse(logits[:1], want.logits[16:17]) <= 1e-8
    assert cache.context_lens.tolist() == [17, 7]
    for got, old in zip(jax.tree.leaves(cache.pages), jax.tree.leaves(before.pages), strict=True):
        np.testing.assert_array_equal(got[2:], old[2:])  # the second row's pages
        assert np.any(np.asarray(got[:2]) != old[:2])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(jnp.float16, 1e-5), (jnp.bfloat16, 1e-3), (jnp.int8, 2e-3), (jnp.float8_e4m3fn, 2e-2)],
)
def test_narrow_caches_are_close(dtype, tolerance):
    loaded, want = model("llama-gqa"), reference("llama-gqa")
    prefill, decode = programs("llama-gqa")
    cache = PagedCache.create(loaded.config, 1, 48, dtype=dtype)
    _, cache = prefill(jnp.asarray(want.prompt[None, :40]), jnp.array([40]), cache)
    logits, cache = decode(jnp.asarray(want.prompt[40:41]), cache)
    assert cache.pages[0][0].dtype == dtype
    error = nmse(logits, want.logits[40:41])
    assert 1e-10 <= error <= tolerance


@pytest.mark.usefixtures("exact")
def test_poison_in_the_cache_and_in_padding_does_not_matter():
    loaded, want = model("llama-gqa"), reference("llama-gqa")
    prefill, decode = programs("llama-gqa")
    cache = PagedCache.create(loaded.config, 1, 32)
    poisoned = dataclasses.replace(
        cache, pages=jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), cache.pages)
    )
    tokens = want.prompt[None, :16].copy()
    tokens[0, 10:] = -1  # embedded as NaN
    _, cache = prefill(jnp.asarray(tokens), jnp.array([10]), poisoned)
    logits, _ = decode(jnp.asarray(want.prompt[10:11]), cache)
    assert nmse(logits, want.logits[10:11]) <= 1e-8


def test_one_program_serves_all_lengths_of_a_bucket():
    loaded, want = models.from_gguf(path("llama-gqa")), reference("llama-gqa")
    full = loaded.logits(want.tokens[None, :32])
    (program,) = (p for key, p in loaded.ready._values.items() if key[0] == "logits")
    for time in (17, 20, 31):
        np.testing.assert_array_equal(loaded.logits(want.tokens[None, :time]), full[:, :time])
    programs = [p for key, p in loaded.ready._values.items() if key[0] == "logits"]
    assert programs == [program] and program._cache_size() == 1


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2], ValueError, r"tokens has shape \(2,\)"),
        ([[1.0]], TypeError, "tokens has dtype float64"),
        ([[0, 512]], ValueError, "tokens holds token id 512; ids must be 0 to 511"),
        ([[-1]], ValueError, "tokens holds token id -1"),
        (np.zeros((1, 2049), np.int32), ValueError, "time=2049; the context length is 2048"),
    ],
)
def test_tokens_that_do_not_fit(tokens, error, message):
    with pytest.raises(error, match=message):
        model("llama-gqa").logits(tokens)


def test_logits_inside_a_program():
    with pytest.raises(
        TypeError, match=r"tokens is traced; .* model\.decoder\(weights\)\(tokens\)"
    ):
        jax.jit(model("llama-gqa").logits)(np.zeros((1, 3), np.int32))


@pytest.mark.parametrize("time", [3, 2048])  # the full context
def test_no_tokens(time):
    assert model("llama-gqa").logits(np.zeros((0, time), np.int32)).shape == (0, time, 512)


@pytest.mark.parametrize("time", [7, QUERY_BLOCK + 44])
def test_causal_attention_equals_the_definition(time):
    q = rng.standard_normal((2, time, 4, 32)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, time, 2, 32)).astype(np.float32)
    lengths = np.array([time, time - 3])
    k[1, time - 3 :], v[1, time - 3 :] = np.nan, np.nan
    got = np.asarray(jax.jit(causal_attention)(q, k, v, lengths))
    want = np.zeros_like(got, np.float64)
    for b, t, h in np.ndindex(2, time, 4):
        past = slice(0, min(t + 1, lengths[b]))
        scores = k[b, past, h // 2].astype(np.float64) @ q[b, t, h] / np.sqrt(32)
        weights = np.exp(scores - scores.max())
        want[b, t, h] = weights @ v[b, past, h // 2] / weights.sum()
    assert nmse(got[0], want[0]) <= 1e-12
    assert nmse(got[1, : time - 3], want[1, : time - 3]) <= 1e-12
    assert np.isfinite(got).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_rotates_pairs_by_position_times_frequency(interleaved):
    config = Config(
        "llama", 8, 64, 128, 128, 1, 2, 2, 64, 1e-5, rope_theta=100.0, rope_dim=32, rope_factor=2.0
    )
    divisors = np.linspace(1, 4, 16).astype(np.float32)
    frequencies = rope.frequencies(config.ropes[0], divisors)
    x = rng.standard_normal((1, 3, 2, 64)).astype(np.float32)
    positions = jnp.array([[0, 1, 40]])
    got = jq.rotate(x, *rope.angles(positions, jnp.asarray(frequencies)), interleaved=interleaved)
    np.testing.assert_array_equal(got[0, 0], x[0, 0])
    np.testing.assert_array_equal(got[..., 32:], x[..., 32:])
    for i in range(16):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 16)
        turn = np.exp(1j * np.array([0, 1, 40]) * 100.0 ** (-2 * i / 32) / 2 / divisors[i])
        want = (x[0, ..., a] + 1j * x[0, ..., b]) * turn[:, None]
        np.testing.assert_allclose(got[0, ..., a], want.real, atol=1e-5)
        np.testing.assert_allclose(got[0, ..., b], want.imag, atol=1e-5)


def test_cache_capacity_and_slots():
    config = model("llama-gqa").config
    cache = PagedCache.create(config, 2, 20, page_size=16, dtype=jnp.bfloat16)
    assert cache.capacity == 32 and cache.page_size == 16 and len(cache.pages) == config.num_layers
    assert cache.pages[0][0].shape == (4, 2, 16, 64)
    positions = jnp.array([[0, 17, 31, 32], [15, 16, 3, 0]])
    valid = jnp.array([[True] * 4, [True, True, False, True]])
    assert cache.slots(positions, valid).tolist() == [0, 17, 31, -1, 47, 48, -1, 32]
    with pytest.raises(ValueError, match="batch=0"):
        PagedCache.create(config, 0, 20)
    with pytest.raises(ValueError, match="capacity=0"):
        PagedCache.create(config, 1, 0)
    quantized = PagedCache.create(config, 1, 20, dtype=jnp.int8)
    assert [(a.dtype, a.shape) for a in quantized.pages[0][::2]] == [
        ("int8", (2, 2, 16, 64)),
        ("float32", (2, 2, 16)),
    ]
    with pytest.raises(TypeError, match="dtype=int16"):
        PagedCache.create(config, 1, 20, dtype=jnp.int16)
    with pytest.raises(ValueError, match="2\\^31"):
        PagedCache.create(config, 2, 1 << 30)


def test_an_mlp_knows_the_fused_operations_activations_only():
    """jax.nn has others, which would run with an adapter, where nothing is fused."""
    layer = model("llama-gqa").decoder().layers[0]
    with pytest.raises(ValueError, match="activation='relu' must be one of silu, gelu"):
        MLP(layer.mlp.gate, layer.mlp.up, layer.mlp.down, activation="relu")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("activation", jq.ACTIVATION_FUNCTIONS)
def test_an_mlp_beside_an_adapter_is_the_fused_one(activation):
    class Adapter(Linear):
        pass

    mlp = model("llama-gqa").decoder().layers[0].mlp
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.float32)
    adapter = Adapter(mlp.gate.weight.get_value())
    fused, stepwise = (
        MLP(gate, mlp.up, mlp.down, norm=mlp.norm, activation=activation)(x)
        for gate in (mlp.gate, adapter)
    )
    np.testing.assert_allclose(stepwise, fused, rtol=1e-5, atol=1e-5)


def test_windowed_layers_keep_what_their_window_sees(record_property):
    """Gemma 3 4B with a context of 32768 tokens: 29 of 34 layers see 1024 tokens."""
    config = Config(
        "gemma3", 8, 131072, 2560, 10240, 34, 8, 4, 256, 1e-6, window=1024, local_rope_theta=1e4
    )
    cache = jax.eval_shape(lambda: PagedCache.create(config, 2, 32768, dtype=jnp.bfloat16))
    held = sum(page.size * page.dtype.itemsize for pages in cache.pages for page in pages)
    token = 2 * 4 * 256 * 2  # bytes of a layer's keys and values
    needed = 2 * (5 * 32768 + 29 * 1024) * token
    figure = f"pages of Gemma 3 4B, 2 contexts of 32768: {held >> 20} MiB, needed {needed >> 20}"
    record_property("figure", f"{figure}, without windows {2 * 34 * 32768 * token >> 20}")
    assert needed <= held <= 1.2 * needed
    assert cache.capacity == 32768 and cache.pages[5][0].shape[0] == 2 * 2048


def bytes_needed(config: Config, context: int) -> int:
    """Bytes of one sequence: bfloat16 keys and values that later tokens see, and f32 states.

    A recurrent layer has a matrix per head and the inputs in its convolution's window.
    """
    total = 0
    for layer in range(config.num_layers):
        if config.mixer_of(layer) == "delta":
            matrices = config.delta.value_heads * config.delta.head_dim**2
            total += 4 * (matrices + (config.delta.width - 1) * config.delta.channels)
        elif config.kv_layer_of(layer) == layer:
            tokens = min(context, config.window_of(layer) or context)
            total += 2 * 2 * tokens * config.kv_heads_of(layer) * config.head_dim_of(layer)
    return total


#: Gemma 4 E4B: the last 18 layers attend to keys and values of other layers.
GEMMA_4_E4B = dataclasses.replace(
    GEMMA_4_31B,
    hidden_size=2560,
    intermediate_size=10240,
    num_layers=42,
    num_heads=8,
    num_kv_heads=2,
    kv_heads=None,
    window=512,
    shared_kv_layers=18,
    per_layer_size=256,
)


@pytest.mark.parametrize(
    "name, config, layers",
    [
        ("Qwen 3.6 35B-A3B", QWEN_3_6_35B_A3B, 10),  # the others are recurrent
        ("Gemma 4 31B", GEMMA_4_31B, 60),
        ("Gemma 4 E4B", GEMMA_4_E4B, 24),
    ],
)
def test_a_long_context_takes_what_its_layers_keep(name, config, layers, record_property):
    context = 32768
    cache = jax.eval_shape(lambda: PagedCache.create(config, 1, context, dtype=jnp.bfloat16))
    pages = [page for pages in cache.pages for page in pages]
    states = [part for state in cache.states for part in state]
    held = sum(part.size * part.dtype.itemsize for part in [*pages, *states])
    needed = bytes_needed(config, context)
    figure = f"cache of {name}, a context of {context}: {held / 2**20:.1f} MiB"
    record_property("figure", f"{figure}, needed {needed / 2**20:.1f}")
    assert needed <= held <= 1.1 * needed
    assert len(pages) == 2 * layers
    assert len(states) == 2 * sum(config.mixer_of(i) == "delta" for i in range(config.num_layers))


def test_pages_of_a_window_are_taken_in_turn():
    """A window of 20 cycles through three pages of 16 tokens; after a prompt they hold its end."""
    config = dataclasses.replace(model("gemma3").config, window=20)
    cache = PagedCache.create(config, 2, 100)
    (tables,) = cache.window_tables
    assert tables.tolist() == [[0, 1, 2, 0, 1, 2, 0], [3, 4, 5, 3, 4, 5, 3]]
    assert [pages[0].shape[0] for pages in cache.pages] == [6] * 5 + [14, 6]
    lengths, positions = jnp.array([70, 0]), jnp.tile(jnp.arange(80), (2, 1))
    slots = cache.slots(positions, cache.kept(positions, lengths, 20), tables).reshape(2, 80)
    want = [*range(32, 48), *range(16), *range(16, 22)]  # pages 2, 0, 1 of 32 to 69
    assert slots[0, 32:70].tolist() == want
    assert (slots[0, :32] == -1).all() and (slots[0, 70:] == -1).all() and (slots[1] == -1).all()
