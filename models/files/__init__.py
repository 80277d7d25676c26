"""Files of models: GGUF, Hugging Face checkpoints, importance matrices, and quantizing them."""
