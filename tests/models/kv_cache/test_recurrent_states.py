"""Recurrent states and KV pages: prompts in chunks, and sequences that join and leave a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k.models.kv_cache import PagedCache, recurrent_states

from ..golden_files import RECURRENT, model, reference

pytestmark = needs_native

TIME = 71  # tokens; the prompt is cut before each but the first


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


def programs(loaded):
    """Jits a model's prefill, extend and decode."""

    def program(name, **options):
        return jax.jit(
            lambda weights, *args: getattr(loaded.decoder(weights), name)(*args, **options)
        )

    return program("prefill"), program("extend", every=False), program("decode")


def padded(tokens):
    row = np.zeros((1, TIME), np.int32)
    row[0, : len(tokens)] = tokens
    return row, np.array([len(tokens)], np.int32)


@pytest.mark.slow("compiles a program a length", quick=["lfm2"])
@pytest.mark.parametrize("name", ["qwen35", "lfm2", "gemma4-e", "deepseek2-noyarn"])
def test_a_prompt_cut_anywhere(name):
    """The second chunk continues from the first one's state, with the same logits."""
    loaded, tokens = model(name), reference(name).tokens[:TIME]
    prefill, extend, decode = programs(loaded)
    empty = PagedCache.create(loaded.config, 1, TIME + 1, ahead=TIME)
    whole, cache = prefill(loaded.weights, *padded(tokens), empty)
    behind = decode(loaded.weights, tokens[:1], cache)[0]
    for cut in range(1, TIME):
        _, cache = prefill(loaded.weights, *padded(tokens[:cut]), empty)
        logits, cache = extend(loaded.weights, *padded(tokens[cut:]), cache)
        assert nmse(logits, whole) <= 1e-10
        if cut % 10 == 0:  # the cache serves a step too
            assert nmse(decode(loaded.weights, tokens[:1], cache)[0], behind) <= 1e-10


@pytest.mark.slow("compiles three programs")
def test_logits_of_every_token_of_a_piece():
    loaded, want = model("qwen35moe"), reference("qwen35moe")
    prefill, _, _ = programs(loaded)
    _, cache = prefill(
        loaded.weights, *padded(want.tokens[:20]), PagedCache.create(loaded.config, 1, TIME)
    )
    piece = want.tokens[None, 20:33]
    logits, cache = loaded.decoder().extend(jnp.array(piece), jnp.array([13]), cache)
    assert nmse(logits[0], want.logits[20:33]) <= 1e-8
    assert cache.context_lens.tolist() == [33]


def test_windows_take_as_many_tokens_at_a_time_as_they_have_room_for():
    loaded = model("gemma4")
    cache = PagedCache.create(loaded.config, 1, 64, ahead=8)
    tokens, lengths = jnp.zeros((1, 40), jnp.int32), jnp.array([40])
    with pytest.raises(ValueError, match="time=40; windowed layers have no room for as many"):
        loaded.decoder().extend(tokens, lengths, cache)


@pytest.mark.slow("compiles four programs", quick=["lfm2moe"])
@pytest.mark.parametrize("name", ["qwen35", "lfm2moe"])
def test_rows_that_start_and_stop_at_different_times(name):
    """Each row of a batch has the logits that it has alone, whatever the other rows do."""
    loaded, tokens = model(name), reference(name).tokens
    prefill, _, decode = programs(loaded)
    # (first step, tokens of the prompt, last step); a third sequence reuses the row of the first
    plan = {0: [(0, 9, 6), (8, 5, 14)], 1: [(3, 14, 12)], 2: [(0, 3, 14)]}
    cache, got = PagedCache.create(loaded.config, 3, 64), {}
    running = {}
    for step in range(15):
        for row, entries in plan.items():
            for first, length, last in entries:
                if step == first:
                    cache = cache.reset(jnp.arange(3) == row)
                    prompts, lengths = np.zeros((3, 16), np.int32), np.zeros(3, np.int32)
                    prompts[row, :length], lengths[row] = tokens[first : first + length], length
                    logits, cache = prefill(loaded.weights, prompts, lengths, cache)
                    running[row] = got[row, first] = [logits[row]]
                    running[row, "next"] = first + length
                if step == last:
                    running.pop(row)
        active = np.array([row in running for row in range(3)])
        token = np.array([tokens[running.get((row, "next"), 0) % 72] for row in range(3)])
        logits, cache = decode(loaded.weights, token.astype(np.int32), cache, active)
        for row in np.flatnonzero(active):
            running[row].append(logits[row])
            running[row, "next"] += 1
    for (row, first), rows in got.items():
        length = next(n for start, n, _ in plan[row] if start == first)
        alone = tokens[first : first + length + len(rows) - 1]
        want = loaded.logits(alone[None])[0, length - 1 :]
        assert nmse(np.stack(rows), want) <= 1e-10


@pytest.mark.slow("compiles four programs", quick=["lfm2"])
@pytest.mark.parametrize("name", RECURRENT)
def test_rows_of_states_are_gathered_copied_and_reset(name):
    loaded, tokens = model(name), reference(name).tokens
    prefill, _, _ = programs(loaded)
    prompts = np.stack([tokens[i : i + 16] for i in (0, 16, 32)]).astype(np.int32)
    cache = PagedCache.create(loaded.config, 3, 32)
    _, cache = prefill(loaded.weights, prompts, np.full(3, 16, np.int32), cache)
    leaves = jax.tree.leaves(cache.states)
    assert leaves and all(leaf.dtype == jnp.float32 and np.any(leaf) for leaf in leaves)
    gathered = jax.tree.leaves(recurrent_states.gather(cache.states, jnp.array([2, 0])))
    copied = jax.tree.leaves(recurrent_states.copy(cache.states, jnp.array([1]), jnp.array([0])))
    empty = jax.tree.leaves(recurrent_states.reset(cache.states, jnp.array([False, True, False])))
    for old, new, both, without in zip(leaves, gathered, copied, empty, strict=True):
        np.testing.assert_array_equal(new, old[np.array([2, 0])])
        np.testing.assert_array_equal(both, old[np.array([1, 1, 2])])
        np.testing.assert_array_equal(without[np.array([0, 2])], old[np.array([0, 2])])
        assert not np.any(without[1])
