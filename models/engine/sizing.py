"""Chooses the sizes of an engine: rows, pages, context, prefill programs."""

from __future__ import annotations

import collections
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..config import Config
from ..kv_cache.shapes import PAGE_SIZE, window_pages
from ..runner.engine_state import EngineState, Sizes, kinds_of
from ..runner.model import Model
from ..runner.speculative.drafts import Draft, tokens_of
from ..sharding.placement import Placement
from . import memory
from .scheduler import BOUNDARY, Limits

#: Rows and tokens of the prefill programs.
CPU_SHAPES = ((1, 16), (1, 32), (1, 48), (1, 64), (1, 96), (1, 128), (1, 256), (4, 16), (4, 64))
GPU_SHAPES = ((1, 16), (1, 64), (1, 256), (1, 1024), (8, 64), (8, 256))

#: Maximum tokens of a prefill program in steps that decode, too.
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 64, 2048

#: Cost of a prefill program besides its tokens, in tokens: on an H100 16 tokens of an 8B model take
#: nearly as long as 64.
GPU_PROGRAM = 128

#: Fraction of the free memory that pages take by default.
CPU_SHARE, GPU_SHARE = 0.5, 0.9

#: Fraction of the pages' memory that snapshots of recurrent states take.
SNAPSHOT_SHARE = 0.1

#: Lower bounds of a decode step's speed: bytes of weights per second, and seconds of any step.
CPU_BYTES, GPU_BYTES, LEAST_SECONDS = 8e9, 1e12, 5e-4


def expected_step_seconds(model: Model) -> float:
    """Returns a cautious estimate of the seconds that a decode step takes."""
    speed = GPU_BYTES if model.network.on_gpu else CPU_BYTES
    return LEAST_SECONDS + model.weight_bytes / speed


def is_recurrent(config: Config) -> bool:
    """Returns whether a layer of the model has recurrent state."""
    return any(config.mixer_of(layer) != "attention" for layer in range(config.num_layers))


def program_cost(model: Model) -> int:
    """Returns the cost of a prefill program besides its tokens, in tokens."""
    return GPU_PROGRAM if model.network.on_gpu else Limits.program_cost


def engine_limits(
    model: Model, rows: int, draft: Draft | None = None, *, deterministic: bool
) -> Limits:
    """Returns the sizes of an engine's steps, with room for `rows` running requests."""
    on_gpu, placement = model.network.on_gpu, model.placement
    shapes: tuple[tuple[int, int], ...] = GPU_SHAPES if on_gpu else CPU_SHAPES
    slots = -(-rows // (1 if placement is None else placement.groups))
    if deterministic:
        shapes = tuple(shape for shape in shapes if shape[1] >= BOUNDARY)
        slots = -(-slots // 16) * 16
    steps = GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
    return Limits(
        slots,
        shapes,
        steps,
        program_cost=program_cost(model),
        deterministic=deterministic,
        draft_tokens=0 if draft is None else tokens_of(draft, on_gpu),
    )


def engine_sizes(
    model: Model,
    limits: Limits,
    pages: int | None,
    context: int | None,
    dtype: Any,
    draft: Draft | None = None,
) -> Sizes:
    """Returns the sizes of an engine's arrays.

    pages: pages of full attention over all groups; None means what free memory allows, at most a
    full context for every row. context: maximum tokens of a request; None means the model's context
    length, or fewer if the pages hold less.
    """
    config, placement = model.config, model.placement
    groups = 1 if placement is None else placement.groups
    longest = config.context_length if context is None else context
    kinds = kinds_of(config, draft)

    def sizes(pages: int, places: int) -> Sizes:
        """Returns the sizes with `pages` pages of full attention in each group."""
        return Sizes(
            slots=limits.rows * groups,
            kinds=kinds,
            pages=tuple(_count(kind, pages, longest, limits) for kind in kinds),
            width=-(-(longest + limits.draft_tokens) // PAGE_SIZE),
            snapshots=places,
            context=longest,
            penalizes=True,
            history=True,
            groups=groups,
        )

    def bytes_of(pages: int, places: int = 0) -> int:
        """Returns the bytes in one memory: a GPU's, or the one that a CPU's devices share."""
        found = 0

        def array(shape: tuple[int, ...], kind: Any, over: NamedSharding | None) -> None:
            nonlocal found
            part = shape if over is None else over.shard_shape(shape)
            found += math.prod(part) * jnp.dtype(kind).itemsize

        EngineState.create(config, sizes(pages, places), dtype, array, placement, draft)
        return found * (1 if model.network.on_gpu else _devices_of_a_process(placement))

    most = -(-(longest + limits.draft_tokens) // PAGE_SIZE) * limits.rows
    if pages is not None:
        most = max(pages // groups, 1)
    elif (free := memory.free_bytes(model)) is not None:
        share = GPU_SHARE if model.network.on_gpu else CPU_SHARE
        some = 4096
        of_page = (bytes_of(2 * some) - bytes_of(some)) / some
        fitting = int((share * free - bytes_of(1)) / of_page)
        most = max(min(most, fitting), 1)
    if context is None:
        longest = min(longest, most * PAGE_SIZE)
    places = 0
    if is_recurrent(config):
        of_place = bytes_of(1, 1) - bytes_of(1)
        places = max(int(SNAPSHOT_SHARE * bytes_of(most) / of_place), 2 * limits.rows)
    return sizes(most, places)


def _devices_of_a_process(placement: Placement | None) -> int:
    """Returns the largest number of devices of the mesh that belong to one process."""
    if placement is None:
        return 1
    counts = collections.Counter(device.process_index for device in placement.mesh.devices.flat)
    return max(counts.values())


def _count(kind: int | None, pages: int, longest: int, limits: Limits) -> int:
    """Returns the number of pages of a kind of layers beside `pages` pages of full attention.

    Windowed layers have as large a part of these as a window is of half a context, and at least
    what one request needs.
    """
    if kind is None:
        return pages
    least = window_pages(kind, PAGE_SIZE, limits.most_tokens)
    part = min(1.0, 2 * least * PAGE_SIZE / longest)
    return min(max(math.ceil(pages * part), least), max(pages, 1))
