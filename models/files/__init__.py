"""Model files: GGUF, Hugging Face checkpoints, LoRA adapters, importance matrices, quantization."""
