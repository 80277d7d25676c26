"""Tables of tensors that architectures share: names, shapes, module paths in the decoder."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Description of a tensor that the model, or each layer, has.

    Attributes:
      gguf: name in GGUF files, without the prefix `blk.LAYER.` and `suffix`.
      module: module path in Decoder, or in DecoderLayer.
      checkpoint: name in checkpoints, without `model.layers.LAYER.` and `suffix`; None means that
        checkpoints do not store the tensor. With `{expert}` there is one tensor per expert, and
        `{expert}` is its number.
      shape: row-major, (n, k) for a matrix, by the names of `tensors.sizes`.
      split: axis that tensor parallelism splits; None means replicated.
      bias: group of biases that the tensor's bias belongs to; None means that it has no bias.
      rotated: Config field that counts the heads in its rows, if rope rotates them.
      required: whether every file holds it.
      suffix: suffix of the name; "": none.
      exact: read as float32 and never quantized.
      table: a plain array instead of a Linear: an embedding table, or taps of a convolution.
      where, unless: names of sizes. The tensor exists if size `where` is not 0 and size `unless` is
        0; "" means no condition.
    """

    gguf: str
    module: str
    checkpoint: str | None
    shape: str
    split: int | None = None
    bias: str | None = None
    rotated: str | None = None
    required: bool = True
    suffix: str = "weight"
    exact: bool = False
    table: bool = False
    where: str = ""
    unless: str = ""

    @property
    def name(self) -> str:
        """Name in GGUF files, without `blk.LAYER.`."""
        return f"{self.gguf}.{self.suffix}" if self.suffix else self.gguf

    @property
    def is_norm(self) -> bool:
        """Whether it is the weight of a norm, which has its own module class."""
        return self.gguf.rstrip("_12").endswith(("_norm", ".norm"))

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a Linear or ExpertLinear, which may be quantized."""
        several = len(self.shape.split()) > 1
        return several and not (self.is_norm or self.exact or self.table)

    @property
    def of_experts(self) -> bool:
        """Whether it is a stack of matrices, one per expert."""
        return len(self.shape.split()) == 3


def optional(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns copies of the tensors that files may lack (`required` is False)."""
    return tuple(dataclasses.replace(tensor, required=False) for tensor in tensors)


#: Groups of biases that files of any architecture may hold.
OPTIONAL_BIASES = (
    *("qkv", "attention_output", "mlp", "down", "output"),
    *("convolution", "head", "labels"),
)

#: Suffixes of scales that any matrix may have, float32 (1,) or (experts,), as in NVFP4 files: the
#: factor of its products, and the scale of calibrated activations, which products ignore.
SCALES = ("scale", "input_scale")

INPUT = (
    Tensor("token_embd", "embedding", "model.embed_tokens", "vocab hidden", 0, table=True),
    Tensor("rope_freqs", "rope_divisors.all", None, "rope_pairs", required=False),
    Tensor("rope_factors_long", "rope_divisors.long", None, "rope_pairs", required=False),
    Tensor("rope_factors_short", "rope_divisors.short", None, "rope_pairs", required=False),
)
OUTPUT = (
    Tensor("output_norm", "norm", "model.norm", "hidden", bias="norm"),
    Tensor("output", "output", "lm_head", "vocab hidden", 0, "output", required=False),  # else tied
)
#: LFM2 calls the output norm token_embd_norm, although it does not normalize embeddings.
OUTPUT_BESIDE_EMBEDDING = (
    Tensor("token_embd_norm", "norm", "model.embedding_norm", "hidden"),
    OUTPUT[1],
)

