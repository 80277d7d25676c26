"""Attention of decode steps, whose contexts are split over blocks and merged, and of prompts."""

from __future__ import annotations

from .causal_attention import CausalAttentionConfig, causal_attention
from .family import CAUSAL_ATTENTION, MERGE_ATTENTION, PAGED_ATTENTION
from .merge_attention import MergeConfig, merge_attention
from .paged_attention import PagedAttentionConfig, paged_attention
from .rules import causal_attention_rule, merge_attention_rule, paged_attention_rule

__all__ = [
    "CAUSAL_ATTENTION",
    "MERGE_ATTENTION",
    "PAGED_ATTENTION",
    "CausalAttentionConfig",
    "MergeConfig",
    "PagedAttentionConfig",
    "causal_attention",
    "causal_attention_rule",
    "merge_attention",
    "merge_attention_rule",
    "paged_attention",
    "paged_attention_rule",
]
