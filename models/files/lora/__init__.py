"""LoRA adapters in the formats of GGUF, PEFT and mlx-lm."""

from .adapters import read_lora, with_lora

__all__ = ["read_lora", "with_lora"]
