"""Decode attention: one query token per sequence, its context split over blocks, and their merge."""

from __future__ import annotations

from .merge_attention import MergeConfig, merge_attention
from .paged_attention import PagedAttentionConfig, paged_attention

__all__ = ["MergeConfig", "PagedAttentionConfig", "merge_attention", "paged_attention"]
