"""Readers that load and unpack weights in kernels, shared by the formats."""
