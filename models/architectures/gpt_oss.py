"""gpt-oss."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import ATTENTION, EXPERTS, NORMS_AFTER_ATTENTION, SINKS

ARCHITECTURE = Architecture(
    "gpt-oss",
    attention=ATTENTION + SINKS,
    norms=NORMS_AFTER_ATTENTION,
    mlp=(),
    experts=EXPERTS,
    biases=("qkv", "attention_output", "router", "experts"),
    activation="swiglu_oai",
    windowed=lambda layer: layer % 2 == 0,
    window=128,
)
