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
    """Input of a rule: a tensor's place among tensors of its kind, and properties of the model."""

    number: int  # index among tensors of its kind
    layer: int  # the layer of feed-forward matrices in models with experts; otherwise `number`
    total: int  # number of layers, or of attn_v matrices
    heads_per_kv_head: int
    experts: int
    importance: bool  # whether there is an importance matrix


Rule = tuple[str, Callable[[RuleInput], bool]]  # a type, and whether a tensor gets it


def _always(_: RuleInput) -> bool:
    return True


def _outer_and_every_third(tensor: RuleInput) -> bool:
    """Returns whether a layer counts as sensitive to quantization.

    Sensitive are the first and the last eighth of the layers, and every third in between.
    """
    layer, layers = tensor.layer, tensor.total
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _first(layers: int) -> Callable[[RuleInput], bool]:
    return lambda tensor: tensor.layer < layers


def _first_of(parts: int) -> Callable[[RuleInput], bool]:
    """Returns a condition that is true for the layers in the first 1 / `parts` of all layers."""
    return lambda tensor: tensor.layer < tensor.total // parts


def _first_eighth_by_number(tensor: RuleInput) -> bool:
    return tensor.number < tensor.total // 8


def _middle(tensor: RuleInput) -> bool:
    """Returns whether a layer is neither in the first nor in the last eighth."""
    return tensor.total // 8 <= tensor.layer < 7 * tensor.total // 8


def _grouped(tensor: RuleInput) -> bool:
    """Returns whether at least four query heads share a value head.

    The matrix of values is then small, and sensitive to quantization.
    """
    return tensor.heads_per_kv_head >= 4


def _grouped_or_experts(tensor: RuleInput) -> bool:
    return _grouped(tensor) or tensor.experts >= 4


def _without_importance(tensor: RuleInput) -> bool:
    return not tensor.importance


