"""Tasks that use a model: embeddings, perplexity, benchmarks."""
