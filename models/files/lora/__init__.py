"""LoRA adapters in the formats of GGUF, PEFT and mlx-lm."""

from .adapters import with_lora

__all__ = ["with_lora"]
