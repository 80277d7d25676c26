"""Finds what llama.cpp refuses in a file to write, or computes otherwise.

The reasons are those of docs/models.md and docs/files.md. Sets of architectures follow the tensors
and keys that llama.cpp's source reads for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..architectures.base import GROUP_BEST
from ..config import Config
from ..config.layer_patterns import ROTATED
from ..config.rope import DIVISORS
from ..support.warn import warn
from . import rope_divisors

#: Architectures without sliding windows.
WITHOUT_WINDOWS = frozenset(
    "llama mistral3 phi3 qwen2 qwen2moe qwen2vl qwen3 qwen3moe smollm3 starcoder2".split()
)
#: Architectures with optional biases after attention and in the feed-forward network.
_WITH_BIASES = frozenset(
    """
    bert gpt-oss granite granitemoe jina-bert-v2 jina-bert-v3 llama mistral3 nomic-bert
    nomic-bert-moe starcoder2
    """.split()
)
#: Architectures that read `rope_factors_long.weight` and `rope_factors_short.weight`.
_WITH_LONG_FACTORS = frozenset("granite granitemoe llama mistral3 phi3".split())
#: Architectures with a fixed rule for weights of experts: whether they are normalized.
_NORMALIZES = {"qwen2moe": False} | dict.fromkeys(
    ("lfm2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe"), True
)
_BIAS = re.compile(r"blk\.\d+\.(attn_output|ffn_(gate|up|down))\.bias")
_CONVOLUTION_BIAS = re.compile(r"blk\.\d+\.shortconv\.\w+\.bias")


def differences(config: Config, metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns what llama.cpp does with a file of these metadata and tensor names, worst first."""
    kind, names, found = config.architecture, list(names), list[str]()
    every, *long_and_short = DIVISORS
    unread = [] if config.kind.rope_freqs else [every]
    unread += [] if kind in _WITH_LONG_FACTORS else long_and_short
    found += [f"refuses it: it has no {name} in {kind}" for name in unread if name in names]
    patterns = [_CONVOLUTION_BIAS] if kind in _WITH_BIASES else [_CONVOLUTION_BIAS, _BIAS]
    if biases := [name for name in names if any(p.fullmatch(name) for p in patterns)]:
        found.append(f"refuses it: it has no {biases[0].split('.', 2)[-1]} in {kind}")
    if (latent := config.latent) is not None and not latent.query_rank:
        if config.num_layers not in (26, 27, 48):
            found.append("refuses it: it needs a q_lora_rank except with 26, 27 or 48 layers")
    if (delta := config.delta) is not None and delta.value_dim != delta.head_dim:
        found.append("refuses it: its value heads are as wide as key heads")
    if kind == "command-r" and config.num_layers < 64 and "blk.0.attn_q_norm.weight" in names:
        found.append("refuses it: it normalizes heads only in models of 64 layers or more")
    if kind in WITHOUT_WINDOWS and any(config.windowed_by_layer):
        size = f"answers differ for texts over {config.window} tokens"
        found.append(f"has no sliding windows in {kind}: {size}")
    if f"{kind}.{ROTATED}" in metadata:
        found.append("rotates other layers: answers differ")
    if rope_divisors.KEY in metadata:
        found.append("has other frequencies of the rope, since GGUF's keys cannot say these")
    if kind == "deepseek2" and metadata.get(f"{kind}.rope.scaling.type") == "linear":
        found.append("also scales attention by a linear rope's factor: answers differ")
    if (experts := config.experts) is not None:
        if _NORMALIZES.get(kind, experts.normalize) != experts.normalize:
            found.append("weights experts otherwise (norm_topk_prob): answers differ")
        if kind == "lfm2moe" and experts.scale != 1:
            found.append("ignores the scale of experts' weights: answers differ")
    if GROUP_BEST in metadata:
        found.append("selects groups of experts otherwise: answers differ")
    return found


def warn_of_differences(
    file: str, config: Config, metadata: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Issues one warning that names all `differences`, if there are any."""
    if found := differences(config, metadata, names):
        warn(f"{file}: llama.cpp {'; it '.join(found)} (see docs/models.md)")
