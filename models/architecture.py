"""Architectures as data: all that a file's `general.architecture` implies beyond its dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class CheckpointClass:
    """A class of the transformers library, as `architectures` in config.json names it.

    Attributes:
      required: keys of config.json that other classes may leave out.
      biases: keys of config.json that may ask for biases: attention_bias, mlp_bias.
      window: whether sliding_window counts; or the boolean key that says so.
      keys: further metadata: GGUF's key -> that of config.json, a number.
      optional_keys: the same, of keys that config.json may leave out.
      implied: keys of config.json that may only say what they must: key -> config -> its value.
      activations: what hidden_act may say, too, and means the architecture's activation.
      tied: whether the output layer is the embedding where tie_word_embeddings does not say.
      text_config: of a class that takes images, too: what the object of this name, which describes
        the decoder, may leave out, and what it then means; None: config.json has no such object.
    """

    name: str
    required: tuple[str, ...] = ("num_key_value_heads",)
    biases: tuple[str, ...] = ()
    window: bool | str = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implied: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    activations: tuple[str, ...] = ()
    tied: bool = False
    text_config: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder's kind; `Config` has its dimensions.

    Attributes:
      name: `general.architecture` in GGUF files.
      checkpoints: the classes of checkpoints that become it.
      interleaved_rope: rope rotates dimensions (2i, 2i + 1) instead of (i, i + rope_dim / 2).
      qkv_bias: projections to queries, keys and values have biases.
      qk_norm: queries and keys are normalized per head before they are rotated.
      post_norms: what a sublayer adds is normalized, too.
      activation: of the gate: "silu", or "gelu", the approximation by tanh.
      windowed: layer -> whether `attention.sliding_window` bounds what it attends to, where
        `attention.sliding_window_pattern` does not say; None: no layer, and the window bounds the
        context length.
      window: tokens, where `attention.sliding_window` does not say; 0: no layer is windowed.
      attention_soft_cap: what bounds scores where `attn_logit_softcapping` does not say: cap *
        tanh(score / cap); 0: nothing does; None: such a key is refused.
      final_soft_cap: the same of logits, and of `final_logit_softcapping`.
      local_rope_theta: base of the rotation in windowed layers, which no factor stretches, where
        `rope.freq_base_swa` names no other; None: that of all layers.
      embedding_scale: config -> what embeddings are multiplied by; None: nothing.
      attention_scale: config -> what scores are multiplied by; None: head_dim ** -0.5.
      norm_offset: norms of checkpoints are the weights minus it.
    """

    name: str
    checkpoints: tuple[CheckpointClass, ...] = ()
    interleaved_rope: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    windowed: Callable[[int], bool] | None = None
    window: int = 0
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    local_rope_theta: float | None = None
    embedding_scale: Callable[[Any], float] | None = None
    attention_scale: Callable[[Any], float] | None = None
    norm_offset: float = 0.0
