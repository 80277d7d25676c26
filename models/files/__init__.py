"""Files of models: Hugging Face checkpoints, importance matrices, quantization recipes."""
