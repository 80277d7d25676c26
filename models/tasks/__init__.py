"""Tasks with a model: embeddings, perplexity, benchmarks."""
