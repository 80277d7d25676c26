"""Dataclasses that describe an architecture and its checkpoint classes, without dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .tensor_tables import ATTENTION, GATED_MLP, INPUT, NORMS, OUTPUT, Tensor

#: Soft cap of scores or logits that changes no float32. Files store it for no cap, because
#: llama.cpp divides by the cap.
NO_CAP = 1e6

#: Metadata key, without an architecture's name, of the number of experts whose scores add up to
#: their group's. llama.cpp does not know it, and adds up two.
GROUP_BEST = "jax_q4k.expert_group_best"
#: Key for whether rope in the checkpoint rotated dimensions (2i, 2i + 1), if its class would say
#: otherwise; adapters of the checkpoint have their rows in its order.
CHECKPOINT_INTERLEAVED = "jax_q4k.checkpoint_rope_interleave"
#: Key for the factor by which queries (in MLA, their rotated part) exceed the checkpoint's, because
#: the architecture implies another scale of scores; adapters have the checkpoint's queries.
QUERY_FACTOR = "jax_q4k.checkpoint_query_factor"

#: Far above any real model; bounds the work that a malformed file can cause.
MAX_LAYERS = 1024

#: Token mixer of a layer: attention, a gated delta net or a short convolution.
MixerKind = Literal["attention", "delta", "convolution"]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint tensor whose name or layout differs from `Tensor.checkpoint`.

    Sizes are given by their names in `tensors.sizes`.

    Attributes:
      name: its name, without `model.layers.LAYER.` and `.weight`. With `{expert}` there is one
        tensor per expert, and `{expert}` is its number.
      holds: GGUF tensors whose rows are concatenated in it, in this order.
      alternating: rows of the GGUF tensors are interleaved instead of concatenated.
      transposed: matrices are (k, n). None means that the shape decides, since only transformers 4
        transposes them.
      flat: the rows of all experts' matrices are concatenated in one matrix.
      bare: the name has no `.weight`, and the name of the bias ends in `_bias`.
      as_row: a vector, stored as a matrix with one row.
      suffix: suffix of the names of `holds` in GGUF files; `name` is then complete. None means that
        `holds` are weights and their biases.
      optional: if the tensor is missing, a later `Stored` of `holds` or the default names are used.
      channels: a convolution, stored as (channels, 1, width).
      logarithms: stores the logarithms of the negated values.
      plain: a norm to which `norm_offset` does not apply.
      value_heads: (axis, size of a head's part). The value heads are last along this axis, and the
        value heads of one key head are adjacent.
      skipped: rows before those of `holds`, which are not read.
      groups: size that counts groups of rows; each group has rows of all `parts`.
      parts: (GGUF tensor, size that counts its rows in a group).
    """

    name: str
    holds: tuple[str, ...]
    alternating: bool = False
    transposed: bool | None = False
    flat: bool = False
    bare: bool = False
    as_row: bool = False
    suffix: str | None = None
    optional: bool = False
    channels: bool = False
    logarithms: bool = False
    plain: bool = False
    value_heads: tuple[int, str] | None = None
    skipped: int = 0
    groups: str = ""
    parts: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class CheckpointClass:
    """Checkpoint layout of a transformers class, which `architectures` in config.json names.

    Attributes:
      selected_by: key of config.json; if it is not 0, this class replaces others of its name.
      stored: tensors whose names or layouts differ from `Tensor.checkpoint`.
      tensor_names: (regular expression, replacement) of parts of tensors' names, applied in this
        order; then layers' names begin with model.layers.LAYER.
      unused: regular expression of further tensors, with these names, which are not read.
      held_biases: groups of biases that every checkpoint holds.
      interleaved_rope: rope rotates dimensions (2i, 2i + 1), as in GGUF files of the architecture.
      interleave_key: boolean key of config.json that may say otherwise.
      required: keys of config.json that this class requires and others do not.
      optional: keys that this class may omit and others may not.
      defaults: key of config.json -> its value if omitted.
      renamed: usual key of config.json -> this class's name for it.
      published: key in its publisher's config.json -> transformers' name for the same key.
      biases: boolean key of config.json -> groups of biases that it enables.
      zero_biases: boolean key of config.json -> groups of biases, or optional vectors by GGUF name,
        that checkpoints lack if it is false. GGUF files hold zeros, as llama.cpp requires.
      tensors: boolean key of config.json -> tensors that it enables, by GGUF name.
      held: tensors that are optional in GGUF files but always present in such checkpoints.
      together: optional tensors of a layer of which checkpoints hold all or none.
      without_zeros: tensors among `held` that llama.cpp lacks; left out if all values are 0.
      lacking: boolean key of config.json -> function of (config, layer) that returns the tensors
        that the layer then lacks.
      window: whether sliding_window applies, or the boolean key that enables it.
      windowed: function of (config.json, layer) that tells whether the window applies to a layer if
        layer_types is missing. None means `Architecture.windowed`; if that is None, too, the window
        applies to every layer, whatever layer_types lists.
      partial_rope: partial_rotary_factor may give the rotated fraction of a head. Other classes
        ignore it.
      sections: mrope_section gives the numbers of pairs rotated by time, height and width.
      free_sections: they need not add up, because they only select positions, which are equal for
        text.
      keys: further metadata: GGUF key -> key of config.json.
      optional_keys: like `keys`, for keys that config.json may omit.
      computed: function of config.json that returns further metadata, and overrides other keys.
      implied: key of config.json -> function of the config that returns its only accepted value.
      activations: further accepted values of hidden_act; all mean the architecture's activation.
      accepted: key that other classes reject -> values accepted here; `...` accepts any value.
      rope_by_type: rope_parameters has parameters for each layer type, never common ones.
      rope_needed: rope_parameters or rope_scaling is required, because the class defaults to YaRN.
      tied: whether input and output embeddings are tied if tie_word_embeddings is missing.
      tied_key: another key for this, which takes precedence.
      tied_by_text: text_config may tie them even if config.json itself says no.
      text_config: a multimodal class; the object text_config describes the decoder.
      flat: config.json itself may describe the decoder instead, as in early files.
      reranker: text in the name of a model, or in a title of its README.md, that says that it is a
        reranker; "": always; None: never. Its head is `score` if `computed` has its labels,
        else the output layer's rows of yes and no.
      further_layers: key of config.json that counts the multi-token-prediction (MTP) layers after
        the last layer, which are not run.
      further_tensors: prefix of the names of MTP tensors that are not numbered as layers.
    """

    name: str
    selected_by: str | None = None
    stored: tuple[Stored, ...] = ()
    tensor_names: tuple[tuple[str, str], ...] = ()
    unused: str = ""
    held_biases: tuple[str, ...] = ()
    interleaved_rope: bool = False
    interleave_key: str | None = None
    required: tuple[str, ...] = ("num_key_value_heads",)
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    zero_biases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    held: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    without_zeros: tuple[str, ...] = ()
    lacking: Mapping[str, Callable[[Any, int], tuple[str, ...]]] = dataclasses.field(
        default_factory=dict
    )
    window: bool | str = False
    windowed: Callable[[Any, int], bool] | None = None
    partial_rope: bool = False
    sections: bool = False
    free_sections: bool = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    computed: Callable[[Any], Mapping[str, Any]] = lambda fields: {}
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
    reranker: str | None = None
    further_layers: str | None = None
    further_tensors: str | None = None


