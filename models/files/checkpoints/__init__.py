"""Checkpoint folders of Hugging Face transformers, read into a model."""
