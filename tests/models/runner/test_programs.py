"""The jitted programs of an engine, called with arguments made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k.models.runner.engine_state import EngineState, Sizes
from jax_q4k.models.runner.engine_steps import DecodeRows, PrefillPieces, RowFields
from jax_q4k.models.sampling import Sampling
from jax_q4k.models.sampling.packing import pack, unpack
from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages

from ..golden_files import model, reference

#: Two of three slots are in use, in another order than the rows.
SLOTS = [2, 0]
SIZES = Sizes(slots=3, kinds=(None,), pages=(8,), width=4, snapshots=0, context=64)


def step(program: PrefillPieces | DecodeRows, fields: RowFields, *parts: Any) -> np.ndarray:
    columns = [np.stack(np.broadcast_arrays(*fields), axis=1), *parts]
    return np.concatenate([np.asarray(part, np.int32) for part in columns], axis=1)


def test_rows_stop_where_they_are_told_and_at_an_end_token() -> None:
    """Two prompts with one continuation both end at the same token of it.

    The second prompt is two tokens longer.
    """
    loaded, want = model("llama-gqa"), reference("llama-gqa")
    end = int(want.greedy[5])
    assert end not in want.greedy[:5]
    samplings = [Sampling()] * 2
    options: Any = {"sizes": SIZES, "rows": 2, "stages": SamplingStages.of(samplings, (end,))}
    packed = pack(SamplingArrays.of(samplings, (end,)))
    state = EngineState.create(
        loaded.config, SIZES, jnp.float32, lambda shape, dtype, _: jnp.zeros(shape, dtype)
    )
    prefill = PrefillPieces(loaded.network, time=64, **options)
    tokens = np.zeros((2, 64), np.int32)
    tokens[0, :48], tokens[1, :50] = want.prompt, want.tokens[:50]
    tables = [[5, 1, 3, -1], [0, 2, 4, 6]]
    fields = RowFields(SLOTS, 0, [48, 50], 0, 1, 0)
    run, first = prefill.jitted(), state
    *_, mask = prefill.inputs(np.zeros)
    args = np.int32(0), step(prefill, fields, tokens, tables, packed), ~mask
    state, sampled = run(loaded.weights, state, *args)
    assert all(page.is_deleted() for page in jax.tree.leaves(first.pages))  # donated
    assert sampled.tokens[:, 0].tolist() == [want.greedy[0], want.greedy[2]]
    assert state.tables[0][jnp.array(SLOTS)].tolist() == tables

    decode = DecodeRows(loaded.network, **options)
    run, columns = decode.jitted(), np.full((2, decode.pages_per_step), -1)
    columns[0, 0] = 7  # the first row begins another page
    fields = RowFields(SLOTS, [48, 50], [2, 1], 1, 1, 0)
    state, sampled = run(loaded.weights, state, np.int32(0), step(decode, fields, columns, packed))
    assert sampled.tokens[:, :3].tolist() == [[*want.greedy[1:3], -1], [want.greedy[3], -1, -1]]
    assert state.tables[0][2].tolist() == [5, 1, 3, 7] and not state.ended.any()

    fields = RowFields(SLOTS, [50, 51], 14, [3, 2], 1, 0)
    args = np.int32(0), step(decode, fields, np.full_like(columns, -1), packed)
    state, sampled = run(loaded.weights, state, *args)
    assert sampled.tokens[0, :4].tolist() == [*want.greedy[3:6], -1]  # not 14 tokens
    assert sampled.tokens[1, :3].tolist() == [*want.greedy[4:6], -1]
    assert state.ended.tolist() == [True, False, True]
    _, sampled = run(loaded.weights, state, *args)
    assert (sampled.tokens == -1).all()  # rows that have ended sample nothing


def test_parameters_survive_packing() -> None:
    """Floats keep their bits, seeds their sign bit, masks their length."""
    samplings = [
        Sampling(temperature=0.3, seed=2**32 - 1, top_p=0.9, logit_bias={3: -np.inf, 9: 1e-30}),
        Sampling(dry_multiplier=0.7, dry_base=1.3, repetition_penalty=1.1, ignore_end=True),
    ]
    stages = SamplingStages.of(samplings, (7, 8))
    breaks = np.arange(37) % 3 == 0
    want = SamplingArrays.of(samplings, (7, 8), stages, lambda texts: breaks if texts else ~breaks)
    packed = pack(want)
    assert packed.dtype == np.int32 and len(packed) == 2
    got = jax.jit(lambda rows: unpack(rows, stages, 37))(packed)
    for field in dataclasses.fields(want):
        one, other = getattr(got, field.name), getattr(want, field.name)
        assert one.dtype == other.dtype and np.array_equal(one, other), field.name
