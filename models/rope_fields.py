"""Rotary positions in GGUF metadata: the fields of `Config` that say how layers rotate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_q4k.gguf import Fields

from .architecture import Architecture

if TYPE_CHECKING:
    from .config import Config

MIN_DIVISOR = 1e-6  # what divides a frequency is above this, so that angles stay finite
MAX_CONTEXT = 1 << 28  # tokens: far above any real model

_SCALINGS = ("none", "linear", "yarn", "longrope")
#: Of Config -> GGUF's key.
_YARN = {
    "yarn_beta_fast": "rope.scaling.yarn_beta_fast",
    "yarn_beta_slow": "rope.scaling.yarn_beta_slow",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
}
_YARN_DEFAULTS = (32.0, 1.0, 0.0)
_ORIGINAL = "rope.scaling.original_context_length"


def read(get: Fields, kind: Architecture, context_length: int) -> dict[str, Any]:
    """The fields, of metadata under the architecture's name; GGUFError naming a key at fault."""
    base, local = functools.partial(get.number, above=1.0, most=1e12), kind.local_rope_theta
    theta = base("rope.freq_base", 10000.0)
    if kind.windowed and local is None and base("rope.freq_base_swa", theta) != theta:
        get.fail("rope.freq_base_swa", f"is not supported, expected rope.freq_base={theta}")
    local = theta if local == "global" else local
    scaling = get.value("rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in _SCALINGS:
        supported = ", ".join(_SCALINGS)
        get.fail("rope.scaling.type", f"{scaling!r} is not supported; supported are {supported}")
    finetuned = get.boolean("rope.scaling.finetuned", True) if kind.optional_rope else True
    original = get.integer(_ORIGINAL, context_length, least=1, most=MAX_CONTEXT)
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


def write(config: Config) -> dict[str, Any]:
    """Metadata that `read` turns into the fields again, by keys under the architecture's name."""
    values: dict[str, Any] = {"rope.freq_base": config.rope_theta}
    if config.rope_factor != 1.0 or config.yarn is not None:
        values["rope.scaling.type"] = "linear" if config.yarn is None else "yarn"
        values["rope.scaling.factor"] = config.rope_factor
    if config.rope_magnitude != 1.0:
        values["rope.scaling.attn_factor"] = config.rope_magnitude
    if config.original_context is not None:
        values[_ORIGINAL] = config.original_context
    if config.yarn is not None and config.kind.yarn_keys:
        values |= dict(zip(_YARN.values(), config.yarn, strict=True))
    if config.local_rope_theta is not None:
        values["rope.freq_base_swa"] = config.local_rope_theta
    if config.kind.optional_rope:
        values["rope.scaling.finetuned"] = config.has_rope
    if config.temperature_scale:
        values["attention.temperature_scale"] = config.temperature_scale
    return values


def _factor(get: Fields) -> float:
    key = "rope.scaling.factor" if "rope.scaling.factor" in get else "rope.scale_linear"
    return _nonzero(get, key, 1.0)


def _nonzero(get: Fields, key: str, default: float) -> float:
    """A positive number; 0 stands for the default."""
    value = get.value(key, 0.0)
    if np.ndim(value) == 0 and value == 0:
        return default
    return get.number(key, above=MIN_DIVISOR, most=1e6)


def _yarn(get: Fields, kind: Architecture) -> tuple[float, float, float]:
    """YaRN's betas and log multiplier."""
    if not kind.yarn_keys:
        return _YARN_DEFAULTS
    fast, slow, log_multiplier = (
        get.number(key, default, above=least, most=1e6)
        for key, default, least in zip(
            _YARN.values(), _YARN_DEFAULTS, (0.0, 0.0, -MIN_DIVISOR), strict=True
        )
    )
    return fast, slow, log_multiplier


def _temperature(get: Fields, kind: Architecture) -> float:
    key = "attention.temperature_scale"
    if not kind.temperature:
        return 0.0
    return get.number(key, 0.0, above=-MIN_DIVISOR, most=1e3)
