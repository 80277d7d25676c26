"""Flax NNX decoder, tokenizer, generation: the model that runs on top of `jax_q4k`."""
