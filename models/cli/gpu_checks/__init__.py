"""Checks of `jax-q4k doctor --gpu`, each in a process of its own, and their report."""
