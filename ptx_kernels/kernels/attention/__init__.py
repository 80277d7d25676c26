"""Attention kernels: decode steps over paged KV caches (with split-K and merges), and prompts."""

from __future__ import annotations

from .causal_attention import CausalAttentionConfig, causal_attention
from .config import PagedAttentionConfig
from .family import CAUSAL_ATTENTION, MERGE_ATTENTION, PAGED_ATTENTION, SPLIT_KEYS
from .head_output import leaves_f16
from .merge_attention import MergeConfig, merge_attention
from .paged_attention import paged_attention
from .rules import (
    causal_attention_rule,
    merge_attention_rule,
    paged_attention_rule,
    piece_attention_rule,
    prompt_attention_rule,
)
from .split_keys import SplitKeysConfig, split_keys

__all__ = [
    "CAUSAL_ATTENTION",
    "MERGE_ATTENTION",
    "PAGED_ATTENTION",
    "SPLIT_KEYS",
    "CausalAttentionConfig",
    "MergeConfig",
    "PagedAttentionConfig",
    "SplitKeysConfig",
    "causal_attention",
    "causal_attention_rule",
    "leaves_f16",
    "merge_attention",
    "merge_attention_rule",
    "paged_attention",
    "paged_attention_rule",
    "piece_attention_rule",
    "prompt_attention_rule",
    "split_keys",
]
