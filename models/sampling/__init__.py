"""Sampling parameters, and the choice of a token from logits."""

from .params import Processor, Sampling

__all__ = ["Processor", "Sampling"]
