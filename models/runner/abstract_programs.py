"""Returns a model's programs with abstract arguments, to lower them without data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..kv_cache import PagedCache
from ..kv_cache.shapes import PAGE_SIZE, page_kinds
from ..sampling import Sampling
from ..sampling.stages import SamplingStages
from .engine_state import EngineState, Sizes
from .engine_steps import DecodeRows, PrefillPieces
from .programs import Decode


def abstract_programs(
    model: Any,
    *,
    batch: int = 1,
    prompt_length: int = 8,
    capacity: int = 64,
    sampling: Sampling | None = None,
    cache_dtype: Any = jnp.float32,
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Returns name -> (jitted function, abstract arguments), to lower programs without data.

    `jitted.trace(*arguments).lower(lowering_platforms=("cuda",))` lowers a program for a GPU on a
    machine without one; then pass CUDA_COMPILER_OPTIONS to `compile`. Names: `prefill` (whole
    prompts), `decode` (a step of the decoder), `generate` (a loop that decodes and samples).
    """
    model.check_generates()
    network = dataclasses.replace(model.network, on_gpu=False)  # the caller sets compiler options
    config, dtype = model.config, jnp.dtype(cache_dtype)
    width = -(-capacity // PAGE_SIZE)
    kinds = page_kinds(config)
    stages = SamplingStages.of([sampling or Sampling()] * batch)
    sizes = Sizes(
        slots=batch,
        kinds=kinds,
        pages=(batch * width,) * len(kinds),
        width=width,
        snapshots=0,
        context=capacity,
        penalizes=stages.penalizes,
        history=stages.reads_history,
    )
    options: Any = {"sizes": sizes, "rows": batch, "stages": stages}
    prefill = PrefillPieces(network, time=prompt_length, fresh=True, **options)
    generate = DecodeRows(network, **options)
    struct = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), model.weights)
    cache = jax.eval_shape(lambda: PagedCache.create(config, batch, capacity, dtype=dtype))
    state = EngineState.create(config, sizes, dtype, lambda shape, kind, _: struct(shape, kind))
    token = struct((batch,), jnp.int32)
    return {
        "prefill": (prefill.jitted(), (weights, state, *prefill.inputs(struct))),
        "decode": (Decode(network).jitted(), (weights, token, cache)),
        "generate": (generate.jitted(), (weights, state, *generate.inputs(struct))),
    }
