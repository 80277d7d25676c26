"""Chooses each tensor's quantization type by recipe, as llama.cpp's `llama_tensor_get_type` does.

Types depend on tensor names, shapes and a few dimensions of the model, not on the architecture.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from ptx_kernels import formats


class Dimensions(Protocol):
    """Protocol with the dimensions that recipes need, such as a Config."""

    @property
    def architecture(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def kv_heads(self) -> tuple[int, ...] | None: ...


class RuleInput(NamedTuple):
    """Input of a rule: a tensor's index among tensors of its kind, and properties of the model."""

    number: int
    total: int  # number of layers, or of attn_v matrices
    heads_per_kv_head: int
    importance: bool  # whether there is an importance matrix


Rule = tuple[str, Callable[[RuleInput], bool]]  # a type, and whether a tensor gets it


def _always(_: RuleInput) -> bool:
    return True


def _outer_and_every_third(tensor: RuleInput) -> bool:
    """Returns whether a layer counts as sensitive to quantization.

    Sensitive are the first and the last eighth of the layers, and every third in between.
    """
    layer, layers = tensor.number, tensor.total
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _first(layers: int) -> Callable[[RuleInput], bool]:
    return lambda tensor: tensor.number < layers


def _first_of(parts: int) -> Callable[[RuleInput], bool]:
    """Returns a condition that is true for the layers in the first 1 / `parts` of all layers."""
    return lambda tensor: tensor.number < tensor.total // parts


def _grouped(tensor: RuleInput) -> bool:
    """Returns whether at least four query heads share a value head.

    The matrix of values is then small, and sensitive to quantization.
    """
    return tensor.heads_per_kv_head >= 4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Quantization recipe: a ggml type for most matrices, and rules for the others.

    Attributes:
      rules: kind of matrix, such as attn_v -> (type, condition) pairs; the first pair whose
        condition is true applies.
      experts: type of stacks of experts' matrices; None means the same as other matrices.
      output_of_8: type of attn_output in models with eight experts; None means `type`.
    """

    type: str
    rules: Mapping[str, tuple[Rule, ...]] = dataclasses.field(default_factory=dict)
    experts: str | None = None
    output_of_8: str | None = None


_K_M = {part: (("Q6_K", _outer_and_every_third),) for part in ("attn_v", "ffn_down")}
_Q2_K = {
    "attn_v": (("Q4_K", _grouped), ("Q3_K", _always)),
    "ffn_down": (("Q3_K", _always),),
    "attn_output": (("Q3_K", _always),),
}
_Q3_K_M = {
    "attn_v": (("Q5_K", _first(2)), ("Q4_K", _always)),
    "ffn_down": (("Q5_K", _first_of(16)), ("Q4_K", _always)),
    "attn_output": (("Q4_K", _always),),
}
_Q3_K_L = {part: (("Q5_K", _always),) for part in ("attn_v", "ffn_down", "attn_output")}
_Q4_K_S = {"attn_v": (("Q5_K", _first(4)),), "ffn_down": (("Q5_K", _first_of(8)),)}
_IQ4 = {
    "attn_v": (("Q5_K", _grouped),),
    "ffn_down": (("Q5_K", lambda tensor: not tensor.importance and _first_of(8)(tensor)),),
}

RECIPES = {
    "Q2_K": Recipe("Q2_K", _Q2_K, output_of_8="Q5_K"),
    "Q3_K_S": Recipe("Q3_K", output_of_8="Q5_K"),
    "Q3_K_M": Recipe("Q3_K", _Q3_K_M, output_of_8="Q5_K"),
    "Q3_K_L": Recipe("Q3_K", _Q3_K_L),
    "IQ4_XS": Recipe("IQ4_XS", _IQ4, output_of_8="Q5_K"),
    "IQ4_NL": Recipe("IQ4_NL", _IQ4, output_of_8="Q5_K"),
    "MXFP4_MOE": Recipe("Q8_0", experts="MXFP4"),
    "Q4_K_M": Recipe("Q4_K", _K_M, output_of_8="Q5_K"),
    "Q4_K_S": Recipe("Q4_K", _Q4_K_S, output_of_8="Q5_K"),
    "Q5_K_M": Recipe("Q5_K", _K_M),
    "Q5_K_S": Recipe("Q5_K"),
    "Q6_K": Recipe("Q6_K"),
    "Q8_0": Recipe("Q8_0"),
    "F16": Recipe("F16"),
    "BF16": Recipe("BF16"),
    "F32": Recipe("F32"),
}

_FLOAT_TYPES = ("F32", "F16", "BF16")
#: Fallback types for rows whose length is not a multiple of 256.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FALLBACKS |= {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL"}
_LAST_RESORT = "F16"  # for lengths that are not a multiple of 32 either

#: Substring of a tensor name -> part; the first match applies. Names of experts have suffixes.
_PARTS = {
    "attn_qkv.weight": "attn_v",
    "attn_kv_b.weight": "attn_v",
    "attn_v.weight": "attn_v",
    "attn_k.weight": "attn_k",
    "attn_output.weight": "attn_output",
    "ffn_down": "ffn_down",
}
#: Substrings of the names of matrices that are not quantized.
_FLOATS: tuple[str, ...] = ("_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "ssm_conv1d")
_FLOATS += ("shortconv.conv.weight", "per_layer_model_proj")
_STORED_AS_BF16 = "per_layer_model_proj"  # as in llama.cpp's converter; others become F32


def get(name: str) -> Recipe:
    """Returns the recipe of that name; raises ValueError that lists the known ones."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"type={name!r} must be one of {', '.join(RECIPES)}")
    return RECIPES[name]


