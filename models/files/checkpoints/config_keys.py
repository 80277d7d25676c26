"""Rejects config.json files with values that are not supported, and finds unknown keys.

Keys of features that some class has and that are missing here are rejected, because a newer class
or the publisher's own code may use them. Other unknown keys are ignored with a warning, and keys
that only other classes read without one, as in the transformers library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...architectures import ARCHITECTURES
from ...architectures.base import CheckpointClass
from ...support.json_fields import JSONFields

_CLASSES = tuple(c for architecture in ARCHITECTURES.values() for c in architecture.checkpoints)

#: Keys that this package reads in addition to those that `CheckpointClass` names.
_READ = frozenset(
    """
    architectures auto_map model_type text_config quantization_config compression_config
    vocab_size max_position_embeddings hidden_size num_hidden_layers intermediate_size
    num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act hidden_activation
    layer_types sliding_window sliding_window_pattern max_window_layers use_sliding_window
    no_rope_layers no_rope_layer_interval tie_word_embeddings num_experts num_local_experts
    rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings
    mrope_section num_mtp_layers
    attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim
    hidden_size_per_layer_input num_global_key_value_heads num_kv_shared_layers per_layer_config
    top_k_experts use_double_wide_mlp vocab_size_per_layer_input moe_intermediate_size
    block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of full_attn_idxs
    kv_lora_rank qk_nope_head_dim qk_rope_head_dim mlp_layer_types first_k_dense_replace
    """.split()
)

#: Keys that never change the logits of the supported classes.
_HARMLESS = frozenset(
    # Origin and types.
    """
    model_name name_or_path transformers_version transformers.js_config base_model dtype torch_dtype
    mamba_ssm_dtype auto_class bf16 fp16 fp32 is_llama_config model_version neuron onnx
    optimum_version trust_remote_code use_bfloat16 transformers_weights init_device hf_version
    license keys_to_ignore_at_inference mergekit datasets
    """.split()
    # Training.
    + """
    aux_loss_alpha ep_size gradient_checkpointing layerdrop loss_type neftune_noise_alpha
    output_router_logits pretraining_tp router_jitter_noise seq_aux tf_legacy_loss
    axolotl_config neftune_alpha training_args z_loss z_loss_coefficient
    """.split()
    # Return values and implementation of the transformers class.
    + """
    attn_implementation attention_softmax_in_fp32 chunk_size_feed_forward experts_implementation
    dual_chunk_attention_config flash_attention is_decoder
    output_attentions output_hidden_states output_past return_dict scale_attention_softmax_in_fp32
    softmax_in_fp32
    tie_last_hidden_states torchscript use_cache use_flash_attention use_flash_attn use_return_dict
    base_model_pp_plan base_model_tp_plan flash_attn fused_rms_norm logits_to_keep
    num_logits_to_keep tensor_parallel_size use_flash_attention_2 use_fused_rope
    """.split()
    # Classification heads.
    + """
    finetuning_task id2label label2id num_labels problem_type task_specific_params
    """.split()
    # Tokenizers.
    + """
    bos_token chat_template eos_token max_seq_length max_sequence_length model_max_length pad_token
    prefix seq_length special_tokens tokenizer_class tokenizer_padding_side unk_token vocab_file
    """.split()
    # Generation; transformers 5 reads these only from generation_config.json.
    + """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    cache_implementation diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    length_penalty max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
    """.split()
    # Images and sound.
    + """
    audio_config audio_ms_per_token ignore_index image_seq_length language_model_only
    mm_tokens_per_image
    multimodal_projector_bias projector_hidden_act spatial_merge_size vision_config
    vision_feature_layer vision_feature_select_strategy vision_soft_tokens_per_image
    """.split()
    # Derived from other keys, or used only by the original training code.
    + """
    activation_function block_dim block_mlp_init_scale block_norm_eps block_out_init_scale
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init experts_per_token
    initial_context_length layer_norm_epsilon num_experts_per_token num_heads qk_head_dim
    theta use_embedding_sharing use_parallel_embedding
    """.split()
)
#: Patterns of such keys: private names, comments, token ids, training, multi-token prediction.
_HARMLESS_PATTERN = re.compile(
    r"_.*|//.*|#.*|\$.*|unsloth_.*|mtp_.*|initializer_.*"
    r"|.*(_token_ids?|_token_index|dropout|_pdrop|dropout_prob|_loss_coef|_initializer_range)"
)

#: Key of an unsupported feature -> values that disable it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False,),
    "per_layer_config": ({},),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "activation": ("swiglu", "silu"),
    "rope_interleaved": (False,),
    "use_moe": (False,),
    "quantization": (),
    "alibi": (False,),
    "clip_qkv": (),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "rotary_pct": (1,),
    "position_embedding_type": ("rope", "rope_gptj"),
    "layer_switch": (4,),
    "order_of_interleaved_layers": ("local_attn_first",),
    "use_gated_activation": (True,),
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
    "use_mrope": (False,),
    "scale_attn_weights": (True,),
    "mlp_type": ("default",),
    "norm_type": ("layer_norm",),
    "output_gate_type": ("swish",),
}

#: Keys of features that classes elsewhere have; 0, false and empty values disable them.
_SWITCHES = frozenset(
    """
    activation_sparsity_pattern apply_residual_connection_post_layernorm attention_chunk_size
    attention_logit_cap attention_window_size attn_config attn_logit_softcap
    attn_temperature_tuning compress_rates dim_model_base ffn_config gate_soft_cap hc_count hc_mult
    index_topk indexer_types kda_lower_bound log_scaling_alpha logits_soft_cap mlp_gate_softcap
    mlp_up_softcap moe_apply_router_weight_on_input moe_router_logit_softcapping mup_enabled
    output_logit_soft_cap parallel_attn prefix_lm qk_clip qk_l2_clip_threshold qk_layernorm
    rotary_dim scale_depth scale_embedding sliding_window_size softmax_scale use_mup
    use_parallel_residual use_post_norm use_sandwich_norm window_size
    """.split()
)
#: Multipliers that classes elsewhere have; 1 disables them.
_MULTIPLIERS = frozenset(
    """
    attention_in_multiplier attention_out_multiplier attention_value_scale embedding_scale
    full_attn_alpha_factor full_attn_beta_factor interleave_moe_layer_step key_multiplier
    linear_attn_alpha_factor linear_attn_beta_factor lm_head_multiplier logits_mup_width_multiplier
    loop_num_passes mlp_alpha_factor mlp_beta_factor moe_routed_scaling_factor residual_scale
    rope_ratio route_scale router_scaling_factor scale_emb
    """.split()
)
_NEUTRAL |= dict.fromkeys(_MULTIPLIERS, (1,))

#: Keys of rope_parameters and rope_scaling that are read, or that have no effect.
_ROPE = frozenset(
    """
    attention_factor beta_fast beta_slow factor finetuned full_attention high_freq_factor
    llama_4_scaling_beta long_factor low_freq_factor max_position_embeddings mrope_interleaved
    mrope_section mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor
    rope_theta rope_type short_factor sliding_attention truncate type
    """.split()
)
#: Multipliers of rope parameters that other kinds of scaling have; 1 disables them.
_ROPE_MULTIPLIERS = frozenset(
    "alpha attn_factor extrapolation_factor long_mscale rope_ratio rope_scale short_mscale".split()
)


#: model_type -> classes that use it; the first is the default if `architectures` is missing.
CLASSES_OF_TYPES: dict[str | None, tuple[str, ...]] = {
    "bert": (
        "BertModel",
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "JinaBertModel",
        "JinaBertForMaskedLM",
    ),
    "nomic_bert": ("NomicBertModel",),
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"),
    "camembert": ("CamembertModel", "CamembertForMaskedLM"),
    "modernbert": (
        "ModernBertModel",
        "ModernBertForMaskedLM",
        "ModernBertForSequenceClassification",
    ),
    "roberta": ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
    "xlm-roberta": (
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
    ),
    "cohere2": ("Cohere2ForCausalLM",),
    "cohere": ("CohereForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "gemma4_text": ("Gemma4ForCausalLM",),
    "gemma4": ("Gemma4ForConditionalGeneration",),
    "glm4": ("Glm4ForCausalLM",),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "granitemoe": ("GraniteMoeForCausalLM",),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2_moe": ("Lfm2MoeForCausalLM",),
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "ministral3": ("Ministral3ForCausalLM",),
    "mistral3": ("Mistral3ForConditionalGeneration",),
    "olmo2": ("Olmo2ForCausalLM",),
    "olmo3": ("Olmo3ForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration",),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM",),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_next": ("Qwen3NextForCausalLM",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "starcoder2": ("Starcoder2ForCausalLM",),
}


def _named(checkpoint: CheckpointClass) -> Iterator[str]:
    """Yields the keys of config.json that the description of a checkpoint class names."""
    yield from checkpoint.required
    for mapping in (
        checkpoint.defaults,
        checkpoint.biases,
        checkpoint.zero_biases,
        checkpoint.tensors,
        checkpoint.lacking,
        checkpoint.implied,
        checkpoint.accepted,
        checkpoint.published,
    ):
        yield from mapping
    for renamed in (checkpoint.renamed, checkpoint.keys, checkpoint.optional_keys):
        yield from renamed.values()
    yield checkpoint.tied_key
    if checkpoint.interleave_key is not None:
        yield checkpoint.interleave_key
    if checkpoint.further_layers is not None:
        yield checkpoint.further_layers


_KNOWN = _READ.union(_HARMLESS, _NEUTRAL, _SWITCHES, *map(_named, _CLASSES))


def is_known(key: str) -> bool:
    """Returns whether a key is read, has no effect, or accepts neutral values."""
    return key in _KNOWN or _HARMLESS_PATTERN.fullmatch(key) is not None


def check(fields: JSONFields, checkpoint: CheckpointClass) -> list[str]:
    """Raises CheckpointError for features that this package would ignore; returns unknown keys.

    The error names the key. Ignores keys that are null.
    """
    of_class, unknown = frozenset(_named(checkpoint)), []  # the class may be newer than `_KNOWN`
    for key, value in fields.values.items():
        if value is None:
            continue
        if key in _NEUTRAL:
            accepted = checkpoint.accepted.get(key, ())
            if accepted is not ... and value not in (*_NEUTRAL[key], *accepted):
                _refuse(fields, key)
        elif key in _SWITCHES and key not in of_class:
            if value:
                _refuse(fields, key)
        elif not is_known(key) and key not in of_class:
            unknown.append(fields.prefix + key)
    return unknown


def check_code(fields: JSONFields, name: str) -> None:
    """Raises CheckpointError if auto_map has custom code to generate text.

    Accepts the code of class `name`.
    """
    auto_map = fields.object("auto_map")
    for key in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq"):
        code = None if auto_map is None else auto_map.string(key, None)
        if auto_map is not None and code is not None and code.rpartition(".")[2] != name:
            auto_map.fail(key, f"is {code!r:.100}, the model's own code, expected {name}")


def check_rope(fields: JSONFields) -> list[str]:
    """Raises CheckpointError for rope parameters without support; returns unknown keys."""
    unknown = []
    for key, value in fields.values.items():
        if key in _ROPE_MULTIPLIERS and value not in (None, 1):
            _refuse(fields, key)
        elif value is not None and key not in _ROPE | _ROPE_MULTIPLIERS:
            unknown.append(fields.prefix + key)
    return unknown


def _refuse(fields: JSONFields, key: str) -> None:
    fields.fail(key, f"is {fields.values[key]!r:.100}, which is not supported")
