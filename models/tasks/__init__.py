"""Embeddings, perplexity and speed of a model."""