ATTENTION = (
    Tensor("attn_q", "attention.query", "self_attn.q_proj", "q hidden", 0, "qkv", "num_heads"),
    Tensor("attn_k", "attention.key", "self_attn.k_proj", "kv hidden", 0, "qkv", "num_kv_heads"),
    Tensor("attn_v", "attention.value", "self_attn.v_proj", "kv hidden", 0, "qkv"),
    Tensor(
        "attn_output", "attention.output", "self_attn.o_proj", "hidden q", 1, "attention_output"
    ),
)
SINKS = (Tensor("attn_sinks", "attention.sinks", "self_attn.sinks", "heads"),)
#: Norms of each head's queries and keys.
QK_NORMS = (
    Tensor("attn_q_norm", "attention.q_norm", "self_attn.q_norm", "head"),
    Tensor("attn_k_norm", "attention.k_norm", "self_attn.k_norm", "k_head"),
)
#: Norms over all heads' queries and keys.
WIDE_QK_NORMS = (
    Tensor("attn_q_norm", "attention.q_norm", "self_attn.q_norm", "q"),
    Tensor("attn_k_norm", "attention.k_norm", "self_attn.k_norm", "kv"),
)
#: Norms of each head's queries and keys, with separate weights per head.
HEADWISE_QK_NORMS = (
    Tensor("attn_q_norm", "attention.q_norm", "self_attn.q_norm", "heads head", required=False),
    Tensor("attn_k_norm", "attention.k_norm", "self_attn.k_norm", "kv_heads head", required=False),
)

#: Attention with an output gate: attn_q holds the gate of each head after its queries.
GATED_ATTENTION = (dataclasses.replace(ATTENTION[0], shape="gated_q hidden"), *ATTENTION[1:])

#: Multi-head latent attention; queries may come from a low-rank vector of size `query_rank`.
LATENT_ATTENTION = (
    Tensor(
        "attn_q",
        "attention.query",
        "self_attn.q_proj",
        "q hidden",
        rotated="num_heads",
        unless="query_rank",
    ),
    Tensor("attn_q_a", "attention.query_a", "self_attn.q_a_proj", "query_rank hidden", bias="qkv"),
    Tensor("attn_q_a_norm", "attention.query_a_norm", "self_attn.q_a_layernorm", "query_rank"),
    Tensor(
        "attn_q_b", "attention.query_b", "self_attn.q_b_proj", "q query_rank", rotated="num_heads"
    ),
    Tensor(
        "attn_kv_a_mqa",
        "attention.kv_a",
        "self_attn.kv_a_proj_with_mqa",
        "latent_key hidden",
        bias="qkv",
        rotated="num_kv_heads",
    ),
    Tensor("attn_kv_a_norm", "attention.kv_a_norm", "self_attn.kv_a_layernorm", "latent"),
    Tensor("attn_k_b", "attention.key_b", "self_attn.kv_b_proj", "heads latent key_part"),
    Tensor("attn_v_b", "attention.value_b", "self_attn.kv_b_proj", "heads value latent"),
    Tensor(
        "attn_output",
        "attention.output",
        "self_attn.o_proj",
        "hidden values",
        bias="attention_output",
    ),
)

#: Gated delta net, which replaces attention.
DELTA = (
    Tensor("attn_qkv", "delta.qkv", "linear_attn.in_proj_qkv", "delta_channels hidden"),
    Tensor("attn_gate", "delta.gate", "linear_attn.in_proj_z", "delta_values hidden"),
    Tensor("ssm_alpha", "delta.alpha", "linear_attn.in_proj_a", "delta_heads hidden"),
    Tensor("ssm_beta", "delta.beta", "linear_attn.in_proj_b", "delta_heads hidden"),
    Tensor(
        "ssm_conv1d",
        "delta.taps",
        "linear_attn.conv1d",
        "delta_channels delta_width",
        exact=True,
        table=True,
    ),
    Tensor(
        "ssm_dt", "delta.step_bias", "linear_attn.dt_bias", "delta_heads", suffix="bias", exact=True
    ),
    Tensor("ssm_a", "delta.decay", "linear_attn.A_log", "delta_heads", suffix="", exact=True),
    Tensor("ssm_norm", "delta.output_norm", "linear_attn.norm", "delta_head"),
    Tensor("ssm_out", "delta.output", "linear_attn.out_proj", "hidden delta_values"),
)
#: Short convolution, which replaces attention.
CONVOLUTION = (
    Tensor(
        "shortconv.in_proj",
        "convolution.input",
        "conv.in_proj",
        "hidden*3 hidden",
        bias="convolution",
    ),
    Tensor(
        "shortconv.conv",
        "convolution.taps",
        "conv.conv",
        "hidden convolution_width",
        exact=True,
        table=True,
    ),
    Tensor(
        "shortconv.conv",
        "convolution.bias",
        "conv.conv",
        "hidden",
        required=False,
        suffix="bias",
        exact=True,
    ),
    Tensor(
        "shortconv.out_proj",
        "convolution.output",
        "conv.out_proj",
        "hidden hidden",
        bias="convolution",
    ),
)

