"""The commands of `jax-q4k`, one module each."""
