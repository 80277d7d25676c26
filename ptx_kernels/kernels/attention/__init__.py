"""Decode attention: a query token per sequence, its context split over blocks, and their merge."""

from __future__ import annotations

from .config import PagedAttentionConfig
from .family import MERGE_ATTENTION, PAGED_ATTENTION
from .merge_attention import MergeConfig, merge_attention
from .paged_attention import paged_attention
from .rules import merge_attention_rule, paged_attention_rule

__all__ = [
    "MERGE_ATTENTION",
    "PAGED_ATTENTION",
    "MergeConfig",
    "PagedAttentionConfig",
    "merge_attention",
    "merge_attention_rule",
    "paged_attention",
    "paged_attention_rule",
]
