"""Reads and writes GGUF keys that tell which layers are windowed, and which rotate heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_q4k.gguf import Fields

from ..architectures.base import MAX_LAYERS, Architecture

#: Key that overrides `Architecture.windowed`: one boolean per layer, or a period.
WINDOWED = "attention.sliding_window_pattern"
#: Key of this package that overrides `Architecture.rotated`: one boolean per layer.
ROTATED = "rope.rotated_layers"

Pattern = tuple[bool, ...]  # one entry per layer


def windowed_by_default(kind: Architecture, layers: int) -> Pattern:
    """Returns which layers of an architecture have a sliding window, if there is one."""
    return tuple(kind.windowed is not None and kind.windowed(layer) for layer in range(layers))


def rotated_by_default(kind: Architecture, windowed: Pattern) -> Pattern:
    """Returns which layers of an architecture use rope, given which layers are windowed."""
    return tuple(
        kind.rotated is None or kind.rotated(layer, local) for layer, local in enumerate(windowed)
    )


def windowed(get: Fields, kind: Architecture, layers: int, blocks: int) -> Pattern | None:
    """Returns which layers are windowed; None means that the architecture decides.

    Ignores a period in files of architectures without windows, as llama.cpp does.

    blocks: number of layers in the file, including multi-token-prediction layers at the end.
    """
    value = get.value(WINDOWED, None)
    if value is None:
        return None
    is_pattern = _is_pattern(value)
    if kind.windowed is None:
        return _pattern(get, WINDOWED, layers, blocks) if is_pattern else None
    if is_pattern:
        pattern = _pattern(get, WINDOWED, layers, blocks)
    else:  # all layers but the last, or first, of every n are windowed; 0: all are
        n = get.integer(WINDOWED, least=0, most=MAX_LAYERS)
        full = 0 if kind.full_first else n - 1
        pattern = tuple(n == 0 or i % n != full for i in range(layers))
    return None if pattern == windowed_by_default(kind, layers) else pattern


def rotated(get: Fields, layers: int, blocks: int) -> Pattern | None:
    """Returns which layers use rope; None means that the architecture decides."""
    value = get.value(ROTATED, None)
    if value is None:
        return None
    if not _is_pattern(value):
        get.fail(ROTATED, f"must be an array of booleans, not {value!r:.100}")
    return _pattern(get, ROTATED, layers, blocks)


def write(config: Any) -> dict[str, Any]:
    """Returns metadata of the patterns that differ from the architecture's; keys have no prefix."""
    windowed_layers = config.windowed_layers
    if config.kind.window and not config.window:
        windowed_layers = (False,) * config.num_layers
    patterns = {WINDOWED: windowed_layers, ROTATED: config.rotated_layers}
    return {key: np.array(pattern) for key, pattern in patterns.items() if pattern is not None}


def _is_pattern(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == bool


def _pattern(get: Fields, key: str, layers: int, blocks: int) -> Pattern:
    pattern: Pattern = tuple(get.value(key).tolist())
    if len(pattern) != blocks:
        get.fail(key, f"has {len(pattern)} entries, expected one for each of {blocks} layers")
    return pattern[:layers]
