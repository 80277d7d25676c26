"""Paged KV cache and recurrent state of a batch; a block table per sequence lists its pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_q4k as jq

from ..config import Config
from ..support.exportable import exportable
from .shapes import PAGE_SIZE, Pages, State, heads_of, page_shapes, state_shapes, window_pages

if TYPE_CHECKING:
    from ..sharding.placement import Placement


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers, states of others, and where each sequence's tokens lie.

    Token t of sequence b is in page block_tables[b, t // page_size] at offset t % page_size. Where
    devices hold groups of the sequences, block_tables is (groups, batch / groups, ...) and its ids
    count from the first page of the group's part.

    Windowed layers have pages for what their window sees, which later tokens take in turn: in their
    tables a page comes again after as many.

    Attributes:
      pages: per layer arrays of its own, so that each can be updated in place.
      block_tables: int32 (batch, pages_per_sequence), shared by the layers without a window.
      context_lens: int32 (batch,), tokens stored so far.
      window_tables: as block_tables, of each of `Config.windows`.
      states: per layer; what they hold of a sequence without tokens means nothing.
    """

    pages: list[Pages]
    block_tables: jax.Array
    context_lens: jax.Array
    window_tables: list[jax.Array] = dataclasses.field(default_factory=list)
    states: list[State] = dataclasses.field(default_factory=list)

    @classmethod
    def create(
        cls,
        config: Config,
        batch: int,
        capacity: int,
        *,
        page_size: int = PAGE_SIZE,
        dtype: Any = jnp.float32,
        ahead: int = 1,
        placement: Placement | None = None,
    ) -> PagedCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens.

        ahead: tokens of a sequence that `Decoder.extend` may append at a time, where layers are
        windowed.

        Each sequence has pages of its own. On several devices, each holds the pages of its rows of
        the batch and of its heads; where devices are more than the model's KV heads, groups of them
        hold the same head.

        Raises:
          ValueError: a batch or capacity below 1, or more than 2^31 - 1 slots; a batch that the
            mesh's axis for batches does not divide. TypeError: `dtype` is none of float32,
            bfloat16, float16, int8, float8_e4m3fn.
        """
        dtype = jq.page_dtype(dtype)
        if batch < 1 or capacity < 1:
            raise ValueError(f"batch={batch} and capacity={capacity} must be at least 1")
        per_sequence = -(-capacity // page_size)
        num_pages = batch * per_sequence
        if num_pages * page_size > np.iinfo(np.int32).max:
            raise ValueError(f"batch={batch} times capacity={capacity} must be below 2^31 tokens")
        groups = 1 if placement is None else placement.groups
        if batch % groups:
            raise ValueError(
                f"batch={batch} must be a multiple of {groups}, the devices along the mesh's axis "
                f"{placement and placement.data!r}"
            )
        put = jax.device_put if placement is None else placement.put
        return cls._of(config, batch, per_sequence, page_size, dtype, ahead, placement, put, _zeros)

    @classmethod
    def shapes(
        cls, config: Config, batch: int, capacity: int, *, dtype: Any, ahead: int
    ) -> PagedCache:
        """Shapes and dtypes of what `create` gives on one device, as `jax.ShapeDtypeStruct`s."""
        per_sequence = -(-capacity // PAGE_SIZE)

        def array(shape: tuple[int, ...], dtype: Any, _: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        def like(values: np.ndarray) -> Any:
            return jax.ShapeDtypeStruct(values.shape, values.dtype)

        given = PAGE_SIZE, jq.page_dtype(dtype), ahead, None, like, array
        return cls._of(config, batch, per_sequence, *given)

    @classmethod
    def _of(
        cls,
        config: Config,
        batch: int,
        per_sequence: int,
        page_size: int,
        dtype: Any,
        ahead: int,
        placement: Placement | None,
        put: Callable[[np.ndarray], Any],
        zeros: Callable[[tuple[int, ...], Any, NamedSharding | None], Any],
    ) -> PagedCache:
        """An empty cache whose arrays `put` and `zeros` make.

        per_sequence: pages of a sequence.
        """
        groups = 1 if placement is None else placement.groups

        def pages(layer: int) -> Pages:
            """A layer's."""
            own = min(per_sequence, window_pages(config.window_of(layer), page_size, ahead))
            heads, over = heads_of(config, layer, placement)
            arrays = page_shapes(config, layer, batch * own, page_size, dtype, heads)
            return tuple(zeros(shape, dtype, over) for shape, dtype in arrays)

        def state(layer: int) -> State:
            """A layer's."""
            over = placement and NamedSharding(placement.mesh, PartitionSpec(placement.data))
            shapes = state_shapes(config, layer, batch)
            return tuple(zeros(shape, jnp.float32, over) for shape in shapes)

        def tables(window: int | None) -> jax.Array:
            """The pages of each sequence, in turn."""
            own = min(per_sequence, window_pages(window, page_size, ahead))
            first = np.arange(batch // groups, dtype=np.int32)[:, None] * own
            group = first + np.arange(per_sequence, dtype=np.int32) % own
            return put(group if groups == 1 else np.stack([group] * groups))

        return cls(
            pages=[pages(layer) for layer in range(config.num_layers)],
            block_tables=tables(None),
            context_lens=put(np.zeros(batch, np.int32)),
            window_tables=[tables(window) for window in config.windows],
            states=[state(layer) for layer in range(config.num_layers)],
        )

    @property
    def page_size(self) -> int:
        return next(pages[0].shape[2] for pages in self.pages if pages)

    @property
    def dtype(self) -> Any:
        """That of cached keys and values."""
        return next(pages[0].dtype for pages in self.pages if pages)

    @property
    def capacity(self) -> int:
        """Tokens a sequence can hold."""
        return self.block_tables.shape[-1] * self.page_size

    def tables(self, config: Config) -> dict[int | None, jax.Array]:
        """The block tables of layers by their window."""
        return {
            None: self.block_tables,
            **dict(zip(config.windows, self.window_tables, strict=True)),
        }

    def kept(self, positions: jax.Array, lengths: jax.Array, window: int | None) -> jax.Array:
        """True of the tokens of whole prompts that a layer's pages keep, bool (batch, time).

        positions: (batch, time). lengths: (batch,), beyond which is padding.
        """
        last = lengths[:, None] - 1
        valid = positions <= last
        if window is None:
            return valid
        pages = window_pages(window, self.page_size)
        return valid & (positions // self.page_size > last // self.page_size - pages)

    def reset(self, rows: jax.Array) -> PagedCache:
        """The cache with these sequences empty; rows: bool (batch,)."""
        return dataclasses.replace(self, context_lens=jnp.where(rows, 0, self.context_lens))

    def slots(
        self,
        positions: jax.Array,
        valid: jax.Array,
        tables: jax.Array | None = None,
    ) -> jax.Array:
        """Slots of token positions (batch, time), for `append_kv`.

        They are int32 (batch * time,), or (groups, batch / groups * time). A slot is -1 where not
        valid, and for a position beyond the capacity. tables: None: `block_tables`.
        """
        size = jnp.int32(self.page_size)
        tables = self.block_tables if tables is None else tables
        *groups, _, per_sequence = tables.shape
        tables = tables.reshape(-1, per_sequence)
        page = jnp.take_along_axis(tables, jax.lax.div(positions, size), axis=1, mode="clip")
        slots = page * size + jax.lax.rem(positions, size)
        slots = jnp.where(valid & (positions < self.capacity), slots, -1)
        return slots.reshape(*groups, -1)


def grown(cache: PagedCache, config: Config, capacity: int, ahead: int) -> PagedCache:
    """The cache of one sequence with room for `capacity` tokens, at least as many as before."""
    if capacity <= cache.capacity:
        return cache
    options = {"page_size": cache.page_size, "dtype": cache.dtype, "ahead": ahead}
    larger = PagedCache.create(config, 1, capacity, **options)
    pages = [
        tuple(new.at[: len(old)].set(old) for new, old in zip(*both, strict=True))
        for both in zip(larger.pages, cache.pages, strict=True)
    ]
    return dataclasses.replace(
        larger, pages=pages, states=cache.states, context_lens=cache.context_lens
    )


def _zeros(shape: tuple[int, ...], dtype: Any, over: NamedSharding | None) -> jax.Array:
    return _compiled_zeros(over)(shape, dtype)


@functools.cache
def _compiled_zeros(over: NamedSharding | None) -> Any:
    """Compiled once for all layers: each needs pages of its own."""
    if over is None:
        return jax.jit(jnp.zeros, static_argnums=(0, 1))
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=over)
