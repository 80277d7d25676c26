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

#: Factor of linear rope scaling that leaves no rotation in float32.
NO_ROTATION = 2.0**100

Pattern = tuple[bool, ...]  # one entry per layer


def windowed_by_default(kind: Architecture, layers: int) -> Pattern:
    """Returns which layers of an architecture have a sliding window, if there is one."""
    return tuple(kind.windowed is not None and kind.windowed(layer) for layer in range(layers))


def rotated_by_default(kind: Architecture, windowed: Pattern) -> Pattern:
    """Returns which layers of an architecture use rope, given which layers are windowed."""
    return tuple(
        kind.rotated is None or kind.rotated(layer, local) for layer, local in enumerate(windowed)
    )


def without_rope_off(get: Fields) -> Fields:
    """Returns metadata without the scaling factor that turns rope off, if it has this factor."""
    if get.value("rope.scaling.factor", 1.0) != NO_ROTATION:
        return get
    values = {key: value for key, value in get.values.items() if key != "rope.scaling.factor"}
    return Fields(values, get.file, get.prefix)


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
    """Returns metadata of windows, and of patterns that differ from the architecture's.

    Keys have no prefix. If an architecture with windows has none, llama.cpp gives NaNs for a window
    of 0, and stops for a pattern without windows. The window is then the context, and if windowed
    layers rotate, a scaling factor turns their rope off.
    """
    patterns = {WINDOWED: config.windowed_layers, ROTATED: config.rotated_layers}
    found: dict[str, Any] = {
        key: np.array(pattern) for key, pattern in patterns.items() if pattern is not None
    }
    if config.window:
        found["attention.sliding_window"] = config.window
    elif config.kind.window:
        found["attention.sliding_window"] = config.context_length
        if config.kind.rotated is not None:
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": NO_ROTATION}
    return found


def is_without_windows(
    get: Fields, kind: Architecture, window: int, context: int, windowed: Pattern | None
) -> bool:
    """Returns whether metadata says, as `write` does, that no layer has a window or its rope."""
    if not kind.window:
        return False
    if windowed is not None and not any(windowed):
        return True
    rotates = kind.rotated is not None and get.value("rope.scaling.factor", 1.0) != NO_ROTATION
    return window == context and not rotates


def _is_pattern(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == bool


def _pattern(get: Fields, key: str, layers: int, blocks: int) -> Pattern:
    pattern: Pattern = tuple(get.value(key).tolist())
    if len(pattern) != blocks:
        get.fail(key, f"has {len(pattern)} entries, expected one for each of {blocks} layers")
    return pattern[:layers]
