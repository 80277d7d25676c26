"""Describes the architecture of Command R7B and Command A."""

from __future__ import annotations

from .base import Architecture, CheckpointClass
from .layer_types import all_but_every
from .tensor_tables import PARALLEL_NORM

TEXT = CheckpointClass(
    "Cohere2ForCausalLM",
    interleaved_rope=True,
    required=(),
    defaults={"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "sliding_window": 4096},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    biases={"attention_bias": ("qkv", "attention_output")},
    window=True,
    windowed=all_but_every(4, "sliding_window_pattern"),
    keys={"logit_scale": "logit_scale"},
    implied={"use_parallel_block": lambda _: True},
    tied=True,
)

ARCHITECTURE = Architecture(
    "cohere2",
    checkpoints=(TEXT,),
    norms=PARALLEL_NORM,
    layer_norm=True,
    interleaved_rope=True,
    rotated=lambda layer, windowed: windowed,
    windowed=lambda layer: layer % 4 < 3,
    window=4096,
    logit_scale=lambda scale: scale,
)
