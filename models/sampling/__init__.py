"""Sampling parameters, and functions that sample tokens from logits."""

from .params import Processor, Sampling

__all__ = ["Processor", "Sampling"]