_Q8_OF_8 = {"attn_v": "Q8_0", "attn_k": "Q8_0"}  # small compared with the experts
_Q5_OF_8 = _Q8_OF_8 | {"attn_output": "Q5_K"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Quantization recipe: a ggml type for most matrices, and rules for the others.

    Attributes:
      rules: kind of matrix, such as attn_v -> (type, condition) pairs; the first pair whose
        condition is true applies.
      experts: type of stacks of experts' matrices; None means the same as other matrices.
      of_8_experts: kind of matrix -> type in models with eight experts, before all rules.
      embedding: type of embeddings that do not serve as output matrix; None means `type`.
      output: type of the output matrix.
      better_70b: whether 70B models have attn_v matrices of at least Q5_K.
    """

    type: str
    rules: Mapping[str, tuple[Rule, ...]] = dataclasses.field(default_factory=dict)
    experts: str | None = None
    of_8_experts: Mapping[str, str] = dataclasses.field(default_factory=lambda: _Q8_OF_8)
    embedding: str | None = None
    output: str = "Q6_K"
    better_70b: bool = True


_K_M = {part: (("Q6_K", _outer_and_every_third),) for part in ("attn_v", "ffn_down")}
_Q2_K = {
    "attn_v": (("Q4_K", _grouped), ("Q3_K", _always)),
    "ffn_down": (("Q3_K", _always),),
    "attn_output": (("Q3_K", _always),),
}
_Q2_K_S = {"attn_v": (("Q4_K", _grouped),), "ffn_down": (("Q4_K", _first_of(8)),)}
_Q3_K_M = {
    "attn_v": (("Q5_K", _first(2)), ("Q4_K", _always)),
    "ffn_down": (("Q5_K", _first_of(16)), ("Q4_K", _always)),
    "attn_output": (("Q4_K", _always),),
}
_Q3_K_L = {part: (("Q5_K", _always),) for part in ("attn_v", "ffn_down", "attn_output")}
_Q4_K_S = {"attn_v": (("Q5_K", _first(4)),), "ffn_down": (("Q5_K", _first_of(8)),)}
_IQ3_XXS = {
    "attn_v": (("Q4_K", _grouped), ("IQ3_S", _without_importance)),
    "attn_q": (("IQ2_S", _always),),
    "attn_k": (("IQ2_S", _always),),
    "ffn_down": (
        ("Q4_K", lambda tensor: not tensor.importance and _first_of(8)(tensor)),
        ("Q3_K", _without_importance),
    ),
    "attn_output": (("IQ3_S", _always),),
}
_IQ3_XS = {
    "attn_v": (("Q4_K", _grouped),),
    "attn_q": (("IQ3_XXS", _always),),
    "attn_k": (("IQ3_XXS", _always),),
    "ffn_gate": (("IQ3_XXS", _middle),),
    "ffn_up": (("IQ3_XXS", _middle),),
}
_IQ3_M = {
    "attn_v": (("Q4_K", _always),),
    "ffn_down": (
        ("Q4_K", _first_of(8)),
        ("Q4_K", lambda tensor: tensor.experts == 8 and _outer_and_every_third(tensor)),
    ),
    "attn_output": (("Q4_K", _always),),
}


def _two_bits(type: str, larger: str, embedding: str, attn_output: str | None = None) -> Recipe:
    """Returns a recipe of IQ1 or IQ2: `larger` is the type of sensitive matrices."""
    rules: dict[str, tuple[Rule, ...]] = {
        "attn_v": (("Q4_K", _grouped_or_experts), (larger, _always)),
        "ffn_down": ((larger, _first_eighth_by_number),),
    }
    if attn_output:
        rules["attn_output"] = ((attn_output, _always),)
    return Recipe(
        type,
        rules,
        of_8_experts={"attn_k": "Q4_K", "attn_output": "Q5_K"},
        embedding=embedding,
        output="Q5_K",
        better_70b=False,
    )


def _four_or_five_bits(type: str, larger: str) -> Recipe:
    """Returns a recipe of the older types, whose first layers lose with an importance matrix."""
    first = "ffn_down"
    return Recipe(type, {first: ((larger, lambda at: at.importance and _first_of(8)(at)),)})


_IQ4 = {
    "attn_v": (("Q5_K", _grouped),),
    "ffn_down": (("Q5_K", lambda tensor: not tensor.importance and _first_of(8)(tensor)),),
}

RECIPES = {
    "IQ1_S": _two_bits("IQ1_S", "Q2_K", "Q2_K", "IQ2_XXS"),
    "IQ1_M": _two_bits("IQ1_M", "Q2_K", "Q2_K", "IQ2_XXS"),
    "TQ1_0": Recipe("TQ1_0", embedding="Q4_K"),
    "TQ2_0": Recipe("TQ2_0", embedding="Q4_K"),
    "IQ2_XXS": _two_bits("IQ2_XXS", "Q2_K", "Q2_K"),
    "IQ2_XS": _two_bits("IQ2_XS", "Q2_K", "Q2_K"),
    "IQ2_S": _two_bits("IQ2_XS", "IQ3_S", "IQ3_S", "IQ3_S"),
    "IQ2_M": _two_bits("IQ2_S", "IQ3_S", "IQ3_S", "IQ3_S"),
    "IQ3_XXS": Recipe("IQ3_XXS", _IQ3_XXS, of_8_experts=_Q5_OF_8, embedding="IQ3_S", output="Q5_K"),
    "IQ3_XS": Recipe("IQ3_S", _IQ3_XS, of_8_experts=_Q5_OF_8),
    "IQ3_S": Recipe("IQ3_S", {"attn_v": (("Q4_K", _grouped),)}, of_8_experts=_Q5_OF_8),
    "IQ3_M": Recipe("IQ3_S", _IQ3_M, of_8_experts=_Q5_OF_8),
    "Q2_K": Recipe("Q2_K", _Q2_K, of_8_experts=_Q5_OF_8),
    "Q2_K_S": Recipe("Q2_K", _Q2_K_S),
    "Q3_K_S": Recipe("Q3_K", of_8_experts=_Q5_OF_8),
    "Q3_K_M": Recipe("Q3_K", _Q3_K_M, of_8_experts=_Q5_OF_8),
    "Q3_K_L": Recipe("Q3_K", _Q3_K_L),
    "IQ4_XS": Recipe("IQ4_XS", _IQ4, of_8_experts=_Q5_OF_8),
    "IQ4_NL": Recipe("IQ4_NL", _IQ4, of_8_experts=_Q5_OF_8),
    "MXFP4_MOE": Recipe("Q8_0", experts="MXFP4", output="Q8_0"),
    "Q4_0": _four_or_five_bits("Q4_0", "Q4_1"),
    "Q4_1": Recipe("Q4_1"),
    "Q5_0": _four_or_five_bits("Q5_0", "Q5_1"),
    "Q5_1": Recipe("Q5_1"),
    "Q4_K_M": Recipe("Q4_K", _K_M, of_8_experts=_Q5_OF_8),
    "Q4_K_S": Recipe("Q4_K", _Q4_K_S, of_8_experts=_Q5_OF_8),
    "Q5_K_M": Recipe("Q5_K", _K_M),
    "Q5_K_S": Recipe("Q5_K"),
    "Q6_K": Recipe("Q6_K"),
    "Q8_0": Recipe("Q8_0", output="Q8_0"),
    "F16": Recipe("F16"),
    "BF16": Recipe("BF16"),
    "F32": Recipe("F32"),
}

#: llama-quantize's short names.
ALIASES = {f"Q{bits}_K": f"Q{bits}_K_M" for bits in (3, 4, 5)}

#: Name that stands for each tensor's own type, in place of a recipe's.
COPY = "COPY"

_FLOAT_TYPES = ("F32", "F16", "BF16")
#: Fallback types for rows whose length is not a multiple of 256.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FALLBACKS |= dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0")
_FALLBACKS |= dict.fromkeys(
    ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
)
_LAST_RESORT = "F16"  # for lengths that are not a multiple of 32 either

#: Substring of a tensor name -> part; the first match applies. Names of experts have suffixes.
_PARTS = {
    "attn_qkv.weight": "attn_v",
    "attn_kv_b.weight": "attn_v",
    "attn_v.weight": "attn_v",
    "attn_k.weight": "attn_k",
    "attn_q.weight": "attn_q",
    "attn_output.weight": "attn_output",
    "ffn_up": "ffn_up",
    "ffn_gate": "ffn_gate",
    "ffn_down": "ffn_down",
}
#: Substrings of the names of matrices that are not quantized.
_FLOATS: tuple[str, ...] = ("_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "ssm_conv1d")
_FLOATS += ("shortconv.conv.weight", "per_layer_model_proj")
_STORED_AS_BF16 = "per_layer_model_proj"  # as in llama.cpp's converter; others become F32


def full_name(name: str) -> str:
    """Returns a recipe's name for one in lower case or for a short one, others in upper case."""
    return ALIASES.get(name.upper(), name.upper())


def get(name: str) -> Recipe:
    """Returns the recipe of that name; raises ValueError that lists the known ones."""
    full = ALIASES.get(name, name) if isinstance(name, str) else None
    if full not in RECIPES:
        raise ValueError(f"type={name!r} must be one of {', '.join(RECIPES)}")
    return RECIPES[full]


def check_name(name: str) -> None:
    """Raises ValueError that lists the known names if `name` is neither a recipe's nor COPY."""
    if name != COPY:
        get(name)


def file_type(name: str) -> int:
    """Returns `general.file_type` of files that a recipe makes."""
    from gguf.constants import LlamaFileType  # takes 0.1 s, which recipes' names need not

    return LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{ALIASES.get(name, name)}"]


def is_unquantized(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether no recipe quantizes a tensor: norms, biases, routers, short convolutions."""
    return len(shape) == 1 or not name.endswith("weight") or any(p in name for p in _FLOATS)


def unquantized_type(name: str) -> str:
    """Returns the type of a tensor that is not quantized."""
    return "BF16" if _STORED_AS_BF16 in name else "F32"


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
    types = {name: unquantized_type(name) for name in shapes}
    for name in quantized:
        if (kind := chosen(name)) is not None:
            types[name] = kind
            continue
        part, shape = parts[name], shapes[name]
        number = seen.get(part, 0)
        seen[part] = number + 1
        layer = _in_order(name)[0] if experts > 1 and part.startswith("ffn_") else number
        total = totals.get(part, model.num_layers)
        tensor = RuleInput(number, layer, total, groups, experts, importance)
        if recipe.type in _FLOAT_TYPES:
            kind = recipe.type
        elif name == "output.weight" or (tied and name.endswith("token_embd.weight")):
            # Q6_K falls back to Q8_0, which llama.cpp takes for all short rows of this matrix
            kind = recipe.output if _fits(recipe.output, shape) else "Q6_K"
        elif recipe.experts and len(shape) == 3:
            kind = recipe.experts
        elif recipe.experts:
            kind = recipe.type
        elif name.endswith("token_embd.weight"):
            kind = recipe.embedding or recipe.type
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
    if experts == 8 and part in recipe.of_8_experts:
        return recipe.of_8_experts[part]
    if experts == 8 and part == "attn_output":
        return recipe.type
    rules = recipe.rules.get(part, ())
    kind = next((kind for kind, holds in rules if holds(at)), recipe.type)
    if part == "attn_v" and kind in ("Q3_K", "Q4_K") and recipe.better_70b and _is_70b(model):
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
