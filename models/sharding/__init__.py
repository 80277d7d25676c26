"""Sharding of a model's weights and cache over a mesh of devices."""
