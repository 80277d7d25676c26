"""The decoder: Flax NNX modules, their construction, KV cache and recurrent state."""