@dataclasses.dataclass(frozen=True)
class Routing:
    """Routing of an architecture's MoE layers.

    Attributes:
      gating: function from logits to scores, "softmax" or "sigmoid"; None means that metadata has
        it.
      normalize: whether the weights of a token's experts are normalized to sum to 1, unless
        metadata says otherwise.
      default_gating: function of (layers, vocab_size); used if metadata lacks the gating.
    """

    gating: Literal["softmax", "sigmoid"] | None = "softmax"
    normalize: bool = True
    default_gating: Callable[[int, int], str] = lambda layers, vocab_size: "sigmoid"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Properties of an architecture; `Config` has the dimensions.

    Attributes:
      name: `general.architecture` in GGUF files.
      checkpoints: transformers classes that convert to it.
      input, output: tensors before and after the layers.
      attention, norms, mlp: tensors of each layer.
      delta, convolution: tensors that replace `attention` in layers with a gated delta net or a
        short convolution; (): no such layers.
      tiled_heads: value head h of a gated delta net uses key head h % key_heads instead of
        h // (value_heads / key_heads).
      output_gate: in attn_q, gate rows follow the rows of each head's queries; the sigmoid of the
        gate multiplies the attention output.
      value_norm: values are divided by their root mean square; the norm has no weight.
      varied_kv_heads: `attention.head_count_kv` may differ between layers.
      local_heads: `attention.key_length_swa` may give another head_dim for windowed layers.
      latent: attention is multi-head latent attention.
      predicts_further: files may have a multi-token-prediction layer, with attention, after the
        last layer.
      per_layer_embeddings: layers may have per-layer embeddings, and share keys and values.
      experts: tensors that replace `mlp` in MoE layers; (): no such layers.
      interleaved_experts: `moe_every_n_layers` says which layers have experts: i if i % n == 1.
      further: further tensors of each layer.
      fused: tensors in files that hold the rows of several, see `fused_names.FUSED`. attn_qkv and
        ffn_gate_up_exps are read in every architecture.
      biases: groups of biases that every file holds.
      layer_norm: norms are LayerNorm, which subtracts the mean, instead of RMSNorm.
      interleaved_rope: rope rotates dimensions (2i, 2i + 1) instead of (i, i + rope_dim / 2).
      rotated: function of (layer, is windowed) that tells whether the layer uses rope, unless
        `rope.rotated_layers` does; None means that all layers do.
      optional_rope: `rope.scaling.finetuned` may say that no layer uses rope.
      local_rope_theta: rope base in windowed layers, where `rope.freq_base_swa` may override it and
        rope scaling does not apply. "global": that of the other layers. None means that windowed
        layers rotate like all others.
      yarn_keys: `rope.scaling.yarn_*` may set YaRN's constants.
      rope_freqs: llama.cpp reads `rope_freqs.weight` from such files.
      temperature: `attention.temperature_scale` may scale queries by position.
      activation: a name of `jax_q4k.ACTIVATION_FUNCTIONS`, applied to the gate, or to `up` in
        networks without a gate.
      windowed: function of the layer that tells whether `attention.sliding_window` applies, unless
        `attention.sliding_window_pattern` does. None means that without this key no layer is
        windowed, and the window limits the context length.
      window: default of `attention.sliding_window` in tokens; 0: no layer is windowed.
      attention_soft_cap: default of `attn_logit_softcapping`; scores become
        cap * tanh(score / cap). 0, `NO_CAP` or more: no cap. None means that the key is rejected.
      final_soft_cap: the same for logits, with `final_logit_softcapping`.
      scales: keys that metadata may set: `embedding_scale`, `residual_scale` (of sublayer outputs)
        and `attention.scale` (of scores).
      logit_scale: maps `logit_scale`, which files then must hold, to the factor of logits.
      embedding_scale: maps the config to the factor of embeddings; None means 1.
      attention_scale: maps the config to the factor of scores if metadata has none; None means
        head_dim ** -0.5.
      bidirectional: tokens attend to those after them, too: an encoder, which makes embeddings and
        no text. A window is symmetric, half of it on either side.
      alibi: exponent of the smallest slope of ALiBi (https://arxiv.org/abs/2108.12409), which
        subtracts slope * distance from scores; 0: none.
      full_first: if `attention.sliding_window_pattern` is a number n, the first of every n layers
        has full attention, instead of the last.
      head_activation, head_pooling: activation and pooling of the classification head of rerankers.
      routing: routing of MoE layers.
      metadata: maps the config to further metadata of files, with keys relative to the name.
      norm_offset: added to the norm weights of checkpoints.
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
    interleaved_experts: bool = False
    further: tuple[Tensor, ...] = ()
    fused: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    layer_norm: bool = False
    interleaved_rope: bool = False
    rotated: Callable[[int, bool], bool] | None = None
    optional_rope: bool = False
    local_rope_theta: float | Literal["global"] | None = None
    yarn_keys: bool = False
    rope_freqs: bool = False
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
    bidirectional: bool = False
    alibi: float = 0.0
    full_first: bool = False
    head_activation: str = "tanh"
    head_pooling: str = "cls"
    routing: Routing = Routing()
    metadata: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    norm_offset: float = 0.0