def file_type(name: str) -> int:
    """Returns `general.file_type` of files that a recipe makes."""
    from gguf.constants import LlamaFileType  # takes 0.1 s, which recipes' names need not

    return LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"]


def is_unquantized(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether no recipe quantizes a tensor: norms, biases, routers, short convolutions."""
    return len(shape) == 1 or not name.endswith("weight") or any(p in name for p in _FLOATS)


def tensor_types(
    recipe: Recipe,
    model: Dimensions,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    importance: bool = False,
) -> dict[str, str]:
    """Like `wanted_types`, but with fallback types if k is not a multiple of the block size."""
    return fitting_types(wanted_types(recipe, model, shapes, importance=importance), shapes)


def fitting_types(
    wanted: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Replaces types whose block size does not divide k by their fallback types."""
    return {name: _fitting(kind, shapes[name]) for name, kind in wanted.items()}


def wanted_types(
    recipe: Recipe,
    model: Dimensions,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    importance: bool = False,
    chosen: Callable[[str], str | None] = lambda name: None,
) -> dict[str, str]:
    """Returns tensor name -> ggml type name by the recipe, whether or not k fits the block size.

    Unquantized tensors get F32, one kind of them BF16.

    Args:
      shapes: row-major shapes of all tensors of a model.
      importance: whether there is an importance matrix, with which smaller types suffice.
      chosen: maps the name of a tensor that can be quantized to a type instead of the recipe's. As
        in llama.cpp, such tensors do not count in rules for the first layers.
    """
    tied = "output.weight" not in shapes
    experts = max((s[0] for name, s in shapes.items() if "_exps." in name), default=0)
    quantized = sorted((n for n, s in shapes.items() if not is_unquantized(n, s)), key=_in_order)
    parts = {name: _part(name) for name in quantized}
    totals = {"attn_v": list(parts.values()).count("attn_v")}
    kv_heads = model.num_kv_heads if model.kv_heads is None else model.kv_heads[0]
    groups = model.num_heads // kv_heads if kv_heads else 0  # of the first layer, as in llama.cpp
    seen: dict[str, int] = {}
    types = {name: "BF16" if _STORED_AS_BF16 in name else "F32" for name in shapes}
    for name in quantized:
        if (kind := chosen(name)) is not None:
            types[name] = kind
            continue
        part, shape = parts[name], shapes[name]
        number = seen.get(part, 0)
        seen[part] = number + 1
        if experts > 1 and part == "ffn_down":
            number = _in_order(name)[0]
        tensor = RuleInput(number, totals.get(part, model.num_layers), groups, importance)
        if recipe.type in _FLOAT_TYPES:
            kind = recipe.type
        elif name == "output.weight" or (tied and name.endswith("token_embd.weight")):
            kind = "Q8_0" if recipe.type == "Q8_0" else "Q6_K"
        elif recipe.experts and len(shape) == 3:
            kind = recipe.experts
        elif recipe.experts:
            kind = recipe.type
        else:
            kind = _matrix_type(recipe, model, part, tensor, experts)
        types[name] = kind
    return types


def _in_order(name: str) -> tuple[int, str]:
    """Returns a sort key that orders layers by number."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1, name


def _part(name: str) -> str:
    return next((part for piece, part in _PARTS.items() if piece in name), "")


def _matrix_type(recipe: Recipe, model: Dimensions, part: str, at: RuleInput, experts: int) -> str:
    if experts == 8 and part in ("attn_v", "attn_k"):
        return "Q8_0"  # small compared with the experts
    if experts == 8 and part == "attn_output":
        return recipe.output_of_8 or recipe.type
    rules = recipe.rules.get(part, ())
    kind = next((kind for kind, holds in rules if holds(at)), recipe.type)
    if part == "attn_v" and kind in ("Q3_K", "Q4_K") and _is_70b(model):
        return "Q5_K"  # shared by eight query heads, so it is small and sensitive
    return kind


def _is_70b(model: Dimensions) -> bool:
    """Returns whether llama.cpp counts a model as 70B, by its number of layers."""
    grouped = model.num_heads != model.num_kv_heads
    return model.num_layers == 80 and (
        model.architecture == "qwen2" or (model.architecture == "llama" and grouped)
    )


def _fits(kind: str, shape: tuple[int, ...]) -> bool:
    return kind in _FLOAT_TYPES or shape[-1] % formats.get(kind).block_size == 0


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    if not _fits(kind, shape):
        kind = _FALLBACKS.get(kind, kind)
    return kind if _fits(kind, shape) else _LAST_RESORT
