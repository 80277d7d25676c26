"""Shards operations over a mesh of devices, and reports the operands that are gathered."""
