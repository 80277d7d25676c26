"""Sampling parameters, and functions that sample tokens from logits."""

from .constraint import Constraint, ConstraintError, Thought
from .params import Processor, Sampling

__all__ = ["Constraint", "ConstraintError", "Processor", "Sampling", "Thought"]
