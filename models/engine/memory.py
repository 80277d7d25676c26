"""Computes how many prompts fit into memory at a time, and splits prompts into batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_q4k import control_groups

from ..config import Config
from ..kv_cache import PagedCache
from ..runner.model import Model

#: Maximum prompts per batch; larger batches are not faster.
MAX_ROWS = 256

#: Fraction of the free memory that a batch may use.
SHARE = 0.5

#: Files with the limit and the bytes in use of a control group, and the prefix of the sizes in
#: `memory.stat` that include its children, in both versions.
_LIMITS = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)

#: More bytes than any machine has.
_UNKNOWN = 2**61


def rows_at_once(model: Model, prompts: int, longest: int, capacity: int, cache_dtype: Any) -> int:
    """Returns how many of the prompts can run in one batch.

    longest: tokens of the longest prompt. capacity: KV cache capacity per prompt, in tokens.
    """
    if prompts == 1:
        return 1
    if model.spans_processes:  # all processes must agree
        return min(prompts, MAX_ROWS)
    free = free_bytes(model)
    if free is None:
        return min(prompts, MAX_ROWS)
    fitting = int(SHARE * free) // _row_bytes(model, longest, capacity, cache_dtype)
    return max(1, min(prompts, MAX_ROWS, fitting))


def _row_bytes(model: Model, longest: int, capacity: int, cache_dtype: Any) -> int:
    """Estimates the memory of one prompt in bytes: its KV cache, hidden states and logits."""
    config = model.config
    inner = max(config.inner_size_of(layer) for layer in range(config.num_layers))
    # Several hidden states are live at a time, and sampling holds several copies of logits.
    of_token = 8 * config.hidden_size + 4 * inner
    held = cache_bytes(config, capacity, cache_dtype)
    return held + 4 * (model.padded_length(longest) * of_token + 6 * config.vocab_size)


@functools.lru_cache(maxsize=64)
def cache_bytes(config: Config, capacity: int, cache_dtype: Any) -> int:
    """Returns the size of one sequence's KV cache in bytes."""
    cache = PagedCache.shapes(config, 1, capacity, dtype=cache_dtype, ahead=1)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def free_bytes(model: Model) -> int | None:
    """Returns the free bytes of the model's GPU, or of the machine; None if unknown.

    Processes that share the model's devices must call it together; the smallest number is that of
    all.
    """
    devices = model.weights[0].devices()
    own = [device for device in devices if device.process_index == jax.process_index()]
    found = free_bytes_of(own)
    if not model.spans_processes:
        return found
    least = _least_of_all(_UNKNOWN if found is None else found)
    return None if least == _UNKNOWN else least


def _least_of_all(value: int) -> int:
    """Returns the smallest of the processes' values, each at most _UNKNOWN."""
    words = np.array([value >> 31, value & 0x7FFFFFFF], np.int32)
    found = multihost_utils.process_allgather(words).astype(np.int64)
    return int(((found[:, 0] << 31) + found[:, 1]).min())


def free_bytes_of(devices: Iterable[jax.Device]) -> int | None:
    """Returns the free bytes of the GPU with the fewest, or of the machine; None if unknown."""
    stats = [device.memory_stats() for device in devices]
    free = [s["bytes_limit"] - s["bytes_in_use"] for s in stats if s and "bytes_limit" in s]
    if free:
        return min(free)
    found = [size for size in (_available(), *map(_in_group, _groups())) if size is not None]
    return min(found, default=None)


def _available() -> int | None:
    """Returns MemAvailable of /proc/meminfo in bytes; None if it cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _groups(root: Path = Path("/")) -> Iterator[Path]:
    """Yields the folders of control groups whose memory limits apply to this process."""
    return control_groups.folders("memory", root)


def _in_group(folder: Path) -> int | None:
    """Returns the free bytes under a control group's limit; None if it has no limit."""
    for most, current, prefix in _LIMITS:
        limit, used = (control_groups.text_of(folder / name) for name in (most, current))
        with contextlib.suppress(ValueError):  # "max": no limit
            return max(int(limit) - max(int(used) - _cached(folder, prefix), 0), 0)
    return None


def _cached(folder: Path, prefix: str) -> int:
    """Returns the bytes of cached files in a control group, which count as used and can go."""
    lines = map(str.split, control_groups.text_of(folder / "memory.stat").splitlines())
    sizes = {line[0]: line[1] for line in lines if len(line) == 2 and line[1].isdecimal()}
    return sum(int(sizes.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
