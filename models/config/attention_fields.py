"""Reads and writes attention head counts and sizes in GGUF metadata."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np

from jax_q4k import HEAD_DIMS, LATENT_DIMS
from jax_q4k.gguf import Fields

from ..architectures.base import Architecture

# Far above any real model; bounds the work that a malformed file can cause.
MAX_HEADS, _MAX_SIZE = 4096, 1 << 24

_COUNT, _KV_COUNT = "attention.head_count", "attention.head_count_kv"
#: Size of the keys that are projected from latent vectors; in older files `key_length` has it.
LATENT_KEY = "attention.key_length_mla"


class Latent(NamedTuple):
    """Sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434).

    A token's keys and values are projections of one latent vector. The KV cache stores this vector
    of `rank` elements, then a rotated key of `rope_dim` elements that all heads share.
    """

    rank: int
    query_rank: int  # size of the low-rank vector that queries are projected from; 0: none
    value_dim: int  # elements of each head's values

    @property
    def stored_rank(self) -> int:
        """Elements of the latent vector in the cache, padded to a width that pages can have."""
        return _whole_pages(self.rank)

    def stored_dim(self, rope_dim: int) -> int:
        """Returns the elements of a cache row, latent vector and key, padded to a page's width."""
        return _whole_pages(self.stored_rank + rope_dim)


