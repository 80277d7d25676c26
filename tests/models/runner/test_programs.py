"""The jitted programs of generation, called like `generate` calls them."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.sampling import Sampling
from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages

from ..golden_files import model, reference


def test_the_loop_stops_where_it_is_told_and_rows_at_an_end_token():
    """Two prompts with one continuation both end at the same token of it.

    The second prompt is two tokens longer.
    """
    loaded, want = model("llama-gqa"), reference("llama-gqa")
    end = int(want.greedy[5])
    assert end not in want.greedy[:5]
    samplings = [Sampling()] * 2
    programs = loaded.programs(SamplingStages.of(samplings, (end,)))
    prompts = np.zeros((2, 64), np.int32)
    prompts[0, :48], prompts[1, :50] = want.prompt, want.tokens[:50]
    cache = PagedCache.create(loaded.config, 2, 64)

    parameters = SamplingArrays.of(samplings, (end,))
    lengths = np.array([48, 50], np.int32)
    state = programs.start(loaded.weights, prompts, lengths, cache, parameters)
    assert all(page.is_deleted() for page in jax.tree.leaves(cache.pages))  # donated
    assert state.step == 1 and state.tokens[:, 0].tolist() == [want.greedy[0], want.greedy[2]]

    first = state
    state = programs.loop(loaded.weights, state, parameters, jnp.int32(3))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.cache.pages))
    assert state.step == 3 and state.counts.tolist() == [3, 3] and not state.finished.any()

    state = programs.loop(loaded.weights, state, parameters, jnp.int32(14))
    assert state.step == 6 and state.finished.all()  # not 14: all rows are finished
    assert state.counts.tolist() == [6, 4] and state.token.tolist() == [end, end]
    assert state.tokens[0, :6].tolist() == want.greedy[:6].tolist()
    assert state.tokens[1, :4].tolist() == want.greedy[2:6].tolist()
    assert state.cache.context_lens.tolist() == [48 + 5, 50 + 3]  # all but the last token


def test_programs_are_made_once_per_set_of_sampling_stages():
    loaded = model("llama-gqa")
    drawn = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1}
    programs = loaded.programs(SamplingStages.of([Sampling(**drawn)], (1,)))
    for others in ({"temperature": 1.3}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}, {"seed": 4}):
        assert loaded.programs(SamplingStages.of([Sampling(**drawn | others)], (2, 3))) is programs
    assert loaded.programs(SamplingStages.of([Sampling(**drawn)] * 3, (1,))) is programs
    for others in ({"temperature": 0}, {"logprobs": 0}, {"presence_penalty": 1}):
        assert (
            loaded.programs(SamplingStages.of([Sampling(**drawn | others)], (1,))) is not programs
        )
