"""Rejects GGUF keys of features that the decoder lacks, and finds unknown keys.

Keys that llama.cpp reads for some architecture and that are missing here are rejected, because a
newer llama.cpp may use them for this one. Other unknown keys are ignored with a warning, and keys
that are read here for other architectures without one, as in llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_q4k.gguf import Fields

from ..architectures.base import Architecture

#: Keys that `Config.from_metadata` or the loader reads.
_READ = frozenset(
    """
    vocab_size context_length embedding_length block_count feed_forward_length nextn_predict_layers
    embedding_length_per_layer_input attn_logit_softcapping final_logit_softcapping
    embedding_scale residual_scale logit_scale leading_dense_block_count full_attention_interval
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.key_length_swa attention.value_length_swa attention.key_length_mla
    attention.value_length_mla attention.kv_lora_rank attention.q_lora_rank
    attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.recurrent_layers
    attention.scale attention.shared_kv_layers attention.sliding_window
    attention.sliding_window_pattern attention.temperature_scale
    expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length
    expert_shared_count expert_gating_func expert_group_count expert_group_used_count
    expert_weights_norm expert_weights_scale moe_every_n_layers
    classifier.output_labels
    dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out
    rope.dimension_count rope.dimension_count_swa rope.freq_base rope.freq_base_swa
    rope.rotated_layers
    rope.scale_linear rope.scaling.type rope.scaling.factor rope.scaling.attn_factor
    rope.scaling.finetuned rope.scaling.original_context_length
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier
    shortconv.l_cache ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size
    ssm.time_step_rank
    """.split()
)
#: Keys that never change the logits of text.
_HARMLESS = frozenset(
    """
    classifier.pooling_type decoder_start_token_id n_deepstack_layers pooling_type
    rope.dimension_sections tensor_data_layout
    """.split()
)
#: Keys of features of other architectures in llama.cpp; 0, false and empty values disable them.
_FEATURES = re.compile(
    r"(activation|attn_res|conv(next)?|hrm|hyper_connection|kda|ple|posnet|swiglu_clamp|wkv)[._].*"
    r"|attention\.(compress|decay|gate|group_norm|iclr|indexer|output|relative|value_residual)[._].*"
    r"|attention\.((key|value)_length_mla_swa|kv_lora_rank_swa|rope_pattern|value_scale)"
    r"|adapters\..*|block_size|expert_group_scale|expert_latent_length|experts_per_group"
    r"|hash_layer_count|hidden_activation|moe_latent_size|norm_before_(fc|residual)|num_loops"
    r"|rescale_every_n_layers|selector_(rank|top_k)|skip_loop_final_norm|ssm\.dt_b_c_rms|swin_norm"
    r"|time_(decay|mix)_extra_dim|token_shift_count"
)
_MAGNITUDE = "rope.scaling.yarn_attn_factor"
#: Key of an unsupported feature -> values that disable it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,),
    "interleave_moe_layer_step": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}


def check(get: Fields, kind: Architecture) -> None:
    """Raises GGUFError for values that a decoder of this kind would ignore.

    get: metadata of the architecture. The error names the key.
    """
    neutral = _NEUTRAL | _of_kind(kind)
    for key in get.values:
        if key == _MAGNITUDE:
            _check_magnitude(get)
        elif key in neutral:
            refuse(get, key, neutral[key])
        elif key not in _READ and _FEATURES.fullmatch(key) is not None:
            value = get.value(key, None)
            if value.any() if isinstance(value, np.ndarray) else value:
                get.fail(key, f"{value!r:.100} is not supported")


def unknown(metadata: Mapping[str, Any], architecture: str) -> list[str]:
    """Returns the keys under the architecture's name that nothing here knows."""
    prefix, known = f"{architecture}.", _READ.union(_HARMLESS, _NEUTRAL, (_MAGNITUDE,))
    keys = (key for key in metadata if key.startswith(prefix))
    own = ((key, key.removeprefix(prefix)) for key in keys)
    return [key for key, name in own if name not in known and not _FEATURES.fullmatch(name)]


def _check_magnitude(get: Fields) -> None:
    """Raises GGUFError for a magnitude other than YaRN's own.

    Converters write the magnitude, and llama.cpp ignores it.
    """
    value, factor = get.number(_MAGNITUDE), get.number("rope.scaling.factor", 1.0)
    default = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
    if value != 1 and not math.isclose(value, default, rel_tol=1e-5):
        get.fail(_MAGNITUDE, f"{value!r} is not supported, expected 1 or {default:g}")


def _of_kind(kind: Architecture) -> dict[str, tuple[Any, ...]]:
    """Returns the keys that only other architectures support, with their neutral values."""
    neutral: dict[str, tuple[Any, ...]] = {}
    if kind.bidirectional:
        neutral["attention.causal"] = (False,)
    if not kind.yarn_keys:
        neutral["rope.scaling.yarn_beta_fast"] = (32,)
        neutral["rope.scaling.yarn_beta_slow"] = (1,)
        neutral["rope.scaling.yarn_log_multiplier"] = (0,)
    if not kind.interleaved_experts:
        neutral["moe_every_n_layers"] = (0, 1)
    if not kind.temperature:
        neutral["attention.temperature_scale"] = (0,)
    if kind.experts and kind.routing.gating is not None:
        numbers = {"softmax": (0, 1), "sigmoid": (0, 2)}[kind.routing.gating]
        # 3 is a softmax over the selected logits, which equals a normalized softmax over all.
        neutral["expert_gating_func"] = (*numbers, 3) if kind.routing.normalize else numbers
    return neutral


def refuse(get: Fields, key: str, neutral: tuple[Any, ...]) -> None:
    """Raises GGUFError if a key has a value that is not one of `neutral`."""
    value = get.value(key, neutral[0])
    if isinstance(value, np.ndarray) or value not in neutral:
        get.fail(key, f"{value!r} is not supported")
