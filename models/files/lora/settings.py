"""Reads adapter_config.json of PEFT and mlx-lm, which has the scales of adapters.

A field that changes the meaning of the tensors, or that is unknown, must have its default value.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from ...runner.adapters import MAX_SCALE
from ...support.json_fields import JSONFields

#: Field of PEFT that changes the meaning of the tensors -> values that do not.
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "layer_replication": ([],),
    "arrow_config": (),
    "use_bdlora": (False,),
    "kasa_config": (),
    "monteclora_config": (),
    "megatron_config": (),
}
#: Fields that name the model, select modules (which follow from the tensors), or affect only
#: training.
_HARMLESS = frozenset(
    """
    auto_mapping base_model_name_or_path inference_mode peft_version revision task_type
    ensure_weight_tying exclude_modules layers_pattern layers_to_transform target_modules
    corda_config eva_config loftq_config lora_dropout lora_ga_config megatron_core
    qalora_group_size runtime_config velora_config
    lora_dtype lorap_emb_lr lorap_lr_ratio
    """.split()
)
#: Fields that are read.
_READ = frozenset(
    "alpha_pattern init_lora_weights lora_alpha peft_type r rank_pattern use_rslora".split()
)
#: Initializations, besides true and false, that do not change the base weights.
_BASE_STAYS = ("gaussian", "eva", "orthogonal", "mica")
_PLAIN = re.compile(r"\w+(\.\w+)*")  # other regular expressions could run forever


@dataclasses.dataclass(frozen=True)
class Settings:
    """An adapter's settings from adapter_config.json.

    Attributes:
      of_mlx: tensors have mlx-lm's layout, (k, rank) and (rank, n).
      scale: maps (module name in the file, rank) to the factor of B A.
      ranks: allowed ranks; None means any.
    """

    of_mlx: bool
    scale: Callable[[str, int], float]
    ranks: frozenset[int] | None = None


def read(fields: JSONFields) -> Settings:
    """Reads adapter_config.json; raises CheckpointError that names an unsupported field."""
    if "peft_type" not in fields and "lora_parameters" in fields:
        return _of_mlx(fields)
    return _of_peft(fields)


def _of_mlx(fields: JSONFields) -> Settings:
    kind = fields.string("fine_tune_type", "lora")
    if kind != "lora":
        fields.fail("fine_tune_type", f"must be 'lora', not {kind!r:.100}")
    if fields.boolean("use_dora", False):
        fields.fail("use_dora", "is True, which is not supported")
    parameters = JSONFields(fields.value("lora_parameters"), fields.file, "lora_parameters.")
    scale = parameters.number("scale", most=MAX_SCALE, above=-MAX_SCALE)
    if (alpha := parameters.value("alpha", None)) is not None:
        if alpha != (rank := parameters.value("rank", None)):
            problem = f"is {alpha!r:.100} with rank={rank!r:.100}: versions of mlx-lm differ in"
            parameters.fail("alpha", f"{problem} whether alpha / rank multiplies the scale")
    return Settings(True, lambda module, rank: scale)


def _of_peft(fields: JSONFields) -> Settings:
    kind = fields.string("peft_type")
    if kind != "LORA":
        fields.fail("peft_type", f"must be 'LORA', not {kind!r:.100}")
    _check_initial(fields)
    for key in fields.values:
        value = fields.value(key, None)
        known = key in _READ or key in _HARMLESS
        if value is not None and not known and not _is_default(key, value):
            what = "is not supported" if key in _ONLY else "is not known"
            fields.fail(f"{key:.100}", f"is {value!r:.100}, which {what}")
    alpha = fields.number("lora_alpha", most=MAX_SCALE, above=-MAX_SCALE)
    ranks = {fields.integer("r", least=1)}
    by_root = fields.boolean("use_rslora", False)
    if (of_modules := fields.object("rank_pattern")) is not None:
        ranks.update(of_modules.integer(pattern, least=1) for pattern in of_modules.values)
    alphas = _alphas(fields)

    def scale(module: str, rank: int) -> float:
        names = (name for name in alphas if re.match(rf"(.*\.)?({name})$", module))
        numerator = next((alphas[name] for name in names), alpha)
        return numerator / (math.sqrt(rank) if by_root else rank)

    return Settings(False, scale, frozenset(ranks))


def _is_default(key: str, value: Any) -> bool:
    """Returns whether a field has its default value; for unknown fields, false or empty."""
    return value in _ONLY.get(key, (False, "", [], {}))


def _check_initial(fields: JSONFields) -> None:
    """Raises CheckpointError for initializations that subtract B A from the base weights."""
    initial = fields.value("init_lora_weights", True)
    if isinstance(initial, bool):
        return
    if not isinstance(initial, str) or initial.lower() not in _BASE_STAYS:
        stay = ", ".join(("true", "false", *map(repr, _BASE_STAYS)))
        problem = f"is {initial!r:.100}, which changes the base weights"
        problem += f" (unlike {stay}), so that the adapter does not fit the model"
        convert = "save_pretrained(..., path_initial_model_for_weight_conversion=...) converts most"
        fields.fail("init_lora_weights", f"{problem}; PEFT's {convert}")


def _alphas(fields: JSONFields) -> dict[str, float]:
    """Returns pattern of module names -> alpha; the first pattern that matches applies."""
    of_modules = fields.object("alpha_pattern")
    if of_modules is None:
        return {}
    for pattern in of_modules.values:
        if not _PLAIN.fullmatch(pattern):
            problem = f"holds {pattern!r:.100}; only plain module names are supported"
            fields.fail("alpha_pattern", problem)
    return {
        pattern: of_modules.number(pattern, most=MAX_SCALE, above=-MAX_SCALE)
        for pattern in of_modules.values
    }
