"""Architectures as data: all that a file's `general.architecture` implies beyond its dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .tensor_tables import ATTENTION, GATED_MLP, INPUT, NORMS, OUTPUT, Tensor

#: What mixes the tokens of a layer: attention; a gated delta net; or a short convolution.
MixerKind = Literal["attention", "delta", "convolution"]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of checkpoints whose name or layout is not that of `Tensor.checkpoint`.

    Attributes:
      name: without `model.layers.LAYER.` and `.weight`. `{expert}` stands for an expert's number:
        one tensor for each.
      holds: the tensors of GGUF files whose rows it holds, in this order.
      alternating: rows of these take turns.
      transposed: matrices are (k, n); None: those of transformers 4 are, as their shapes tell.
      bare: its name has no `.weight`, and that of its bias ends in `_bias`.
      as_row: a vector, stored as a matrix of one row.
      suffix: what `holds` have behind their names in GGUF files; None: they are weights and their
        biases. Where it is given, `name` is whole.
      optional: where it is missing, the tensors' usual places are meant.
      channels: of a convolution: (channels, 1, width).
      logarithms: of minus the values.
      plain: a norm whose weights are those of GGUF files whatever `norm_offset` is.
      value_heads: (axis, the size of a head's part by its name in `tensors.sizes`): along this axis
        the last parts are those of value heads, the heads of each key head side by side.
      groups: a size's name: rows lie in so many groups, each of which has rows of all `parts`.
      parts: (tensor of GGUF files, rows in a group by the name of this size).
    """

    name: str
    holds: tuple[str, ...]
    alternating: bool = False
    transposed: bool | None = False
    bare: bool = False
    as_row: bool = False
    suffix: str | None = None
    optional: bool = False
    channels: bool = False
    logarithms: bool = False
    plain: bool = False
    value_heads: tuple[int, str] | None = None
    groups: str = ""
    parts: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class CheckpointClass:
    """A class of the transformers library, as `architectures` in config.json names it.

    Attributes:
      stored: tensors that have other names than `Tensor.checkpoint`, or another layout.
      interleaved_rope: rope rotates dimensions (2i, 2i + 1), as in GGUF files of the architecture.
      required: keys of config.json that other classes may leave out.
      optional: those that it may leave out, and other classes may not.
      defaults: keys that config.json may leave out -> what they then are.
      renamed: the usual key of config.json -> what this class calls it.
      biases: keys of config.json that may ask for biases -> the groups that they ask for.
      tensors: keys of config.json that may ask for tensors -> these, by GGUF's names.
      held: tensors that GGUF files may lack, and such checkpoints do not.
      lacking: keys of config.json that may say that layers lack some of them -> (config, layer) ->
        these.
      window: whether sliding_window counts; or the boolean key that says so.
      every_layer_windowed: the window is that of every layer, although GGUF files have none.
      partial_rope: partial_rotary_factor may say how much of a head is rotated.
      sections: mrope_section says how many pairs rotate by time, height and width.
      keys: further metadata: GGUF's key -> that of config.json.
      optional_keys: the same, of keys that config.json may leave out.
      computed: config.json -> still further metadata, or in the place of what other keys say.
      layer_types: which layers are windowed is what the key of this name says; the last is not.
      implied: keys of config.json that may only say what they must: key -> config -> its value.
      activations: what hidden_act may say, too, and means the architecture's activation.
      accepted: keys that are refused elsewhere -> what they may say here; `...`: anything.
      rope_by_type: rope_parameters has parameters of each type of layer, never of all of them.
      rope_needed: rope_parameters or rope_scaling must be there: the class's default is YaRN.
      tied: whether the output layer is the embedding where tie_word_embeddings does not say.
      tied_key: another key that says it, and is believed before that one.
      tied_by_text: text_config may say it, too, where config.json itself says no.
      text_config: a class that takes images, too: the object of this name describes the decoder.
      flat: config.json itself may describe it, as early files do.
      further_layers: the key of config.json that counts the layers behind the last, which predict
        further tokens and are not run.
      further_tensors: what the names of their tensors begin with, where they are no layers.
      quant_method: what quantization_config may say; experts are then MXFP4's blocks and scales.
    """

    name: str
    stored: tuple[Stored, ...] = ()
    interleaved_rope: bool = False
    required: tuple[str, ...] = ("num_key_value_heads",)
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    held: tuple[str, ...] = ()
    lacking: Mapping[str, Callable[[Any, int], tuple[str, ...]]] = dataclasses.field(
        default_factory=dict
    )
    window: bool | str = False
    every_layer_windowed: bool = False
    partial_rope: bool = False
    sections: bool = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    computed: Callable[[Any], Mapping[str, Any]] = lambda fields: {}
    layer_types: bool = False
    implied: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    activations: tuple[str, ...] = ()
    accepted: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_by_type: bool = False
    rope_needed: bool = False
    tied: bool = False
    tied_key: str = "tie_word_embeddings"
    tied_by_text: bool = False
    text_config: bool = False
    flat: bool = False
    further_layers: str | None = None
    further_tensors: str | None = None
    quant_method: str | None = None


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen; None: metadata says it.

    Attributes:
      gating: what makes scores of logits: "softmax", or "sigmoid".
      normalize: the weights of a token's experts add up to 1.
      scaled: metadata may say what weights are multiplied by.
      default_gating: (layers, vocab_size) -> gating where metadata may say it and does not.
    """

    gating: Literal["softmax", "sigmoid"] | None = "softmax"
    normalize: bool | None = True
    scaled: bool = True
    default_gating: Callable[[int, int], str] = lambda layers, vocab_size: "sigmoid"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder's kind; `Config` has its dimensions.

    Attributes:
      name: `general.architecture` in GGUF files.
      checkpoints: the classes of checkpoints that become it.
      input, output: the tensors before the layers and behind them.
      attention, norms, mlp: each layer's tensors.
      delta, convolution: those in the place of `attention` in layers with a gated delta net, or
        with a short convolution; (): there are no such layers.
      tiled_heads: value head h of a gated delta net takes key head h % key_heads, instead of
        h // (value_heads / key_heads).
      output_gate: attn_q has rows of a gate, too, behind those of each head's queries: attention is
        multiplied by its sigmoid.
      value_norm: values are normalized, by their root mean square alone.
      varied_kv_heads: `attention.head_count_kv` may differ between layers.
      local_heads: `attention.key_length_swa` may say how large the heads of windowed layers are.
      latent: attention is multi-head latent attention.
      predicts_further: the layer behind the last of its files may predict further tokens, by
        attention.
      per_layer_embeddings: layers may get parts of a token's embedding, and share keys and values.
      experts: those in the place of `mlp` in layers with experts; (): there are no such layers.
      further: those that each layer has beside them.
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
      divisors_in_metadata: llama.cpp reads no `rope_freqs.weight` of such files.
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
    input: tuple[Tensor, ...] = INPUT
    output: tuple[Tensor, ...] = OUTPUT
    attention: tuple[Tensor, ...] = ATTENTION
    delta: tuple[Tensor, ...] = ()
    convolution: tuple[Tensor, ...] = ()
    tiled_heads: bool = False
    output_gate: bool = False
    value_norm: bool = False
    varied_kv_heads: bool = False
    local_heads: bool = False
    latent: bool = False
    predicts_further: bool = False
    per_layer_embeddings: bool = False
    norms: tuple[Tensor, ...] = NORMS
    mlp: tuple[Tensor, ...] = GATED_MLP
    experts: tuple[Tensor, ...] = ()
    further: tuple[Tensor, ...] = ()
    fused: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    layer_norm: bool = False
    interleaved_rope: bool = False
    rotated: Callable[[int, bool], bool] | None = None
    optional_rope: bool = False
    local_rope_theta: float | Literal["global"] | None = None
    yarn_keys: bool = False
    divisors_in_metadata: bool = False
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
