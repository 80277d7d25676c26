"""LoRA adapters, of GGUF and of PEFT."""

from .adapters import with_lora

__all__ = ["with_lora"]
