"""Describes the architecture of Qwen 3.5 and 3.6 with experts."""

from __future__ import annotations

import dataclasses

from . import qwen35
from .base import CheckpointClass, Stored
from .qwen3moe import EXPERT_KEYS, SPARSE
from .tensor_tables import EXPERTS, SHARED_EXPERT, SHARED_EXPERT_GATE

#: Experts in stacks, unless each has its own tensors, and the gate of the shared expert.
STORED = (
    Stored("mlp.experts.gate_up_proj", ("ffn_gate_exps", "ffn_up_exps"), bare=True, optional=True),
    Stored("mlp.experts.down_proj", ("ffn_down_exps",), bare=True, optional=True),
    Stored("mlp.shared_expert_gate", ("ffn_gate_inp_shexp",), as_row=True),
)


def with_experts(checkpoint: CheckpointClass, name: str) -> CheckpointClass:
    """Returns a copy of a checkpoint class for the same model with experts, named `name`."""
    return dataclasses.replace(
        checkpoint,
        name=name,
        stored=(*checkpoint.stored, *STORED),
        keys={
            **checkpoint.keys,
            **EXPERT_KEYS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        optional=("intermediate_size",),
        implied={**checkpoint.implied, **SPARSE},
    )


ARCHITECTURE = dataclasses.replace(
    qwen35.ARCHITECTURE,
    name="qwen35moe",
    checkpoints=(
        with_experts(qwen35.TEXT, "Qwen3_5MoeForCausalLM"),
        with_experts(qwen35.TEXT_AND_IMAGES, "Qwen3_5MoeForConditionalGeneration"),
    ),
    mlp=(),
    experts=EXPERTS + SHARED_EXPERT + SHARED_EXPERT_GATE,
)
