"""Commands of `jax-q4k`, one module each."""
