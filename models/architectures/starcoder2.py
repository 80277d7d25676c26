"""StarCoder 2."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import PLAIN_MLP

ARCHITECTURE = Architecture(
    "starcoder2",
    mlp=PLAIN_MLP,
    biases=("qkv", "attention_output", "mlp", "norm"),
    layer_norm=True,
    activation="gelu",
)