NORMS = (
    Tensor("attn_norm", "attention.norm", "input_layernorm", "hidden", bias="norm"),
    Tensor("ffn_norm", "mlp.norm", "post_attention_layernorm", "hidden", bias="norm"),
)
#: Like NORMS, with another name in GGUF files.
NORMS_AFTER_ATTENTION = (
    NORMS[0],
    Tensor("post_attention_norm", "mlp.norm", "post_attention_layernorm", "hidden"),
)
NORMS_AND_POST_NORMS = (
    Tensor("attn_norm", "attention.norm", "input_layernorm", "hidden"),
    Tensor("post_attention_norm", "attention.post_norm", "post_attention_layernorm", "hidden"),
    Tensor("ffn_norm", "mlp.norm", "pre_feedforward_layernorm", "hidden"),
    Tensor("post_ffw_norm", "mlp.post_norm", "post_feedforward_layernorm", "hidden"),
)
POST_NORMS = (NORMS_AND_POST_NORMS[1], NORMS_AND_POST_NORMS[3])
#: One norm for attention and MLP in parallel.
PARALLEL_NORM = (Tensor("attn_norm", "norm", "input_layernorm", "hidden"),)

GATED_MLP = (
    Tensor("ffn_gate", "mlp.gate", "mlp.gate_proj", "inner hidden", 0, "mlp"),
    Tensor("ffn_up", "mlp.up", "mlp.up_proj", "inner hidden", 0, "mlp"),
    Tensor("ffn_down", "mlp.down", "mlp.down_proj", "hidden inner", 1, "mlp"),
)
PLAIN_MLP = (
    Tensor("ffn_up", "mlp.up", "mlp.c_fc", "inner hidden", 0, "mlp"),
    Tensor("ffn_down", "mlp.down", "mlp.c_proj", "hidden inner", 1, "mlp"),
)

EXPERTS = (
    Tensor("ffn_gate_inp", "mlp.router", "mlp.gate", "experts hidden", bias="router", exact=True),
    Tensor(
        "ffn_gate_exps",
        "mlp.gate",
        "mlp.experts.{expert}.gate_proj",
        "experts expert hidden",
        0,
        "experts",
    ),
    Tensor(
        "ffn_up_exps",
        "mlp.up",
        "mlp.experts.{expert}.up_proj",
        "experts expert hidden",
        0,
        "experts",
    ),
    Tensor(
        "ffn_down_exps",
        "mlp.down",
        "mlp.experts.{expert}.down_proj",
        "experts hidden expert",
        0,
        "experts",
    ),
)
#: Shared expert, in models that have one.
SHARED_EXPERT = (
    Tensor(
        "ffn_gate_shexp",
        "mlp.shared.gate",
        "mlp.shared_expert.gate_proj",
        "shared hidden",
        0,
        "mlp",
    ),
    Tensor(
        "ffn_up_shexp",
        "mlp.shared.up",
        "mlp.shared_expert.up_proj",
        "shared hidden",
        0,
        "mlp",
    ),
    Tensor(
        "ffn_down_shexp",
        "mlp.shared.down",
        "mlp.shared_expert.down_proj",
        "hidden shared",
        1,
        "mlp",
    ),
)
SHARED_EXPERT_GATE = (
    Tensor("ffn_gate_inp_shexp", "mlp.shared_gate", "mlp.shared_expert_gate", "hidden", exact=True),
)
SELECTION_BIAS = (
    Tensor(
        "exp_probs_b",
        "mlp.selection_bias",
        "mlp.gate.e_score_correction_bias",
        "experts",
        suffix="bias",
        exact=True,
    ),
)

