"""DeepSeek V2 and V3, and GLM 4.7 Flash."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..architecture import Architecture, Routing
from ..architecture_tensors import (
    EXPERTS,
    LATENT_ATTENTION,
    SELECTION_BIAS,
    SHARED_EXPERT,
    optional,
)

if TYPE_CHECKING:
    from ..config import Config


def attention_scale(config: Config) -> float:
    """1 / sqrt(head_dim), times YaRN's growth squared (https://arxiv.org/abs/2309.00071)."""
    log_multiplier = 0.0 if config.yarn is None else config.yarn[2]
    growth = 1 + log_multiplier * math.log(max(config.rope_factor, 1.0))
    return growth**2 / math.sqrt(config.head_dim)


def default_gating(layers: int, vocab_size: int) -> str:
    """The gating of files that do not say it; those of GLM 4.7 Flash are told by their sizes."""
    is_glm = layers in (47, 48) and vocab_size == 154880
    return "sigmoid" if is_glm else "softmax"


ARCHITECTURE = Architecture(
    "deepseek2",
    attention=LATENT_ATTENTION,
    experts=EXPERTS + SHARED_EXPERT + optional(SELECTION_BIAS),
    routing=Routing(gating=None, normalize=None, default_gating=default_gating),
    interleaved_rope=True,
    yarn_keys=True,
    latent=True,
    attention_scale=attention_scale,
)
