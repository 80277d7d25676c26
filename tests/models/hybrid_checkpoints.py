"""Golden files' tensors in the layout of transformers' classes, written from those classes.

This code is independent of the package's reader. Names and layouts are those of transformers'
modules, in the order in which their `forward` splits them. With these weights transformers computes
the golden logits; see tests/data/checkpoints/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from support.paths import GOLDEN

import jax_q4k as jq

from .checkpoints import decoded

Named = Iterator[tuple[str, np.ndarray]]

_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_MLP = {f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_QWEN = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    **{
        f"ffn_{p}_shexp.weight": f"mlp.shared_expert.{p}_proj.weight"
        for p in ("gate", "up", "down")
    },
    "ssm_norm.weight": "linear_attn.norm.weight",
}
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
_GEMMA_ENDS = {
    **_ENDS,
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_DEEPSEEK = {
    **_ATTENTION,
    **_MLP,
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{
        f"ffn_{p}_shexp.weight": f"mlp.shared_experts.{p}_proj.weight"
        for p in ("gate", "up", "down")
    },
}
_LFM2 = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_LFM2_ENDS = {**_ENDS, "token_embd_norm.weight": "model.embedding_norm.weight"}

_NAMES = {
    "qwen35": (_ENDS, _QWEN),
    "qwen35moe": (_ENDS, _QWEN),
    "qwen3next": (_ENDS, _QWEN),
    "gemma4": (_GEMMA_ENDS, _GEMMA),
    "deepseek2": (_ENDS, _DEEPSEEK),
    "lfm2": (_LFM2_ENDS, _LFM2),
    "lfm2moe": (_LFM2_ENDS, _LFM2),
}


def tensors(name: str) -> dict[str, np.ndarray]:
    """Converts a golden file's tensors to float32, with the names of its transformers class."""
    (file,) = GOLDEN.glob(f"{name}.*.gguf")
    read = jq.gguf.read(file)
    kind = read.metadata["general.architecture"]
    sizes = {key.removeprefix(f"{kind}."): value for key, value in read.metadata.items()}
    layers = sizes["block_count"] - sizes.get("nextn_predict_layers", 0)
    ends, of_layers = _NAMES[kind]
    found: dict[str, np.ndarray] = {}
    for key, tensor in read.tensors.items():
        array = decoded(tensor)
        match = re.fullmatch(r"blk\.(\d+)\.(.*)", key)
        if match is None:
            if key != "rope_freqs.weight":  # transformers computes it
                found[ends[key]] = array
        elif int(match[1]) < layers:
            prefix, short = f"model.layers.{match[1]}.", match[2]
            named = (
                [(of_layers[short], array)]
                if short in of_layers
                else _others(kind, sizes, short, array)
            )
            found |= {prefix + inner: value for inner, value in named}
    if kind == "qwen3next":
        _join_qkvz(found, sizes)
    if kind == "deepseek2":
        _join_kv_b(found)
    if kind.startswith("qwen3"):  # their RMSNorm multiplies by 1 + weight, except for the gated one
        plain = ("linear_attn.norm.weight",)
        for key in found:
            if key.endswith("norm.weight") and not key.endswith(plain):
                found[key] = found[key] - np.float32(1)
    return found


def _others(kind: str, sizes: dict[str, Any], short: str, array: np.ndarray) -> Named:
    """Yields tensors with another layout, or parts of one."""
    key_heads, value_heads = sizes.get("ssm.group_count", 0), sizes.get("ssm.time_step_rank", 0)

    def grouped(rows: np.ndarray, size: int) -> np.ndarray:
        """Groups value heads by key head; transformers repeats each key head for its group.

        In files of Qwen 3.5 the value heads of a key head are as far apart as the number of key
        heads.
        """
        if kind == "qwen3next":
            return rows
        out, each = np.empty_like(rows), value_heads // key_heads
        for head in range(value_heads):
            place = head % each * key_heads + head // each
            out[head * size : (head + 1) * size] = rows[place * size : (place + 1) * size]
        return out

    head = sizes.get("ssm.state_size", 0)
    keys = 2 * key_heads * head
    if short in ("attn_qkv.weight", "ssm_conv1d.weight"):
        array = np.concatenate([array[:keys], grouped(array[keys:], head)])
        conv = short.startswith("ssm_conv1d")
        yield (
            ("linear_attn.conv1d.weight", array[:, None])
            if conv
            else ("linear_attn.in_proj_qkv.weight", array)
        )
    elif short == "attn_gate.weight":
        yield "linear_attn.in_proj_z.weight", grouped(array, head)
    elif short == "ssm_out.weight":
        yield "linear_attn.out_proj.weight", np.ascontiguousarray(grouped(array.T, head).T)
    elif short == "ssm_alpha.weight":
        yield "linear_attn.in_proj_a.weight", grouped(array, 1)
    elif short == "ssm_beta.weight":
        yield "linear_attn.in_proj_b.weight", grouped(array, 1)
    elif short == "ssm_ba.weight":
        yield "linear_attn.in_proj_ba.weight", array
    elif short == "ssm_dt.bias":
        yield "linear_attn.dt_bias", grouped(array, 1)
    elif short == "ssm_a":  # A = -exp(A_log)
        yield "linear_attn.A_log", np.log(-grouped(array, 1))
    elif short == "ffn_gate_inp_shexp.weight":
        yield "mlp.shared_expert_gate.weight", array[None]
    elif short == "shortconv.conv.weight":
        yield "conv.conv.weight", array[:, None]
    elif short in ("attn_k_b.weight", "attn_v_b.weight"):
        yield short, array
    else:
        part = re.fullmatch(r"ffn_(gate|up|down)_exps\.weight", short)
        assert part is not None, short
        if kind == "lfm2moe":
            inner = "feed_forward.experts.{}." + {"gate": "w1", "up": "w3", "down": "w2"}[part[1]]
        else:
            inner = "mlp.experts.{}." + f"{part[1]}_proj"
        for expert, matrix in enumerate(array):
            yield inner.format(expert) + ".weight", matrix


def _join_qkvz(found: dict[str, np.ndarray], sizes: dict[str, Any]) -> None:
    """Joins in_proj_qkvz: query, key, values and value gates of each key head in sequence."""
    heads, head = sizes["ssm.group_count"], sizes["ssm.state_size"]
    each = sizes["ssm.time_step_rank"] // heads * head
    for name in [name for name in found if name.endswith("in_proj_qkv.weight")]:
        prefix = name.removesuffix("in_proj_qkv.weight")
        qkv, z = found.pop(name), found.pop(f"{prefix}in_proj_z.weight")
        q, k, v = np.split(qkv, [heads * head, 2 * heads * head])
        rows = []
        for h in range(heads):
            rows += [q[h * head : (h + 1) * head], k[h * head : (h + 1) * head]]
            rows += [v[h * each : (h + 1) * each], z[h * each : (h + 1) * each]]
        found[f"{prefix}in_proj_qkvz.weight"] = np.concatenate(rows)


def _join_kv_b(found: dict[str, np.ndarray]) -> None:
    """Joins kv_b_proj: rows for the key of each head, then for its values."""
    for name in [name for name in found if name.endswith("attn_k_b.weight")]:
        prefix = name.removesuffix("attn_k_b.weight")
        k_b, v_b = found.pop(name), found.pop(f"{prefix}attn_v_b.weight")
        rows = [part for k, v in zip(k_b, v_b, strict=True) for part in (k.T, v)]
        found[f"{prefix}self_attn.kv_b_proj.weight"] = np.concatenate(rows)
