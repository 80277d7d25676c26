"""Recipes: the type of each tensor of a quantized model, as llama.cpp's `llama_tensor_get_type`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from gguf.constants import LlamaFileType

from jax_q4k import formats

from ..config import Config


def _outer_and_every_third(layer: int, layers: int) -> bool:
    """True for layers that lose most: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A type for most matrices and better ones for some.

    better: part of a layer -> (its type, a function that is true for (layer, number of layers)).
    """

    file_type: LlamaFileType
    type: str
    better: Mapping[str, tuple[str, Callable[[int, int], bool]]] = dataclasses.field(
        default_factory=dict
    )


_K_M = {part: ("Q6_K", _outer_and_every_third) for part in ("attn_v", "ffn_down")}
_Q4_K_S = {
    "attn_v": ("Q5_K", lambda layer, layers: layer < 4),
    "ffn_down": ("Q5_K", lambda layer, layers: layer < layers // 8),
}

RECIPES = {
    "Q4_K_M": Recipe(LlamaFileType.MOSTLY_Q4_K_M, "Q4_K", _K_M),
    "Q4_K_S": Recipe(LlamaFileType.MOSTLY_Q4_K_S, "Q4_K", _Q4_K_S),
    "Q5_K_M": Recipe(LlamaFileType.MOSTLY_Q5_K_M, "Q5_K", _K_M),
    "Q5_K_S": Recipe(LlamaFileType.MOSTLY_Q5_K_S, "Q5_K"),
    "Q6_K": Recipe(LlamaFileType.MOSTLY_Q6_K, "Q6_K"),
    "Q8_0": Recipe(LlamaFileType.MOSTLY_Q8_0, "Q8_0"),
}

_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where a row is no multiple of 256
_LAST_RESORT = "F16"  # where it is no multiple of 32 either


def get(name: str) -> Recipe:
    """The recipe of that name; ValueError listing the known ones otherwise."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"type={name!r} must be one of {', '.join(RECIPES)}")
    return RECIPES[name]


def tensor_types(
    recipe: Recipe, config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Tensor name -> ggml's type name; vectors (norms, biases) are F32.

    shapes: row-major, of tensors that fit `config`.
    """
    tied = "output.weight" not in shapes
    types = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            types[name] = "F32"
        elif name == "output.weight" or (tied and name == "token_embd.weight"):
            types[name] = _fitting("Q8_0" if recipe.type == "Q8_0" else "Q6_K", shape)
        else:
            types[name] = _fitting(_matrix_type(recipe, config, name), shape)
    return types


def _matrix_type(recipe: Recipe, config: Config, name: str) -> str:
    _, layer, part, *_ = (*name.split("."), "", "")
    kind, chosen = recipe.better.get(part, (recipe.type, None))
    if chosen is not None and not chosen(int(layer), config.num_layers):
        kind = recipe.type
    if part == "attn_v" and kind == "Q4_K" and _is_70b(config):
        return "Q5_K"  # eight query heads share it, so it is small and matters
    return kind


def _is_70b(config: Config) -> bool:
    """True for models that llama.cpp counts as of 70B, by their layers."""
    grouped = config.num_heads != config.num_kv_heads
    return config.num_layers == 80 and (
        config.architecture == "qwen2" or (config.architecture == "llama" and grouped)
    )


def _fits(kind: str, shape: tuple[int, ...]) -> bool:
    return shape[-1] % formats.get(kind).block_size == 0


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    if not _fits(kind, shape):
        kind = _FALLBACKS.get(kind, kind)
    return kind if _fits(kind, shape) else _LAST_RESORT
