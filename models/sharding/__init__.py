"""Sharding of a model's weights and KV cache over a mesh of devices."""
