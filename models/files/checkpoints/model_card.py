"""Metadata that names a checkpoint: title, size, licence, base models, tags and languages.

llama.cpp's convert_hf_to_gguf writes the same, by the same library: from the front matter of
README.md, config.json and the folder's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.metadata import Metadata

from ...support.warn import warn
from .config_json import MAX_CONFIG


def metadata(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Returns GGUF metadata `general.*`; warns of a model card that cannot be read.

    config: values of config.json. shapes: GGUF name of each tensor -> shape.
    """
    # A folder's name need not be Unicode.
    name = folder.resolve().name.encode(errors="replace").decode() or "model"
    size = _size(shapes)
    try:
        return _described(_card(folder), config, name, size)
    except Exception as error:  # the library does not check the types of a card's values
        warn(f"{folder / 'README.md'}: its front matter is ignored: {str(error)[:200]}")
        return _described({}, {}, name, size)


def _card(folder: Path) -> dict[str, Any]:
    card = folder / "README.md"
    if not card.is_file():
        return {}
    if card.stat().st_size > MAX_CONFIG:
        raise ValueError(f"the file has more than {MAX_CONFIG} bytes")
    return Metadata.load_model_card(folder)


def _described(
    card: dict[str, Any], config: Mapping[str, Any], name: str, size: tuple[int, int, int, int]
) -> dict[str, Any]:
    said = config.get("_name_or_path")
    parameters = {"_name_or_path": said} if isinstance(said, str) else {}
    described = Metadata.apply_metadata_heuristic(
        Metadata(), card, parameters, Path(name), total_params=size[0]
    )
    described.name = described.name or name
    described.size_label = described.size_label or gguf.size_label(*size)
    writer = gguf.GGUFWriter(None, "")
    described.set_gguf_meta_model(writer)
    found = {key: entry.value for key, entry in writer.kv_data[0].items()}
    return {"general.type": "model"} | {
        key: _checked(key, value)
        for key, value in found.items()
        if key.startswith("general.") and key != "general.architecture"
    }


def _checked(key: str, value: Any) -> Any:
    """Returns a value as GGUF files hold it; raises ValueError if it is no text or count."""
    if isinstance(value, list):
        return [_checked(key, one) for one in value]
    if key.endswith(".count") and isinstance(value, int):
        return np.uint32(value)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r:.100}, which is no text")
    return str(value).encode(errors="replace").decode()


def _size(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int, int]:
    """Returns the number of weights: all, besides experts, of one expert; and the experts."""
    stacks = [shape for name, shape in shapes.items() if "_exps." in name and len(shape) > 1]
    total = sum(map(math.prod, shapes.values()))
    of_experts = sum(map(math.prod, stacks))
    of_one = sum(math.prod(shape[1:]) for shape in stacks)
    experts = sum(shape[0] for shape in stacks) // len(stacks) if stacks else 0
    return total, total - of_experts, of_one, experts
