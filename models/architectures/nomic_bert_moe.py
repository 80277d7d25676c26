"""Describes the architecture of nomic-embed-text-v2-moe: BERT with rope and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from . import nomic_bert
from .base import CheckpointClass, Routing, Stored
from .encoder_tables import BERT_MLP
from .tensor_tables import EXPERTS, Tensor


def _expert(tensor: Tensor) -> Tensor:
    """Returns a copy without a default name in checkpoints, which devices do not split."""
    return dataclasses.replace(tensor, checkpoint=None, split=None)


#: Added to the weighted sum of the experts. llama.cpp's converter drops it.
SUM_BIAS = Tensor(
    "ffn_exps",
    "mlp.sum_bias",
    "mlp.experts.bias",
    "hidden",
    required=False,
    suffix="bias",
    exact=True,
)


def _only(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


#: Keys of config.json -> their only accepted values.
_IMPLIED: Mapping[str, Any] = {
    "activation_function": "gelu",
    "expert_choice_router": False,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "qkv_proj_bias": True,
}
_BASE = nomic_bert.ARCHITECTURE.checkpoints[0]
_CHECKPOINT: CheckpointClass = dataclasses.replace(
    _BASE,
    selected_by="moe_every_n_layers",
    stored=(
        *(stored for stored in _BASE.stored if not stored.name.startswith("mlp.")),
        Stored("mlp.fc1", ("ffn_up",)),
        Stored("mlp.fc2", ("ffn_down",)),
        Stored("mlp.router.layer", ("ffn_gate_inp",)),
        Stored("mlp.experts.mlp.w1", ("ffn_up_exps",), flat=True, bare=True),
        Stored("mlp.experts.mlp.w2", ("ffn_down_exps",), flat=True, bare=True, transposed=True),
    ),
    held_biases=("qkv", "attention_output", "mlp"),
    keys={
        "expert_count": "num_experts",
        "expert_used_count": "moe_top_k",
        "moe_every_n_layers": "moe_every_n_layers",
    },
    implied={**_BASE.implied, **{key: _only(value) for key, value in _IMPLIED.items()}},
    held=(*_BASE.held, "ffn_exps"),
    without_zeros=("ffn_exps",),
)

ARCHITECTURE = dataclasses.replace(
    nomic_bert.ARCHITECTURE,
    name="nomic-bert-moe",
    checkpoints=(_CHECKPOINT,),
    mlp=BERT_MLP,
    experts=(EXPERTS[0], _expert(EXPERTS[2]), _expert(EXPERTS[3]), SUM_BIAS),
    interleaved_experts=True,
    activation="gelu_erf",
    routing=Routing("softmax", normalize=False),
)