def _whole_pages(size: int) -> int:
    unit = LATENT_DIMS[1] - LATENT_DIMS[0]
    return max(-(-size // unit) * unit, LATENT_DIMS[0])


def read(
    get: Fields, kind: Architecture, hidden_size: int, layers: int, blocks: int
) -> dict[str, Any]:
    """Returns the attention fields of `Config`; raises GGUFError that names the invalid key.

    blocks: number of layers in the file, including multi-token-prediction layers at the end.
    """
    heads = get.integer(_COUNT, least=1, most=MAX_HEADS, repeated=True)
    latent, by_layer = _latent(get, kind), _kv_heads(get, kind, heads, layers, blocks)
    kv_heads = max(by_layer)
    if latent is None and "attention.key_length" not in get and hidden_size % heads:
        get.fail(_COUNT, f"{heads} must divide embedding_length={hidden_size}")
    fields = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "kv_heads": by_layer if set(by_layer) != {kv_heads} else None,
        "latent": latent,
    }
    if latent is not None:
        return fields | _latent_sizes(get, latent, heads, kv_heads)
    supported = None if kind.bidirectional else HEAD_DIMS
    head_dim, rope_dim = _sizes(get, hidden_size // heads, "", supported)
    fields |= {"head_dim": head_dim, "rope_dim": rope_dim}
    if kind.local_heads:
        local_dim, local_rope_dim = _sizes(get, head_dim, "_swa", supported)
        fields |= {"local_head_dim": local_dim, "local_rope_dim": local_rope_dim}
    return fields


def _sizes(
    get: Fields, default: int, suffix: str, supported: Container[int] | None
) -> tuple[int, int]:
    """Returns head_dim and rope_dim; supported: possible values of head_dim, None means all."""
    integer = functools.partial(get.integer, least=1, repeated=True)
    key, value_key = f"attention.key_length{suffix}", f"attention.value_length{suffix}"
    head_dim = integer(key, default, most=_MAX_SIZE)
    if supported is not None and head_dim not in supported:
        known = ", ".join(map(str, HEAD_DIMS))
        get.fail(key, f"a head_dim of {head_dim} is not supported; supported: {known}")
    value_length = integer(value_key, head_dim, most=_MAX_SIZE)
    if value_length != head_dim:
        get.fail(value_key, f"{value_length} must equal the key length, {head_dim}")
    rope_key = f"rope.dimension_count{suffix}"
    rope_dim = integer(rope_key, head_dim, most=head_dim)
    if rope_dim % 2:
        get.fail(rope_key, f"{rope_dim} must be even")
    return head_dim, rope_dim


def _kv_heads(
    get: Fields, kind: Architecture, heads: int, layers: int, blocks: int
) -> tuple[int, ...]:
    """Returns the number of KV heads of each layer; 0 for layers with a convolution."""
    if not (kind.varied_kv_heads or kind.convolution):
        counts = (get.integer(_KV_COUNT, heads, least=1, most=heads, repeated=True),) * layers
    else:
        minimum = 0 if kind.convolution else 1
        counts = by_layer(get, _KV_COUNT, layers, blocks, default=heads, least=minimum, most=heads)
    for count in set(counts) - {0}:
        if heads % count:
            get.fail(_KV_COUNT, f"{count} must divide attention.head_count={heads}")
    if not any(counts):
        get.fail(_KV_COUNT, "must not be 0 in every layer")
    return counts


def _latent(get: Fields, kind: Architecture) -> Latent | None:
    if not kind.latent:
        return None
    size = functools.partial(get.integer, least=1, most=_MAX_SIZE)
    rank = size("attention.kv_lora_rank")
    return Latent(
        rank=rank,
        query_rank=get.integer("attention.q_lora_rank", 0, least=0, most=_MAX_SIZE),
        value_dim=size(f"attention.value_length{'_mla' if LATENT_KEY in get else ''}"),
    )


def _latent_sizes(get: Fields, latent: Latent, heads: int, kv_heads: int) -> dict[str, Any]:
    is_today = LATENT_KEY in get  # older files describe the projected heads instead
    key = LATENT_KEY if is_today else "attention.key_length"
    head_dim = get.integer(key, least=1, most=_MAX_SIZE)
    rope_dim = get.integer("rope.dimension_count", least=2, most=head_dim - 1)
    if rope_dim % 2:
        get.fail("rope.dimension_count", f"{rope_dim} must be even")
    if (stored := latent.stored_dim(rope_dim)) > LATENT_DIMS[-1]:
        problem = f"a latent vector and its key have {stored} elements, more than {LATENT_DIMS[-1]}"
        get.fail("attention.kv_lora_rank", f"{problem}, which is not supported")
    fields = {"head_dim": head_dim, "rope_dim": rope_dim}
    if not is_today:
        if kv_heads != heads:
            get.fail(_KV_COUNT, f"is {kv_heads}, expected {heads}, or {LATENT_KEY} in addition")
        return {**fields, "num_kv_heads": 1}
    if kv_heads != 1:
        get.fail(_KV_COUNT, f"is {kv_heads}, expected 1 for the latent vector")
    sizes = {"attention.key_length": latent.rank + rope_dim, "attention.value_length": latent.rank}
    for key, size in sizes.items():
        if (value := get.integer(key, size)) != size:
            get.fail(key, f"is {value}, expected {size}, the latent vector's size")
    return fields


def by_layer(
    get: Fields,
    key: str,
    layers: int,
    blocks: int,
    *,
    default: Any = None,
    least: int = 1,
    most: int,
) -> tuple[int, ...]:
    """Reads an array with one integer per layer, or one integer for all layers.

    blocks: number of layers in the file; only the first `layers` are returned.
    """
    value = get.value(key, None)
    if not isinstance(value, np.ndarray):
        one = (
            get.integer(key, least=least, most=most)
            if default is None
            else get.integer(key, default, least=least, most=most)
        )
        return (one,) * layers
    counts = get.numbers(key, np.int64)
    if counts.shape != (blocks,):
        get.fail(key, f"has {counts.size} entries, expected one for each of {blocks} layers")
    wrong = counts[(counts < least) | (counts > most)]
    if wrong.size:
        get.fail(key, f"must hold integers from {least} to {most}, not {wrong[0]}")
    return tuple(counts[:layers].tolist())


def array(by_layer: tuple[int, ...] | None, of_all: int) -> Any:
    """Returns the metadata value for per-layer integers, which function `by_layer` reads back.

    by_layer: one integer per layer; None means `of_all` for all layers.
    """
    return of_all if by_layer is None else np.array(by_layer, np.int32)


def write(config: Any) -> dict[str, Any]:
    """Returns metadata of the attention fields, the inverse of `read`; keys have no prefix."""
    values: dict[str, Any] = {
        _COUNT: config.num_heads,
        _KV_COUNT: array(config.kv_heads, config.num_kv_heads),
        "rope.dimension_count": config.rope_dim,
    }
    if (latent := config.latent) is not None:
        values |= {
            "attention.key_length": latent.rank + config.rope_dim,
            "attention.value_length": latent.rank,
            LATENT_KEY: config.head_dim,
            "attention.value_length_mla": latent.value_dim,
            "attention.kv_lora_rank": latent.rank,
        }
        return values | ({"attention.q_lora_rank": latent.query_rank} if latent.query_rank else {})
    sizes = {"": (config.head_dim, config.rope_dim)}
    if config.local_head_dim is not None:
        sizes["_swa"] = config.local_head_dim, config.local_rope_dim or config.local_head_dim
    for suffix, (head_dim, rope_dim) in sizes.items():
        values |= {
            f"attention.key_length{suffix}": head_dim,
            f"attention.value_length{suffix}": head_dim,
            f"rope.dimension_count{suffix}": rope_dim,
        }
    return values
