"""Checks of a GPU for `jax-q4k doctor --gpu`: its driver, clusters and graphs, each kernel, JAX."""

__all__ = ["devices", "kernels", "plugin"]
