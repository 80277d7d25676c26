"""Decodes the weights of quantized checkpoints; one module per quantization method."""
