"""Architectures as data: all that a file's `general.architecture` implies beyond its dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .architecture_tensors import ATTENTION, GATED_MLP, NORMS, Tensor


@dataclasses.dataclass(frozen=True)
class CheckpointClass:
    """A class of the transformers library, as `architectures` in config.json names it.

    Attributes:
      required: keys of config.json that other classes may leave out.
      biases: keys of config.json that may ask for biases -> the groups that they ask for.
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
    biases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    window: bool | str = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implied: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    activations: tuple[str, ...] = ()
    tied: bool = False
    text_config: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen; None: metadata says it.

    Attributes:
      gating: what makes scores of logits: "softmax", or "sigmoid".
      normalize: the weights of a token's experts add up to 1.
    """

    gating: Literal["softmax", "sigmoid"] | None = "softmax"
    normalize: bool | None = True


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder's kind; `Config` has its dimensions.

    Attributes:
      name: `general.architecture` in GGUF files.
      checkpoints: the classes of checkpoints that become it.
      attention, norms, mlp: each layer's tensors.
      experts: those in the place of `mlp` in layers with experts; (): there are no such layers.
      fused: tensors of files that hold the rows of several, as `fused.FUSED` has them; in whatever
        architecture attn_qkv and ffn_gate_up_exps may be read.
      biases: groups of biases that every file holds.
      layer_norm: norms subtract the mean (LayerNorm), instead of RMSNorm.
      interleaved_rope: rope rotates dimensions (2i, 2i + 1) instead of (i, i + rope_dim / 2).
      rotated: (layer, whether it is windowed) -> whether it has rotary positions; None: every one.
      optional_rope: `rope.scaling.finetuned` may say that no layer has rotary positions.
      local_rope_theta: base of the rotation in windowed layers, which nothing stretches, where
        `rope.freq_base_swa` names no other; "global": that of all layers; None: windowed layers
        rotate as all others.
      yarn_keys: `rope.scaling.yarn_*` may say what YaRN's constants are.
      temperature: `attention.temperature_scale` may say how queries grow with their position.
      activation: of the gate, or of `up` where there is none: a name of
        `jax_q4k.ACTIVATION_FUNCTIONS`.
      windowed: layer -> whether `attention.sliding_window` bounds what it attends to, where
        `attention.sliding_window_pattern` does not say; None: no layer, and the window bounds the
        context length.
      window: tokens, where `attention.sliding_window` does not say; 0: no layer is windowed.
      attention_soft_cap: what bounds scores where `attn_logit_softcapping` does not say: cap *
        tanh(score / cap); 0: nothing does; None: such a key is refused.
      final_soft_cap: the same of logits, and of `final_logit_softcapping`.
      scales: those of `embedding_scale`, `residual_scale` and `attention.scale` that metadata may
        give: of embeddings, of what a sublayer adds, of scores.
      logit_scale: the value of `logit_scale`, which files then hold -> the factor of logits.
      embedding_scale: config -> what embeddings are multiplied by; None: nothing.
      attention_scale: config -> what scores are multiplied by; None: head_dim ** -0.5.
      routing: of layers with experts.
      metadata: config -> what files hold beyond it, by keys under the name.
      norm_offset: norms of checkpoints are the weights minus it.
    """

    name: str
    checkpoints: tuple[CheckpointClass, ...] = ()
    attention: tuple[Tensor, ...] = ATTENTION
    norms: tuple[Tensor, ...] = NORMS
    mlp: tuple[Tensor, ...] = GATED_MLP
    experts: tuple[Tensor, ...] = ()
    fused: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    layer_norm: bool = False
    interleaved_rope: bool = False
    rotated: Callable[[int, bool], bool] | None = None
    optional_rope: bool = False
    local_rope_theta: float | Literal["global"] | None = None
    yarn_keys: bool = False
    temperature: bool = False
    activation: str = "silu"
    windowed: Callable[[int], bool] | None = None
    window: int = 0
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    scales: tuple[str, ...] = ()
    logit_scale: Callable[[float], float] | None = None
    embedding_scale: Callable[[Any], float] | None = None
    attention_scale: Callable[[Any], float] | None = None
    routing: Routing = Routing()
    metadata: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    norm_offset: float = 0.0
