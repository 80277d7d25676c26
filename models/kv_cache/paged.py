"""Defines PagedCache: the paged KV cache and recurrent state of a batch of sequences."""

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
    """Paged KV cache of attention layers, state of recurrent layers, and the block tables.

    Token t of sequence b is in page block_tables[b, t // page_size] at offset t % page_size. With
    the batch sharded over devices, block_tables is (groups, batch / groups, ...), and page ids
    count from the first page of the group's shard.

    Windowed layers have only the pages that their window needs. Later tokens reuse them in turn, so
    page ids repeat in their block tables.

    Attributes:
      pages: KV pages per layer, in separate arrays, so that each can be updated in place.
      block_tables: int32 (batch, pages_per_sequence), shared by the layers without a window.
      context_lens: int32 (batch,), tokens stored so far.
      window_tables: block tables like `block_tables`, one for each of `Config.windows`.
      states: recurrent state per layer; unspecified for sequences without tokens.
      shared_context: maximum tokens of a sequence, if the pages are a pool that sequences of an
        engine share; None if each sequence has pages of its own.
    """

    pages: list[Pages]
    block_tables: jax.Array
    context_lens: jax.Array
    window_tables: list[jax.Array] = dataclasses.field(default_factory=list)
    states: list[State] = dataclasses.field(default_factory=list)
    shared_context: int | None = dataclasses.field(default=None, metadata={"static": True})

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
        """Creates an empty cache for `batch` sequences of up to `capacity` tokens.

        ahead: maximum tokens per sequence of one `Decoder.extend` call, for windowed layers.

        Each sequence has its own pages. On several devices, each device holds the pages of its
        batch rows and its KV heads. With more devices than KV heads, several devices hold copies of
        the same head.

        Raises:
          ValueError: batch or capacity is below 1, there are more than 2^31 - 1 slots, or the
            mesh's batch axis does not divide the batch. TypeError: `dtype` is none of float32,
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
        """Returns what `create` returns on one device, with `jax.ShapeDtypeStruct`s as arrays."""
        per_sequence = -(-capacity // PAGE_SIZE)

        def array(shape: tuple[int, ...], dtype: Any, _: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        def like(values: np.ndarray) -> Any:
            return jax.ShapeDtypeStruct(values.shape, values.dtype)

        args = PAGE_SIZE, jq.page_dtype(dtype), ahead, None, like, array
        return cls._of(config, batch, per_sequence, *args)

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
        """Creates an empty cache; implements `create` and `shapes`.

        per_sequence: number of pages per sequence. put: maps a NumPy array to the cache's array.
        zeros: maps (shape, dtype, sharding) to an array of zeros.
        """
        groups = 1 if placement is None else placement.groups

        def pages(layer: int) -> Pages:
            """Creates the KV pages of a layer."""
            count = min(per_sequence, window_pages(config.window_of(layer), page_size, ahead))
            heads, over = heads_of(config, layer, placement)
            arrays = page_shapes(config, layer, batch * count, page_size, dtype, heads)
            return tuple(zeros(shape, dtype, over) for shape, dtype in arrays)

        def state(layer: int) -> State:
            """Creates the recurrent state of a layer."""
            over = placement and NamedSharding(placement.mesh, PartitionSpec(placement.data))
            shapes = state_shapes(config, layer, batch)
            return tuple(zeros(shape, jnp.float32, over) for shape in shapes)

        def tables(window: int | None) -> jax.Array:
            """Creates the block tables, which give each sequence consecutive pages."""
            count = min(per_sequence, window_pages(window, page_size, ahead))
            first = np.arange(batch // groups, dtype=np.int32)[:, None] * count
            group = first + np.arange(per_sequence, dtype=np.int32) % count
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
        """Dtype of keys and values."""
        return next(pages[0].dtype for pages in self.pages if pages)

    @property
    def capacity(self) -> int:
        """Capacity per sequence in tokens."""
        return self.block_tables.shape[-1] * self.page_size

    @property
    def context(self) -> int:
        """Maximum tokens of a sequence, which determines rope frequencies of some models."""
        return self.capacity if self.shared_context is None else self.shared_context

    def tables(self, config: Config) -> dict[int | None, jax.Array]:
        """Maps each sliding window (None means full attention) to its layers' block tables."""
        return {
            None: self.block_tables,
            **dict(zip(config.windows, self.window_tables, strict=True)),
        }

    def kept(self, positions: jax.Array, lengths: jax.Array, window: int | None) -> jax.Array:
        """Returns the mask (batch, time) of prompt tokens that a layer with this window stores.

        positions: (batch, time). lengths: (batch,), prompt lengths without padding.
        """
        last = lengths[:, None] - 1
        valid = positions <= last
        if window is None or self.shared_context is not None:
            return valid
        pages = window_pages(window, self.page_size)
        return valid & (positions // self.page_size > last // self.page_size - pages)

    def reset(self, rows: jax.Array) -> PagedCache:
        """Returns the cache with some sequences emptied: those in mask `rows`, bool (batch,)."""
        return dataclasses.replace(self, context_lens=jnp.where(rows, 0, self.context_lens))

    def slots(
        self,
        positions: jax.Array,
        valid: jax.Array,
        tables: jax.Array | None = None,
    ) -> jax.Array:
        """Converts token positions (batch, time) to slots of the pages, for `append_kv`.

        Returns int32 (batch * time,), or (groups, batch / groups * time). Tokens that are not
        `valid` (batch, time) and positions beyond the capacity get slot -1.

        tables: block tables to use; None means `block_tables`.
        """
        size = jnp.int32(self.page_size)
        tables = self.block_tables if tables is None else tables
        *groups, _, _ = tables.shape
        if groups:  # each stays on its devices; XLA would gather the tables at every step
            positions, valid = (x.reshape(*groups, -1, x.shape[1]) for x in (positions, valid))
        page = jnp.take_along_axis(tables, jax.lax.div(positions, size), axis=-1, mode="clip")
        slots = page * size + jax.lax.rem(positions, size)
        slots = jnp.where(valid & (positions < self.capacity), slots, -1)
        return slots.reshape(*groups, -1)


def _zeros(shape: tuple[int, ...], dtype: Any, over: NamedSharding | None) -> jax.Array:
    return _compiled_zeros(over)(shape, dtype)


@functools.cache
def _compiled_zeros(over: NamedSharding | None) -> Any:
    """Returns a jitted function (shape, dtype) -> zeros with sharding `over`.

    Layers share the compiled function; each call makes a separate buffer.
    """
    if over is None:
        return jax.jit(jnp.zeros, static_argnums=(0, 1))
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=over)
