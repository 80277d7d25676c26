"""Reads the LoRA adapters of tasks that jina-embeddings-v3's publisher stores beside the weights.

lora_A and lora_B have the adapters of all tasks: (tasks, rank, k) and (tasks, n, rank) of a matrix,
whose weights become W + alpha / rank * B A; (tasks, rows, rank) and (tasks, rank, n) of a table,
which becomes W + alpha / rank * A B (`LoRAParametrization` in the publisher's modeling_lora.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ...config.tensors import Expected
from ...runner.adapters import MAX_REACH, MAX_SCALE, Pair
from ...support.json_fields import JSONFields
from .config_json import MAX_CONFIG
from .packed.weights import DecodedWeights
from .safetensors import TYPES
from .tensor_locations import Location

_WEIGHT = ".parametrizations.weight."
_PROMPTS = "config_sentence_transformers.json"


class Settings(NamedTuple):
    """Settings of a folder's adapters: each task's prompt, by name, in their order; and alpha."""

    prompts: Mapping[str, str]
    alpha: float


def settings(folder: Path, fields: JSONFields) -> Settings:
    """Reads the tasks in config.json, without any if it names none.

    Prompts are config.json's `task_instructions`, or `prompts` of sentence-transformers' file.
    Raises CheckpointError for a malformed field.
    """
    names = fields.array("lora_adaptations", None) or []
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name or name in names[:i]:
            fields.fail("lora_adaptations", f"holds {name!r:.100}, expected different names")
    prompts = fields.object("task_instructions")
    if prompts is None and names and (folder / _PROMPTS).exists():
        prompts = JSONFields.read(folder / _PROMPTS, MAX_CONFIG).object("prompts")
    found = {name: prompts.string(name, "") if prompts else "" for name in names}
    alpha = fields.number("lora_alpha", 1.0, most=MAX_SCALE, above=-MAX_SCALE) if names else 1.0
    return Settings(found, alpha)


def read(
    weights: DecodedWeights,
    locations: Mapping[str, Location],
    expected: Mapping[str, Expected],
    settings: Settings,
) -> dict[str, dict[str, np.ndarray]]:
    """Reads all adapters: GGUF name -> a (tasks, rank, k), b (tasks, n, rank) and scale (tasks,).

    A table (rows, n) has a (tasks, rank, rows) and b (tasks, n, rank).
    Raises CheckpointError for an adapter of a wrong shape, or so large that embeddings may be NaN;
    and if tasks are named but there is no adapter.
    """
    count = len(settings.prompts)
    if not count:
        return {}
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, location in locations.items():
        stored = location.names[0]
        adapter = f"{stored.removesuffix('original')}0.lora_"
        names = f"{adapter}A", f"{adapter}B"
        if not stored.endswith(f"{_WEIGHT}original") or not any(n in weights.stored for n in names):
            continue
        for one in names:
            if one not in weights.stored:
                weights.fail(stored, f"has only one of lora_A and lora_B: {one!r} is missing")
            if (dtype := weights.stored[one].dtype) not in TYPES:
                known = ", ".join(TYPES)
                weights.fail(one, f"has dtype {dtype}, which is not supported; supported: {known}")
        first, second = (weights.stored[one].shape for one in names)
        is_table = expected[name].entry.table
        rank = (*first, *[0] * 3)[2 if is_table else 1]
        n, k = location.shape[::-1] if is_table else location.shape
        for one, shape, want in (
            (names[0], first, (count, k, rank) if is_table else (count, rank, k)),
            (names[1], second, (count, rank, n) if is_table else (count, n, rank)),
        ):
            if shape != want or not rank:
                weights.fail(one, f"has shape {shape}, expected {_shown(want)}")
        a, b = (weights.read(one).astype(np.float32) for one in names)
        a, b = (a.swapaxes(1, 2), b.swapaxes(1, 2)) if is_table else (a, b[:, location.rows])
        for task in range(count):
            _check_reach(weights, Pair(a[task], b[task], settings.alpha / rank, names))
        scale = np.full(count, settings.alpha / rank, np.float32)
        found[name] = {"a": a, "b": b, "scale": scale}
    if not found:
        _fail_without(weights, settings)
    return found


def _shown(shape: tuple[int, ...]) -> str:
    return str(tuple(size or "rank" for size in shape)).replace("'", "")


def _check_reach(weights: DecodedWeights, pair: Pair) -> None:
    if not max(pair.reach) <= MAX_REACH:
        weights.fail(pair.names[1], "is so large that embeddings may be NaN with the adapter")


def _fail_without(weights: DecodedWeights, settings: Settings) -> NoReturn:
    name: Any = next(iter(weights.stored))
    tasks = ", ".join(settings.prompts)
    weights.fail(name, f"and the others have no lora_A, but config.json names tasks: {tasks:.200}")
