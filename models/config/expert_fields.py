"""Reads and writes the number, sizes and routing of experts in GGUF metadata."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax_q4k.gguf import REQUIRED, Fields

from ..architectures.base import GROUP_BEST, MAX_LAYERS, Architecture, Routing

MAX_EXPERTS = 1024  # per layer; far above any real model

_GATINGS = {1: "softmax", 2: "sigmoid"}  # llama.cpp's numbers
_COUNT, _USED, _SIZE = "expert_count", "expert_used_count", "expert_feed_forward_length"
_SHARED_SIZE, _SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
_DENSE, _GATING = "leading_dense_block_count", "expert_gating_func"
_NORMALIZE, _SCALE = "expert_weights_norm", "expert_weights_scale"
_INTERVAL = "moe_every_n_layers"
_GROUPS, _GROUPS_USED = "expert_group_count", "expert_group_used_count"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Number and sizes of an MoE layer's experts, and their routing; see `jax_q4k.route`.

    Attributes:
      count, used: number of experts per layer, and per token.
      size: inner size of each expert. shared_size: inner size of the shared expert; 0: none.
      dense_layers: number of leading layers without experts.
      interval: n, if only layers i with i % n == 1 have experts; 0: all other layers.
      gating, normalize, scale, groups, groups_used, group_best: arguments of `jax_q4k.route`.
    """

    count: int
    used: int
    size: int
    shared_size: int = 0
    dense_layers: int = 0
    interval: int = 0
    gating: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2


def read(
    get: Fields,
    file: Fields,
    kind: Architecture,
    layers: int,
    vocab_size: int,
    max_size: int,
    inner: int,
) -> Experts | None:
    """Reads experts from the architecture's metadata; None means that every layer is dense.

    get, file: metadata with and without the architecture's prefix. max_size: largest accepted size.
    inner: inner size of a dense layer. Raises GGUFError that names the invalid key.
    """
    integer = functools.partial(get.integer, repeated=True)
    if not kind.experts:
        if (count := integer(_COUNT, 0)) != 0:
            get.fail(_COUNT, f"{count} is not supported")
        return None
    count = (
        integer(_COUNT, 0, least=0, most=MAX_EXPERTS)
        if kind.mlp
        else integer(_COUNT, least=1, most=MAX_EXPERTS)
    )
    if not count:
        return None
    interval = integer(_INTERVAL, least=2, most=MAX_LAYERS) if kind.interleaved_experts else 0
    size = integer(_SIZE, inner if kind.mlp else REQUIRED, least=1, most=max_size)
    shared = integer(_SHARED_SIZE, 0, least=0, most=max_size)
    if not shared:
        shared = size * integer(_SHARED_COUNT, 0, least=0, most=max_size // size)
    used = integer(_USED, least=1, most=count)
    return Experts(
        count=count,
        used=used,
        size=size,
        shared_size=shared,
        dense_layers=integer(_DENSE, 0, least=0, most=layers),
        interval=interval,
        group_best=file.integer(GROUP_BEST, 2, least=1, most=2),
        **_routing(get, kind.routing, count, used, kind.routing.default_gating(layers, vocab_size)),
    )


def _routing(
    get: Fields, routing: Routing, count: int, experts_used: int, default_gating: str
) -> dict[str, Any]:
    gating: str | None = routing.gating
    if gating is None:
        default = next(n for n, name in _GATINGS.items() if name == default_gating)
        number = get.integer(_GATING, default, least=0, most=255) or default
        if number not in _GATINGS:
            known = ", ".join(f"{n} ({name})" for n, name in _GATINGS.items())
            get.fail(_GATING, f"{number} is not supported; supported: {known}")
        gating = _GATINGS[number]
    scale = get.number(_SCALE, 0.0, above=-1e-6, most=1e6)
    groups = get.integer(_GROUPS, 0, least=0, most=count) or 1
    if count % groups:
        get.fail(_GROUPS, f"{groups} must divide {_COUNT}={count}")
    used = get.integer(_GROUPS_USED, 0, least=0, most=groups) or groups
    if (limit := count // groups * used) < experts_used:
        get.fail(_USED, f"{experts_used} is above {limit}, the experts of {_GROUPS_USED}={used}")
    return {
        "gating": gating,
        "normalize": get.boolean(_NORMALIZE, routing.normalize),
        "scale": scale if scale > 0 else 1.0,
        "groups": groups,
        "groups_used": used,
    }


def write(experts: Experts | None, kind: Architecture) -> dict[str, Any]:
    """Returns metadata of the experts, the inverse of `read`; keys have no prefix."""
    if experts is None:
        return {}
    values: dict[str, Any] = {_COUNT: experts.count, _USED: experts.used, _SIZE: experts.size}
    others = {
        _SHARED_SIZE: (experts.shared_size, 0),
        _DENSE: (experts.dense_layers, 0),
        _INTERVAL: (experts.interval, 0),
        _SCALE: (experts.scale, 1.0),
        _GROUPS: (experts.groups, 1),
        _GROUPS_USED: (experts.groups_used, experts.groups),
        _NORMALIZE: (experts.normalize, kind.routing.normalize),
    }
    values |= {key: value for key, (value, default) in others.items() if value != default}
    if kind.routing.gating is None:
        values[_GATING] = {name: number for number, name in _GATINGS.items()}[experts.gating]
    return values


def own_keys(experts: Experts | None) -> dict[str, Any]:
    """Returns metadata of the experts with this package's keys, which `read` reads as well."""
    if experts is None or experts.group_best == Experts.group_best:
        return {}
    return {GROUP_BEST: experts.group_best}
