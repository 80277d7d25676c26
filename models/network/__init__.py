"""The decoder as Flax NNX modules, and its construction from a model's tensors."""
