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
_BIAS = re.compile(r"blk\.\d+\.(attn_output|ffn_(gate|up|down))\.bias")
_CONVOLUTION_BIAS = re.compile(r"blk\.\d+\.shortconv\.\w+\.bias")


def differences(config: Config, metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns what llama.cpp does with a file of these metadata and tensor names, worst first."""
    kind, names, found = config.architecture, list(names), list[str]()
    if DIVISORS[0] in names and not config.kind.rope_freqs:
        found.append(f"refuses it: it has no {DIVISORS[0]} in {kind}")
    patterns = [_CONVOLUTION_BIAS] if kind in _WITH_BIASES else [_CONVOLUTION_BIAS, _BIAS]
    if biases := [name for name in names if any(p.fullmatch(name) for p in patterns)]:
        found.append(f"refuses it: it has no {biases[0].split('.', 2)[-1]} in {kind}")
    if kind in WITHOUT_WINDOWS and any(config.windowed_by_layer):
        size = f"answers differ for texts over {config.window} tokens"
        found.append(f"has no sliding windows in {kind}: {size}")
    if f"{kind}.{ROTATED}" in metadata:
        found.append("rotates other layers: answers differ")
    if rope_divisors.KEY in metadata:
        found.append("has other frequencies of the rope, since GGUF's keys cannot say these")
    if kind == "deepseek2" and metadata.get(f"{kind}.rope.scaling.type") == "linear":
        found.append("also scales attention by a linear rope's factor: answers differ")
    if GROUP_BEST in metadata:
        found.append("selects groups of experts otherwise: answers differ")
    return found


def warn_of_differences(
    file: str, config: Config, metadata: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Issues one warning that names all `differences`, if there are any."""
    if found := differences(config, metadata, names):
        warn(f"{file}: llama.cpp {'; it '.join(found)} (see docs/models.md)")
