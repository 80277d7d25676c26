"""What a model keeps of its sequences: pages of keys and values, and states of recurrent layers.

A block table per sequence lists its pages.
"""

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

if TYPE_CHECKING:
    from ..sharding.placement import Placement
from ..support.exportable import exportable

PAGE_SIZE = 16  # tokens

#: The pages of one layer: keys and values, both (num_pages, num_kv_heads, page_size, head_dim); of
#: int8 pages also their scales, both float32 (num_pages, num_kv_heads, page_size). Of latent
#: attention: one array instead of two. (): the layer has none of its own.
Pages = tuple[jax.Array, ...]

#: The state of one layer that is recurrent, float32: its convolution's last inputs (batch, width,
#: channels), that of token t in slot t % width; of a gated delta net then (batch, value heads, head
#: dim, head dim). (): the layer has none.
State = tuple[jax.Array, ...]


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
            heads, over = _heads(config, layer, placement)
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


def window_pages(window: int | None, page_size: int, ahead: int = 1) -> int:
    """Pages that the windows of `ahead` tokens can see parts of, the last anywhere in a page."""
    if window is None:
        return np.iinfo(np.int32).max
    return -(-(window + ahead - 2) // page_size) + 1


def page_shapes(
    config: Config, layer: int, count: int, page_size: int, dtype: Any, heads: int = 1
) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of a layer's `Pages`, `count` of them."""
    if config.mixer_of(layer) != "attention" or config.kv_layer_of(layer) != layer:
        return []
    kinds, head_dim = 2, config.head_dim_of(layer)
    if config.latent is not None:  # keys, whose first elements are the values
        kinds, head_dim = 1, config.latent.stored_dim(config.rope_dim)
    shapes: list[tuple[tuple[int, ...], Any]] = [((count, heads, page_size, head_dim), dtype)]
    if dtype == jnp.int8:
        return shapes * kinds + [((count, heads, page_size), jnp.float32)] * kinds
    return shapes * kinds


def state_shapes(config: Config, layer: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of a layer's `State`."""
    mixer, delta = config.mixer_of(layer), config.delta
    if mixer == "convolution":
        return ((batch, config.convolution_width, config.hidden_size),)
    if mixer == "delta" and delta is not None:
        matrices = batch, delta.value_heads, delta.head_dim, delta.head_dim
        return (batch, delta.width, delta.channels), matrices
    return ()


def _heads(
    config: Config, layer: int, placement: Placement | None
) -> tuple[int, NamedSharding | None]:
    """Heads that a layer's pages hold, and where they lie; latent vectors are whole."""
    num_kv_heads, num_heads = config.kv_heads_of(layer), config.num_heads
    if placement is None:
        return num_kv_heads, None
    devices = placement.devices
    if config.latent is not None:
        return num_kv_heads, NamedSharding(placement.mesh, PartitionSpec(placement.data))
    if num_kv_heads % devices == 0:
        heads = num_kv_heads
    elif devices % num_kv_heads == 0 and num_heads % devices == 0:
        heads = devices
    else:
        return num_kv_heads, NamedSharding(placement.mesh, PartitionSpec(placement.data))
    return heads, NamedSharding(placement.mesh, PartitionSpec(placement.data, placement.axis))


def _zeros(shape: tuple[int, ...], dtype: Any, over: NamedSharding | None) -> jax.Array:
    return _compiled_zeros(over)(shape, dtype)


@functools.cache
def _compiled_zeros(over: NamedSharding | None) -> Any:
    """Compiled once for all layers: each needs pages of its own."""
    if over is None:
        return jax.jit(jnp.zeros, static_argnums=(0, 1))
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=over)


def scales(pages: Pages) -> dict[str, Any]:
    """The arguments by which operations take the scales of int8 pages; none for others."""
    held = pages[len(pages) // 2 :] if pages and pages[0].dtype == jnp.int8 else ()
    return dict(zip(("k_scales", "v_scales"), held, strict=False))


def append_latent(pages: Pages, rows: jax.Array, slots: jax.Array) -> Pages:
    """Stores latent vectors and their keys (tokens, 1, n) at slots (tokens,)."""
    return jq.append_kv(pages[0], None, rows, None, slots, **scales(pages))


def stored(pages: Pages, *new: jax.Array) -> tuple[jax.Array, ...]:
    """Keys and values (..., heads, head_dim), each head as often as the pages hold it."""
    copies = pages[0].shape[1] // new[0].shape[-2] if pages else 1
    return new if copies == 1 else tuple(jnp.repeat(x, copies, axis=-2) for x in new)


def rows(x: jax.Array) -> jax.Array:
    """(batch, time, ...) -> (batch * time, ...)."""
    return x.reshape(-1, *x.shape[2:])


def last_tokens(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Each row's last token, (batch, n), of vectors (batch, time, n)."""
    at = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