#: A dense MLP and experts in parallel (Gemma 4); the last norm applies to their sum.
DENSE_BESIDE_EXPERTS = (
    Tensor("ffn_norm", "mlp.dense.norm", "pre_feedforward_layernorm", "hidden"),
    Tensor("ffn_gate", "mlp.dense.gate", "mlp.gate_proj", "inner hidden", 0),
    Tensor("ffn_up", "mlp.dense.up", "mlp.up_proj", "inner hidden", 0),
    Tensor("ffn_down", "mlp.dense.down", "mlp.down_proj", "hidden inner", 1),
    Tensor("post_ffw_norm_1", "mlp.dense.post_norm", "post_feedforward_layernorm_1", "hidden"),
    Tensor("pre_ffw_norm_2", "mlp.experts.norm", "pre_feedforward_layernorm_2", "hidden"),
    Tensor("ffn_gate_inp", "mlp.experts.router", "router.proj", "experts hidden", exact=True),
    Tensor(
        "ffn_gate_inp",
        "mlp.experts.router_scale",
        "router.scale",
        "hidden",
        suffix="scale",
        exact=True,
    ),
    *(dataclasses.replace(t, module=t.module.replace("mlp.", "mlp.experts.")) for t in EXPERTS[1:]),
    Tensor("post_ffw_norm_2", "mlp.experts.post_norm", "post_feedforward_layernorm_2", "hidden"),
    NORMS_AND_POST_NORMS[3],
)

#: Per-layer embeddings.
PER_LAYER_INPUT = (
    Tensor(
        "per_layer_token_embd",
        "per_layer.embedding",
        "model.embed_tokens_per_layer",
        "vocab per_layer*layers",
        0,
        table=True,
    ),
    Tensor(
        "per_layer_model_proj",
        "per_layer.projection",
        "model.per_layer_model_projection",
        "per_layer*layers hidden",
    ),
    Tensor("per_layer_proj_norm", "per_layer.norm", "model.per_layer_projection_norm", "per_layer"),
)
PER_LAYER = (
    Tensor("inp_gate", "per_layer.gate", "per_layer_input_gate", "per_layer hidden"),
    Tensor("proj", "per_layer.output", "per_layer_projection", "hidden per_layer"),
    Tensor(
        "post_norm",
        "per_layer.post_norm",
        "post_per_layer_input_norm",
        "hidden",
        where="per_layer",
    ),
)
OUTPUT_SCALE = (
    Tensor("layer_output_scale", "output_scale", "layer_scalar", "one", required=False, exact=True),
)

#: Module path in a DecoderLayer -> a tensor of any architecture that may be there.
OF_A_LAYER = {
    tensor.module: tensor
    for tensor in (
        *PARALLEL_NORM,
        *ATTENTION,
        *SINKS,
        *QK_NORMS,
        *DELTA,
        *CONVOLUTION,
        *LATENT_ATTENTION[1:-1],
        *NORMS_AND_POST_NORMS,
        *EXPERTS,
        *GATED_MLP,
        *SHARED_EXPERT,
        *SHARED_EXPERT_GATE,
        *SELECTION_BIAS,
        *DENSE_BESIDE_EXPERTS,
        *PER_LAYER,
        *OUTPUT_SCALE,
    )
}
