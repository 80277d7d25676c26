"""Computes shapes of a layer's KV pages and recurrent state, and the pages of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..config import Config
from ..config.attention_fields import stored_head_dim

if TYPE_CHECKING:
    from ..sharding.placement import Placement

PAGE_SIZE = 16  # tokens

#: Pages of one layer: keys and values, both (num_pages, num_kv_heads, page_size, stored_head_dim).
#: int8 pages have their scales too, both float32 (num_pages, num_kv_heads, page_size). Latent
#: attention has one array instead of each pair. Empty for a layer without pages of its own.
Pages = tuple[jax.Array, ...]

#: Recurrent state of one layer, float32: the convolution's last inputs (batch, width, channels),
#: token t in slot t % width. A gated delta net also has matrices (batch, value heads, head dim,
#: head dim). Empty for attention layers.
State = tuple[jax.Array, ...]


def window_pages(window: int | None, page_size: int, ahead: int = 1) -> int:
    """Returns how many pages a sequence needs in a layer with a sliding window.

    This is how many pages the windows of `ahead` consecutive tokens can overlap, wherever the last
    token lies in its page.
    """
    if window is None:
        return np.iinfo(np.int32).max
    return -(-(window + ahead - 2) // page_size) + 1


def page_shapes(
    config: Config, layer: int, count: int, page_size: int, dtype: Any, heads: int = 1
) -> list[tuple[tuple[int, ...], Any]]:
    """Returns shapes and dtypes of a layer's `Pages` arrays with `count` pages."""
    if not has_pages(config, layer):
        return []
    kinds, head_dim = 2, stored_head_dim(config.head_dim_of(layer))
    if config.latent is not None:  # values are the first elements of keys
        kinds, head_dim = 1, config.latent.stored_dim(config.rope_dim)
    shapes: list[tuple[tuple[int, ...], Any]] = [((count, heads, page_size, head_dim), dtype)]
    if dtype == jnp.int8:
        return shapes * kinds + [((count, heads, page_size), jnp.float32)] * kinds
    return shapes * kinds


def page_kinds(config: Config) -> tuple[int | None, ...]:
    """Returns the kinds of layers that have pages: None for full attention, then each window.

    Layers of a kind have pages for the same tokens, and share block tables.
    """
    kinds = {config.window_of(i) for i in range(config.num_layers) if has_pages(config, i)}
    return tuple(kind for kind in (None, *config.windows) if kind in kinds)


def has_pages(config: Config, layer: int) -> bool:
    """Returns whether a layer has pages of its own: not a recurrent one, nor one that shares."""
    return config.mixer_of(layer) == "attention" and config.kv_layer_of(layer) == layer


def state_shapes(config: Config, layer: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a layer's `State`."""
    mixer, delta = config.mixer_of(layer), config.delta
    if mixer == "convolution":
        return ((batch, config.convolution_width, config.hidden_size),)
    if mixer == "delta" and delta is not None:
        matrices = batch, delta.value_heads, delta.head_dim, delta.value_dim
        return (batch, delta.width, delta.channels), matrices
    return ()


def heads_of(
    config: Config, layer: int, placement: Placement | None
) -> tuple[int, NamedSharding | None]:
    """Returns how many KV heads a layer's pages hold, and the sharding of the pages.

    Latent vectors are not split over heads.
    """
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
