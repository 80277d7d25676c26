"""Reads and writes rotary position parameters in GGUF metadata."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_q4k.gguf import Fields

from ..architectures.base import Architecture

MIN_DIVISOR = 1e-6  # divisors of frequencies must be above it, so that angles stay finite
MAX_CONTEXT = 1 << 28  # tokens; far above any real model

_SCALINGS = ("none", "linear", "yarn", "longrope")
#: Keys of YaRN's constants, and their defaults.
_YARN = {
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def read(get: Fields, kind: Architecture, context_length: int) -> dict[str, Any]:
    """Returns the rope fields of `Config`; raises GGUFError that names the invalid key."""
    base, local = functools.partial(get.number, above=1.0, most=1e12), kind.local_rope_theta
    theta = base("rope.freq_base", 10000.0)
    if kind.windowed and local is None and base("rope.freq_base_swa", theta) != theta:
        get.fail("rope.freq_base_swa", f"is not supported, expected rope.freq_base={theta}")
    local = theta if local == "global" else local
    scaling = get.value("rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in _SCALINGS:
        supported = ", ".join(_SCALINGS)
        get.fail("rope.scaling.type", f"{scaling!r} is not supported; supported: {supported}")
    finetuned = get.boolean("rope.scaling.finetuned", True) if kind.optional_rope else True
    key = "rope.scaling.original_context_length"
    original = get.integer(key, context_length, least=1, most=MAX_CONTEXT)
    return {
        "rope_theta": theta,
        "rope_factor": 1.0 if scaling == "none" else _factor(get),
        "rope_magnitude": _nonzero(get, "rope.scaling.attn_factor", 1.0),
        "has_rope": finetuned,
        "original_context": None if original == context_length else original,
        "local_rope_theta": None if local is None else base("rope.freq_base_swa", local),
        "yarn": _yarn(get, kind) if scaling == "yarn" else None,
        "temperature_scale": _temperature(get, kind),
    }


def write(fields: Mapping[str, Any], kind: Architecture) -> dict[str, Any]:
    """Returns metadata of the rope fields, the inverse of `read`; keys have no prefix."""
    values: dict[str, Any] = {"rope.freq_base": fields["rope_theta"]}
    yarn, factor = fields["yarn"], fields["rope_factor"]
    if factor != 1.0 or yarn is not None:
        values["rope.scaling.type"] = "linear" if yarn is None else "yarn"
        values["rope.scaling.factor"] = factor
    if yarn is not None and kind.yarn_keys:
        values |= dict(zip(_YARN, yarn, strict=True))
    if kind.optional_rope:
        values["rope.scaling.finetuned"] = fields["has_rope"]
    others = {
        "rope.scaling.attn_factor": ("rope_magnitude", 1.0),
        "rope.scaling.original_context_length": ("original_context", None),
        "rope.freq_base_swa": ("local_rope_theta", None),
        "attention.temperature_scale": ("temperature_scale", 0.0),
    }
    optional = {
        key: fields[name] for key, (name, default) in others.items() if fields[name] != default
    }
    return values | optional


def _factor(get: Fields) -> float:
    key = "rope.scaling.factor" if "rope.scaling.factor" in get else "rope.scale_linear"
    return _nonzero(get, key, 1.0)


def _nonzero(get: Fields, key: str, default: float) -> float:
    """Reads a positive number from metadata; 0 there selects the default."""
    value = get.value(key, 0.0)
    if np.ndim(value) == 0 and value == 0:
        return default
    return get.number(key, above=MIN_DIVISOR, most=1e6)


def _yarn(get: Fields, kind: Architecture) -> tuple[float, float, float]:
    """Reads YaRN's beta_fast, beta_slow and log_multiplier."""
    if not kind.yarn_keys:
        fast, slow, log_multiplier = _YARN.values()
    else:
        fast, slow, log_multiplier = (
            get.number(key, default, above=-MIN_DIVISOR if default == 0 else 0.0, most=1e6)
            for key, default in _YARN.items()
        )
    return fast, slow, log_multiplier


def _temperature(get: Fields, kind: Architecture) -> float:
    key = "attention.temperature_scale"
    if not kind.temperature:
        return 0.0
    return get.number(key, 0.0, above=-MIN_DIVISOR, most=1e3)
